"""Every byte of every file: damage to it is found, named, and stepped over."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from elasticrun import Variables, register, save_all_states
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointWarning
from tests.support.generations import JOB, run_once

OLD, NEW = "checkpoint-00000001", "checkpoint-00000002"


@pytest.fixture
def job(memory: Path) -> Path:
    """Return the directory of a job of two checkpoints, as a script leaves it."""

    def script() -> None:
        torch.manual_seed(0)
        register(model=nn.Linear(3, 2))
        best = Variables(accuracy=0.25)
        save_all_states()
        best.accuracy = 0.75
        save_all_states()

    run_once(script, memory / "job")
    # The words of the generators are many, and of the same kind as the others.
    for name in (OLD, NEW):
        assert (memory / "job" / name / "random.ranks-0").stat().st_size > 10_000
    return memory / "job"


def damages(data: bytes, step: int) -> Iterator[bytes]:
    """Yield the content with each byte flipped, zeroed, and cut off with the rest."""
    for place in range(0, len(data), step):
        for byte in (data[place] ^ 1, data[place] ^ 0x80, 0):
            yield data[:place] + bytes([byte]) + data[place + 1 :]
        yield data[:place]
    yield data + b"\0"
    yield bytes(len(data))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "step"),
    [("manifest.json", 1), ("variables", 1), ("model", 3), ("random.ranks-0", 101)],
)
def test_any_byte_of_a_checkpoint(job: Path, name: str, step: int) -> None:
    path = job / NEW / name
    whole = path.read_bytes()
    store = CheckpointStore(job, job=JOB)
    text = re.compile(rf"{NEW} is skipped: {re.escape(str(path))}.* from {OLD}\.$")
    num_damages = 0
    for damaged in damages(whole, step):
        path.write_bytes(damaged)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = store.find_newest()
        assert found is not None
        told = [str(warning.message) for warning in caught]
        if damaged == whole:  # A zero was zeroed.
            assert (found.path.name, told) == (NEW, [])
        else:
            num_damages += 1
            assert found.path.name == OLD
            assert [bool(text.match(each)) for each in told] == [True], told
    assert num_damages > 300


def test_a_job_goes_on_from_the_one_before(job: Path) -> None:
    """The whole of it once for each file: the older values, a warning, a new save."""
    for name in ("manifest.json", "variables", "model", "random.ranks-0"):
        directory = job.with_name(f"after-{name}")
        shutil.copytree(job, directory)
        path = directory / NEW / name
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

        def script() -> float:
            accuracy: float = Variables(accuracy=0.0).accuracy
            assert save_all_states() is not None
            return accuracy

        with pytest.warns(CheckpointWarning, match=f"{NEW} is skipped"):
            assert run_once(script, directory) == 0.25
        assert run_once(lambda: Variables(accuracy=0.0).accuracy, directory) == 0.25


@pytest.mark.parametrize("name", ["generation", "lock"])
def test_any_byte_of_what_stands_beside(job: Path, name: str) -> None:
    path = job / name
    for damaged in damages(path.read_bytes(), 1):
        path.write_bytes(damaged)
        store = CheckpointStore(job, job=JOB)
        store.acquire(timeout=0)
        assert store.next_generation() > 0  # No number comes twice.
        found = store.find_newest()
        store.release()
        assert found is not None
        assert found.path.name == NEW
