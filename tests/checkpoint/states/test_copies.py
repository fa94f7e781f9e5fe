"""Small tensors are copied while training waits, and written as they were then."""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from elasticrun import Variables, current_job, register, request_checkpoint
from elasticrun.checkpoint.states.copies import StateCopier
from elasticrun.checkpoint.states.values import load_values, save_values
from tests.support.generations import run_once
from tests.support.held import Held
from tests.support.in_flight import batches, list_paths


def saved_bytes(values: Any) -> bytes:
    file = io.BytesIO()
    save_values(values, file)
    return file.getvalue()


def many() -> dict[str, Any]:
    return {
        "numbers": [1, 2.5, None, True, "text", 2**70],
        "tensors": [torch.full((n % 3, 2), float(n)) for n in range(10)],
        "others": (torch.tensor(3), torch.ones(2, 2, dtype=torch.bfloat16), {1, "a"}),
        "nested": OrderedDict(a={1: [torch.arange(3)], "b": ()}),
        "model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(),
        "scalar": np.float32(0.1),
    }


def test_a_copy_is_written_like_what_it_is_of() -> None:
    values, copies = many(), StateCopier()
    before = saved_bytes(values)
    for _ in range(2):  # The second one into the memory of the first.
        copy_of = copies.copy(values)
        assert copy_of is not None
        values["tensors"][1].add_(1)
        values["numbers"].append("more")
        values["nested"]["a"][1].clear()
        assert saved_bytes(copy_of()) == before
        values["tensors"][1].sub_(1)
        values["numbers"].pop()
        values["nested"]["a"][1].append(torch.arange(3))
    assert torch.equal(load_values(io.BytesIO(before))["tensors"][1], torch.ones(1, 2))


tied = torch.ones(4)


def described(row: dict[str, Any], **attributes: Any) -> OrderedDict[str, Any]:
    values = nn.Linear(2, 2).state_dict()
    vars(values).update(_metadata=OrderedDict({"": row}), **attributes)
    return values


@pytest.mark.parametrize(
    "values",
    [
        [tied, tied],
        [tied, tied[1:]],
        [torch.ones(1 << 20)],
        [torch.ones(3, requires_grad=True)],
        [nn.Parameter(torch.ones(3))],
        [torch.ones(3, 2).t()],
        [torch.ones(3).to_sparse()],
        [torch.ones(3, device="meta")],
        [torch.ones(3, dtype=torch.complex64)],
        [print],
        {b"key": 1},
        [2**2100],
        described({"version": 1, "by": print}),
        described({"version": 1}, author=print),
    ],
)
def test_what_cannot_be_copied_alike_is_written_at_once(values: Any) -> None:
    assert StateCopier().copy(values) is None


def test_many_small_tensors_are_written_by_another_thread(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers: set[str] = set()
    save = torch.save
    monkeypatch.setattr(
        torch,
        "save",
        lambda values, *args, **options: (
            writers.add(threading.current_thread().name) if "row" in values else None,
            save(values, *args, **options),
        ),
    )

    def script() -> None:
        net = nn.ParameterDict({f"row{n}": torch.zeros(8) for n in range(20)})
        kept = Variables(row=[torch.zeros(8) for _ in range(20)])
        net.register_buffer("row", torch.zeros(8))
        register(net=net)
        for _ in (loader := batches(4)):
            if loader.batch_index == 0:
                request_checkpoint()
            if loader.batch_index == 1:
                held.wait_for_writer()
                with torch.no_grad():
                    for tensor in (*net.parameters(), net.row, *kept.row):
                        tensor.add_(1)
                held.let_go()
        assert current_job().num_failed_saves == 0

    run_once(script, tmp_path)
    assert writers == {"elasticrun-writer"}
    for name in ("net", "variables"):
        loaded = torch.load(list_paths(tmp_path)[-1] / name, weights_only=True)
        rows = loaded["row"] if name == "variables" else loaded.values()
        assert all(tensor.sum() == 0 for tensor in rows)
