"""A batch of pieces is what one collate of all samples gives."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate

from elasticrun.data.workers.lanes import joined

Pair = namedtuple("Pair", "x y")

KINDS = {
    "tensors": lambda n: torch.arange(n, n + 3),
    "numbers": float,
    "strings": str,
    "arrays": lambda n: np.full((2, 2), n, np.int16),
    "tuples": lambda n: (n, str(n)),
    "lists": lambda n: [str(n), torch.tensor(n)],
    "dictionaries": lambda n: {"a": n, "b": {"c": (str(n), n > 3)}},
    "empty lists": lambda n: {"tags": [], "n": n},
    "ordered": lambda n: OrderedDict(x=n),
    "named": lambda n: Pair(n, bytes([n])),
}


@pytest.mark.parametrize("kind", KINDS)
@given(workers=st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_pieces_make_the_batch(kind: str, workers: list[int]) -> None:
    samples = [KINDS[kind](number) for number in range(len(workers))]
    places = [
        [at for at, worker in enumerate(workers) if worker == each] for each in range(3)
    ]
    places = [own for own in places if own]
    pieces = [default_collate([samples[at] for at in own]) for own in places]
    assert_same(joined(pieces, places), default_collate(samples))


def assert_same(one: Any, other: Any) -> None:
    assert type(one) is type(other)
    if isinstance(other, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(other, dict):
        assert list(one) == list(other)
        assert_same(list(one.values()), list(other.values()))
    elif isinstance(other, (list, tuple)):
        assert len(one) == len(other)
        for own, others in zip(one, other, strict=True):
            assert_same(own, others)
    else:
        assert one == other
