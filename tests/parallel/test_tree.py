"""The tree in which shares are added: one order, whoever adds which run of them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from elasticrun.data.order.partition import partition
from elasticrun.parallel.tree import TreeSum

# Where the order of additions decides about the last bits.
NUMBERS = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, -0.0, 1e30, -1e30])


def direct(values: dict[int, Tensor], start: int, stop: int) -> Tensor | None:
    """Return the sum over shares as the tree is defined: its halves, or the one."""
    if stop - start == 1:
        return values.get(start)
    middle = (start + stop) // 2
    halves = [direct(values, start, middle), direct(values, middle, stop)]
    there = [half for half in halves if half is not None]
    return there[0] + there[1] if len(there) == 2 else next(iter(there), None)


def bits(value: Tensor) -> list[int]:
    return value.view(torch.int32).tolist()


@given(st.data(), st.integers(1, 20), st.integers(1, 20))
def test_any_runs_of_shares_add_up_as_the_tree(
    data: st.DataObject, num_shares: int, num_processes: int
) -> None:
    there = data.draw(st.sets(st.integers(0, num_shares - 1), min_size=1))
    values = {share: torch.tensor([data.draw(NUMBERS)]) for share in there}
    size = 1 << (num_shares - 1).bit_length()
    expected = direct(values, 0, size)
    assert expected is not None
    top, most = TreeSum(), 0
    num_processes = min(num_processes, num_shares)
    for rank in range(num_processes):
        run = partition(range(num_shares), rank, num_parts=num_processes)
        own = TreeSum(run.start)
        for share in run:
            if share in there:
                own.add(share, values[share].clone())
        for share, value in own.nodes_before(run.stop):
            # What nobody has is -0.0 on its way, and adds nothing.
            top.add(share, value + torch.tensor(-0.0))
        most = max(most, len(own.nodes))
    assert bits(top.total()) == bits(expected)
    assert most <= num_shares.bit_length() + 1


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
