"""The tree in which shares are added: one order, whoever adds which run of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from elasticrun.data.order.shares import partition
from elasticrun.parallel.tree import TreeSum

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
