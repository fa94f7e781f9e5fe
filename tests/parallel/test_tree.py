"""The tree in which shares are added: one order, whoever adds which run of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from elasticrun.data.order.shares import partition
from elasticrun.parallel.tree import TreeReduction, TreeSum
from elasticrun.testing import run_generation

# Where the order of additions decides about the last bits.
KINDS: list[Callable[[random.Random], float]] = [
    lambda numbers: numbers.gauss(0.0, 1e3),
    lambda numbers: numbers.gauss(0.0, 1e-3),
    lambda numbers: numbers.choice([0.0, -0.0, 1e30, -1e30]),
]


def direct(values: dict[int, Tensor], start: int, stop: int) -> Tensor | None:
    """Return the sum over shares as the tree is defined: its halves, or the one."""
    if stop - start == 1:
        return values.get(start)
    middle = (start + stop) // 2
    halves = [direct(values, start, middle), direct(values, middle, stop)]
    there = [half for half in halves if half is not None]
    return there[0] + there[1] if len(there) == 2 else next(iter(there), None)


def bits(value: Tensor) -> list[int]:
    found: list[int] = value.view(torch.int32).tolist()
    return found


@pytest.mark.parametrize("num_shares", range(1, 18))
def test_any_runs_of_shares_add_up_as_the_tree(num_shares: int) -> None:
    numbers = random.Random(num_shares)
    for num_processes, is_whole in itertools.product(
        range(1, num_shares + 1), (True, False, False)
    ):
        there = [s for s in range(num_shares) if is_whole or numbers.random() < 0.6]
        values = {s: torch.tensor([numbers.choice(KINDS)(numbers)]) for s in there}
        expected = direct(values, 0, 1 << (num_shares - 1).bit_length())
        top = TreeSum()
        for rank in range(num_processes):
            run = partition(range(num_shares), rank, num_parts=num_processes)
            own = TreeSum(run.start)
            for share in run:
                if share in there:
                    own.add(share, values[share].clone())
            nodes = own.nodes_before(run.stop)
            assert len(nodes) <= 2 * num_shares.bit_length()
            for share, value in nodes:
                # What nobody has is -0.0 on its way, and adds nothing.
                top.add(share, value + torch.tensor(-0.0))
        if expected is not None:
            assert bits(top.total()) == bits(expected), (num_processes, there)


def test_a_look_at_a_sum_leaves_it_as_it_is() -> None:
    tree = TreeSum()
    for share in range(3):
        tree.add(share, torch.tensor([2.0**share]))
    assert tree.total() == 7
    assert tree.plus(2, torch.tensor([8.0])).total() == 15
    assert tree.plus(3, torch.tensor([8.0])).total() == 15
    assert tree.total() == 7
    tree.add(2, torch.tensor([8.0]))  # A share that is cut.
    assert tree.total() == 15


@pytest.mark.parametrize("num_shares", [1, 2, 3, 7, 64])
def test_a_process_holds_few_sums(num_shares: int) -> None:
    tree = TreeSum()
    for share in range(num_shares):
        tree.add(share, torch.ones(()))
        assert len(tree.nodes) <= num_shares.bit_length() + 1
    assert tree.total() == num_shares


def test_memory_of_what_was_added_up_is_put_back() -> None:
    spare: list[Tensor] = []
    tree, values = TreeSum(spare=spare), [torch.ones(()) for _ in range(5)]
    for share, value in enumerate(values):
        tree.add(share, value)
    assert [id(each) for each in spare] == [id(values[n]) for n in (1, 3, 2)]
    assert tree.total() == 5
    assert len(spare) == 3  # A look needs its own.


# What processes send each other, bucket by bucket.

SIZES = [(2, 3), (4,), (1, 5), (3,), (2,)]
Pieces = dict[tuple[int, int], list[Tensor]]  # By share and parameter.


def random_pieces(numbers: random.Random, num_shares: int) -> Pieces:
    """Return what shares have of some gradients; a gradient may come in two pieces."""
    return {
        (share, number): [
            torch.tensor([numbers.choice(KINDS)(numbers) for _ in range(16)])[
                : torch.Size(size).numel()
            ].view(size)
            for _ in range(numbers.choice([0, 1, 1, 1, 2]))
        ]
        for share in range(num_shares)
        for number, size in enumerate(SIZES)
    }


def means_of(tree: TreeReduction, pieces: Pieces, run: range, order: list[int]) -> Any:
    """Have gradients come in an order, each last piece behind a look at the others."""
    sums: dict[int, TreeSum] = {}
    tree.begin_pass()
    for number, has_all in [(n, False) for n in order] + [(n, True) for n in order]:
        for share in run:
            is_last = share == run[-1]
            there = pieces[share, number]
            kept = there[:1] if is_last else there
            for piece in kept if not has_all else there[1:] if is_last else ():
                sums.setdefault(number, tree.new_sum()).add(share, piece.clone())
        if not has_all or len(pieces[run[-1], number]) > 1:
            tree.send_ready(number, sums.get)
    return tree.means(sums.get)


def compare_with_one_process() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for num_shares, trial in itertools.product(range(size, 9), range(4)):
        numbers = random.Random(f"{num_shares} {trial}")
        parameters = [nn.Parameter(torch.zeros(each)) for each in SIZES]
        alone, shared = (
            TreeReduction(
                parameters,
                num_shares=num_shares,
                rank=r,
                size=s,
                bucket_mib=24 / 2**20,
            )
            for r, s in ((0, 1), (rank, size))
        )
        run = partition(range(num_shares), rank, num_parts=size)
        own = random.Random(f"{num_shares} {trial} {rank}")
        for _ in range(2):
            pieces = random_pieces(numbers, num_shares)
            order = own.sample(range(len(SIZES)), len(SIZES))
            found = means_of(shared, pieces, run, order)
            wanted = means_of(alone, pieces, range(num_shares), order)
            assert found.keys() == wanted.keys()
            for number, mean in found.items():
                assert bits(mean) == bits(wanted[number]), (num_shares, trial, number)


def compare_in_group() -> None:
    dist.init_process_group("gloo")
    compare_with_one_process()


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.wide)])
def test_buckets_that_are_sent_early_or_again_come_to_what_one_process_adds(
    size: int,
) -> None:
    run_generation(compare_in_group, size)
