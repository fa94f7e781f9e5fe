"""States whose entries are replaced are refused at the load, or do no harm."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
import shutil
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointError,
    LoopOrderError,
    Variables,
    once,
    remaining_epochs_until,
    remaining_steps_until,
    save_all_states,
)
from elasticrun.job.noise import NoiseRecord
from tests.support.data import Numbers
from tests.support.generations import generation

VALUES = [None, True, "x", [], {}, [1, 2], 0, -1, -8, 10**30, 0.5, math.nan, math.inf]


def train(num_steps: int) -> None:
    """Use a state of each small kind; save after so many steps, and go on."""
    Variables(best=0.0)
    net = AdaptiveDataParallel(nn.Linear(1, 1))
    once("announced")
    NoiseRecord("noise")
    sums, named = Accumulator(), Accumulator(name="named")
    loader = AdaptiveDataLoader(Numbers(12), batch_size={0: 2, 4: 4}, shuffle=True)
    passes = AdaptiveDataLoader(Numbers(8), batch_size=4, name="passes")
    for _ in remaining_steps_until(1):
        pass
    for _ in remaining_epochs_until(2):
        own = Accumulator()
        for batch in loader:
            net(torch.as_tensor(batch).float().reshape(-1, 1)).mean().backward()
            for total in (sums, named, own):
                total["n"] += len(batch)
            num_steps -= 1
            if num_steps == 0:
                save_all_states()
        for _ in passes.batches(3):
            pass
        with sums.synchronized(), named.synchronized(), own.synchronized():
            named["seen"] = named["n"]
        save_all_states()


def paths(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(values, list | tuple):
        values = dict(enumerate(values))
    for key, inner in values.items() if isinstance(values, dict) else ():
        yield from paths(inner, (*path, key))


def mutations(values: Any) -> Iterator[tuple[str, Any]]:
    for path in paths(values):
        for new in (*VALUES, ...):
            changed = copy.deepcopy(values)
            inner = changed
            for key in path[:-1]:
                inner = inner[key]
            if new is ...:
                del inner[path[-1]]
            else:
                inner[path[-1]] = new
            yield f"{path} = {new!r}", changed
    if isinstance(values, dict):
        yield "additional", {**values, "additional": math.inf}


def decoded(data: bytes) -> tuple[Any, bool]:
    try:
        return json.loads(data), False
    except ValueError:
        return torch.load(io.BytesIO(data), weights_only=True), True


def encoded(values: Any, is_torchs: bool) -> bytes:
    if not is_torchs:
        return json.dumps(values).encode()
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def put(folder: Path, name: str, data: bytes) -> None:
    """Put a file into a checkpoint, with a manifest that says so."""
    (folder / name).write_bytes(data)
    path = folder / "manifest.json"
    fields = json.loads(path.read_bytes())
    for entry in fields["files"]:
        if entry["name"] == name:
            entry.update(size=len(data), crc32=f"{zlib.crc32(data):08x}")
    sign(path, fields)


def sign(path: Path, fields: dict[str, Any]) -> None:
    fields.pop("crc32", None)
    body = json.dumps(fields, indent=2).removesuffix("\n}").encode()
    path.write_bytes(body + b',\n  "crc32": "%08x"\n}\n' % zlib.crc32(body))


NAMES = (
    r"once|remaining-steps|accumulator.*|named|noise|.*noise|loader.*|manifest\.json"
)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    with generation(tmp_path / "made"):
        train(2)
    for late in sorted((tmp_path / "made").glob("checkpoint-*"))[1:]:
        shutil.rmtree(late)
    return tmp_path / "made"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("share", [0.15, pytest.param(1.0, marks=pytest.mark.soak)])
def test_an_entry_that_cannot_be_is_refused_at_the_load(
    made: Path, tmp_path: Path, share: float
) -> None:
    (checkpoint,) = made.glob("checkpoint-*")
    draw = random.Random(0)
    crashed = []
    for file in sorted(checkpoint.iterdir()):
        if not re.fullmatch(NAMES, file.name):
            continue
        values, is_torchs = decoded(file.read_bytes())
        is_manifest = file.name == "manifest.json"
        part = values["position"] if is_manifest else values
        for words, changed in mutations(part):
            if draw.random() > share:
                continue
            job = tmp_path / "job"
            shutil.copytree(made, job)
            if is_manifest:
                path = job / checkpoint.name / file.name
                sign(path, {**values, "position": changed})
            else:
                data = encoded(changed, is_torchs)
                put(job / checkpoint.name, file.name, data)
            try:
                with generation(job):
                    train(0)
            except (CheckpointError, LoopOrderError):
                pass
            except Exception as error:
                crashed.append(f"{file.name}{words}: {error!r}")
            shutil.rmtree(job)
    assert crashed == []
