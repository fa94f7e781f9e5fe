"""Batches that the loader delivers on a device."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, request_stop
from tests.support.data import Numbers
from tests.support.generations import run_once

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
