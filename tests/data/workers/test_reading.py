"""Samples are read as asked for, with draws that depend on seed and position alone."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.random import mtrand
from torch.utils.data import Dataset, Subset, default_collate

from elasticrun.data.workers.reader import Reader

Draws = tuple[int, float, float, float, float]


def draw(index: int) -> Draws:
    """Return the index and a number from every generator that a transform may use."""
    return (
        index,
        random.random(),
        np.random.rand(),
        float(np.random.standard_normal()),
        float(torch.rand((), dtype=torch.float64)),
    )


class ByItem:
    """A data set with `__getitem__` alone."""

    def __getitem__(self, index: int) -> Draws:
        return draw(index)

    def __len__(self) -> int:
        return 100


class ByBatch(Dataset[Draws]):
    """A data set with `__getitems__` alone."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []

    def __getitems__(self, indices: list[int]) -> list[Draws]:
        self.calls.append(indices)
        return [draw(index) for index in indices]


class ByBoth(ByBatch):
    def __getitem__(self, index: int) -> Draws:
        return draw(index)


class Broken:
    def __getitem__(self, index: int) -> Draws:
        draw(index)
        raise OSError("the disk is gone")


def test_a_batch_goes_to_getitems_in_one_call() -> None:
    dataset = ByBoth()
    Reader(dataset).__getitems__(([5, 3], 0))
    Reader(dataset).__getitems__(([7, 8], 1))
    assert dataset.calls == [[5, 3], [7, 8]]


def test_sample_by_sample_uses_getitem_where_there_is_one() -> None:
    by_both, by_batch = ByBoth(), ByBatch()
    request = ([5, 3], [1, 2])
    assert Reader(by_both).__getitems__(request) == Reader(by_batch).__getitems__(
        request
    )
    assert by_both.calls == []
    assert by_batch.calls == [[5], [3]]


def test_a_batch_depends_on_its_seed_alone() -> None:
    reader = Reader(ByItem())
    first = reader.__getitems__(([5, 3], 77))
    draw(0)
    assert reader.__getitems__(([5, 3], 77)) == first
    assert reader.__getitems__(([5, 3, 4], 77))[:2] == first
    other = reader.__getitems__(([5, 3], 78))
    assert not set(first[0][1:]) & set(other[0][1:])


def test_a_sample_depends_on_its_seed_alone() -> None:
    reader = Reader(ByItem())
    whole = reader.__getitems__(([5, 3, 9, 9], [70, 71, 72, 73]))
    parts = [
        *reader.__getitems__(([9, 9], [72, 73])),
        *reader.__getitems__(([5, 3], [70, 71])),
    ]
    assert parts == [*whole[2:], *whole[:2]]
    assert len({sample[1] for sample in whole}) == 4


def test_each_index_needs_its_seed() -> None:
    with pytest.raises(ValueError, match="shorter"):
        Reader(ByItem()).__getitems__(([5, 5], [3]))


@pytest.mark.parametrize("seed", [2**64 - 1, [2**64 - 1]])
def test_a_data_set_may_hand_out_its_seed(seed: int | list[int]) -> None:
    class Seeds:
        def __getitem__(self, index: int) -> int:
            return torch.initial_seed()

    collated = default_collate(Reader(Seeds()).__getitems__(([0], seed)))
    assert collated.tolist() == [2**63 - 1]


@pytest.mark.parametrize("seed", [0, [0]])
def test_a_data_set_without_access_raises_what_torch_raises(
    seed: int | list[int],
) -> None:
    with pytest.raises(NotImplementedError, match="__getitem__"):
        Reader(Dataset()).__getitems__(([0], seed))


@pytest.mark.parametrize("seed", [0, 5, 2**32 + 5, 2**64 - 1])
def test_no_two_generators_draw_the_same(seed: int) -> None:
    # Python, NumPy and torch all have Mersenne twisters of 32-bit words.
    class Words:
        def __getitem__(self, index: int) -> tuple[list[int], list[int], list[int]]:
            return (
                [random.getrandbits(32) for _ in range(50)],
                np.random.randint(0, 2**32, 50, np.uint32).tolist(),
                torch.empty(50, dtype=torch.int64).random_(2**32).tolist(),
            )

    [(python, numpy, of_torch)] = Reader(Words()).__getitems__(([0], seed))
    assert not set(python) & set(numpy)
    assert not set(python) & set(of_torch)
    assert not set(numpy) & set(of_torch)


@pytest.mark.parametrize("seed", [77, [77, 78]])
@pytest.mark.parametrize("num_normals", [0, 1, 2])
def test_the_programs_generators_continue_undisturbed(
    seed: int | list[int], num_normals: int
) -> None:
    def program(between: Callable[[], object]) -> list[Draws]:
        random.seed(3)
        np.random.seed(3)
        torch.default_generator.manual_seed(3)
        # NumPy draws normals in pairs and keeps the second: it must survive too.
        np.random.standard_normal(num_normals)
        torch.randn(num_normals)
        random.gauss(0.0, 1.0)
        drawn = []
        for index in range(3):
            between()
            drawn.append(draw(index))
        return drawn

    reader = Reader(ByItem())
    undisturbed = program(lambda: None)
    assert program(lambda: reader.__getitems__(([5, 3], seed))) == undisturbed


@pytest.mark.parametrize("seed", [77, [77]])
def test_they_continue_after_an_exception(seed: int | list[int]) -> None:
    random.seed(3)
    np.random.seed(3)
    torch.default_generator.manual_seed(3)
    expected = [draw(0), draw(1)]
    random.seed(3)
    np.random.seed(3)
    torch.default_generator.manual_seed(3)
    assert draw(0) == expected[0]
    with pytest.raises(OSError, match="the disk is gone"):
        Reader(Broken()).__getitems__(([0], seed))
    assert draw(1) == expected[1]


def test_the_programs_numpy_state_is_what_it_was() -> None:
    np.random.seed(3)
    np.random.standard_normal()
    generator, before = mtrand.get_bit_generator(), np.random.get_state(legacy=False)
    Reader(ByItem()).__getitems__(([0], 77))
    assert mtrand.get_bit_generator() is generator
    after = np.random.get_state(legacy=False)
    np.testing.assert_equal(after, before)


def test_a_reader_in_a_reader_leaves_the_outer_draws_alone() -> None:
    class Nested:
        def __getitem__(self, index: int) -> Draws:
            Reader(ByItem()).__getitems__(([0], 1))
            return draw(index)

    request = ([5, 3], 77)
    assert Reader(Nested()).__getitems__(request) == Reader(ByItem()).__getitems__(
        request
    )


def test_pickles_with_its_data_set() -> None:
    reader = pickle.loads(pickle.dumps(Reader(Subset(ByBoth(), range(3)))))
    request = ([2, 0], 77)
    assert reader.__getitems__(request) == Reader(ByItem()).__getitems__(request)
