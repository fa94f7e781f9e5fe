"""States whose entries are replaced are refused at the load, or do no harm."""

from __future__ import annotations

import io
import json
import random
import re
import shutil
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun import CheckpointError, LoopOrderError
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.values import load_values
from elasticrun.job.replay import ReplayedStates
from tests.support.generations import Crash, generation
from tests.support.hostile import PROGRAMS, Program, damaged

MANIFEST = "manifest.json"
LOADING = {
    Registry.load.__code__,
    Registry.load_alone.__code__,
    ReplayedStates.pass_anchor.__code__,  # Where the state is known that it has.
    ReplayedStates.remember.__code__,
}


def decoded(data: bytes) -> tuple[Any, bool]:
    try:
        return json.loads(data), False
    except ValueError:
        return load_values(io.BytesIO(data)), True


def encoded(values: Any, is_torchs: bool) -> bytes:
    if not is_torchs:
        return json.dumps(values).encode()
    buffer = io.BytesIO()
    torch.save(values, buffer)
    return buffer.getvalue()


def put(folder: Path, name: str, data: bytes) -> None:
    """Put a file into a checkpoint, with a manifest that says so."""
    (folder / name).write_bytes(data)
    path = folder / MANIFEST
    fields = json.loads(path.read_bytes())
    for entry in fields["files"]:
        if entry["name"] == name:
            entry.update(size=len(data), crc32=f"{zlib.crc32(data):08x}")
    sign(path, fields)


def sign(path: Path, fields: dict[str, Any]) -> None:
    fields.pop("crc32", None)
    body = json.dumps(fields, indent=2).removesuffix("\n}").encode()
    path.write_bytes(body + b',\n  "crc32": "%08x"\n}\n' % zlib.crc32(body))


def make(program: Program, folder: Path) -> Path:
    """Return the checkpoint that the program saved in its third step, the only one."""
    with pytest.raises(Crash), generation(folder):
        program(3)
    *earlier, newest = sorted(folder.glob("checkpoint-*"))
    for each in earlier:
        shutil.rmtree(each)
    return newest


def fault_of(program: Program, checkpoint: Path, file_name: str) -> str:
    """Go on from a damaged checkpoint; return what went wrong, or nothing.

    It may be refused where the state is loaded, with its name, or train on from just
    that checkpoint.
    """
    state = re.sub(r"\.ranks?-\d+$", "", file_name)
    is_manifest, has_begun = file_name == MANIFEST, False
    try:
        with generation(checkpoint.parent) as job:
            has_begun = True
            newest = job.newest_checkpoint
            if newest is None or newest.path.name != checkpoint.name:
                return f"goes on from {newest and newest.path.name}"
            program(0)
    except CheckpointError as error:
        frames = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
        if has_begun and not is_manifest and not frames & LOADING:
            return f"is refused later: {error!r}"
        names = [checkpoint.name, "should continue"] if is_manifest else [state]
        is_named = any(name in str(error) for name in names)
        return "" if is_named else f"does not name {state}: {error}"
    except LoopOrderError as error:
        # Another program might have that place; the loop says that there is none here.
        is_place = is_manifest or re.match(r"remaining-steps|loader", state)
        is_said = is_place and "the checkpoint" in str(error)
        return "" if is_said else repr(error)
    except Exception as error:
        # At another place that might be, more steps remain than the schedule has.
        is_place = is_manifest and "Tried to step" in str(error)
        return "" if is_place else repr(error)
    return ""


def faults_of(
    name: str, folder: Path, is_tried: Callable[[str], bool]
) -> tuple[int, list[str]]:
    """Damage a program's checkpoint in many ways; return how many, and the faults.

    Args:
        is_tried: Whether to try what is damaged, in words.
    """
    program = PROGRAMS[name]
    checkpoint = make(program, folder / "made")
    shutil.copytree(folder / "made", folder / "whole")
    assert fault_of(program, folder / "whole" / checkpoint.name, MANIFEST) == ""
    faults, num_tried = [], 0
    for file in sorted(checkpoint.iterdir()):
        values, is_torchs = decoded(file.read_bytes())
        is_manifest = file.name == MANIFEST
        part = values["position"] if is_manifest else values
        for words, changed in damaged(part, has_tensors=is_torchs):
            if not is_tried(f"{file.name}{words}"):
                continue
            num_tried += 1
            job = folder / "job"
            shutil.copytree(folder / "made", job)
            copy = job / checkpoint.name
            if is_manifest:
                sign(copy / file.name, {**values, "position": changed})
            else:
                put(copy, file.name, encoded(changed, is_torchs))
            with warnings.catch_warnings():
                # NumPy's and torch's of a number that is none; elasticrun's are logged.
                warnings.simplefilter("ignore")
                fault = fault_of(program, copy, file.name)
            if fault:
                faults.append(f"{file.name}{words}: {fault}")
            shutil.rmtree(job)
    return num_tried, faults


@pytest.mark.slow(20)
@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("is_all", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_an_entry_that_cannot_be_is_refused_at_the_load(
    tmp_path: Path, name: str, is_all: bool
) -> None:
    draw = random.Random(0)
    share = 1.0 if is_all else 0.005 if name == "learn" else 0.02  # That has the most.
    num_tried, faults = faults_of(name, tmp_path, lambda _: draw.random() <= share)
    assert num_tried > 10
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("learn", "metric('mean_value',) = tensor(2)"),
        ("learn", "metric('_update_count',) = tensor([])"),
        ("schedule", "sequence('_schedulers', 1, 'step_size') = 0"),
    ],
)
def test_so_is_what_a_step_much_later_would_find(
    tmp_path: Path, name: str, words: str
) -> None:
    assert faults_of(name, tmp_path, words.__eq__) == (1, [])
