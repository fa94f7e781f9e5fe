"""Batches that the loader delivers on a device."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, request_stop
from elasticrun.checkpoint.states.generators import seed_all
from elasticrun.data.workers.device import is_read_ahead, on_device
from tests.support.data import Draws, Numbers
from tests.support.generations import draw_from_each, run_once

pytestmark = pytest.mark.usefixtures("job")


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


def nested(samples: list[int]) -> dict[str, Any]:
    x = torch.tensor(samples)
    return {
        "tensor": x,
        "list": [x, (x, "text")],
        "named": Pair(x, None),
        "packed": pack_sequence([x]),
        "ordered": OrderedDict(x=x),
        "number": 3,
    }


def test_everything_in_a_batch_is_moved() -> None:
    loader = AdaptiveDataLoader(Numbers(4), 2, collate_fn=nested, device="meta")
    for batch in loader:
        assert batch["number"] == 3
        assert batch["list"][1][1] == "text"
        assert isinstance(batch["named"], Pair)
        assert isinstance(batch["packed"], PackedSequence)
        assert type(batch["ordered"]) is OrderedDict
        tensors = (
            batch["tensor"],
            batch["list"][0],
            batch["list"][1][0],
            batch["named"].x,
            batch["packed"].data,
            batch["ordered"]["x"],
        )
        assert {tensor.device.type for tensor in tensors} == {"meta"}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_batch_counts_when_the_program_has_used_it(
    num_workers: int, tmp_path: Path
) -> None:
    samples: list[int] = []

    def script(stop_in: int = -1) -> None:
        loader = AdaptiveDataLoader(
            TensorDataset(torch.arange(20)),
            3,
            shuffle=True,
            device="cpu",
            num_workers=num_workers,
        )
        for (x,) in loader:
            samples.extend(x.tolist())
            if loader.batch_index == stop_in:
                request_stop()

    run_once(lambda: script(2), tmp_path)
    assert len(samples) == 9
    run_once(script, tmp_path)
    assert sorted(samples) == list(range(20))


CPU = torch.device("cpu")  # Whose streams are torch's, and do nothing.


def test_the_next_batch_is_asked_for_before_this_one_is_handed_out() -> None:
    seen: list[str] = []

    def batches() -> Iterator[torch.Tensor]:
        for number in range(3):
            seen.append(f"read {number}")
            yield torch.tensor(number)

    ahead = on_device(batches(), CPU, is_ahead=True)
    for number in ahead:
        seen += [f"use {int(number)}"]
    assert seen == ["read 0", "read 1", "use 0", "read 2", "use 1", "use 2"]
    assert list(on_device(iter([]), CPU, is_ahead=True)) == []


def test_what_is_read_ahead_draws_nothing_of_the_programs_generators(
    tmp_path: Path,
) -> None:
    """As on a GPU: a batch that comes again after a stop must be the same one."""
    assert [is_read_ahead(each) for each in (None, CPU, torch.device("cuda"))] == [
        False,
        False,
        True,
    ]
    seen: list[Any] = []

    def script(stop_in: int = -1) -> None:
        seed_all(0)
        loader = AdaptiveDataLoader(Draws(9), 2, name="train", device=CPU)
        loader._is_ahead = True
        for batch in loader:
            seen.append([*batch.tolist(), draw_from_each()])
            if loader.batch_index == stop_in:
                request_stop()

    run_once(script)
    whole, seen = seen, []
    run_once(lambda: script(1), tmp_path)
    run_once(script, tmp_path)
    assert seen == whole
    assert len(whole) == 5
