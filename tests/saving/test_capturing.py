"""What is captured is what the program has computed, wherever it did."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import BinaryIO

import psutil
import pytest
import torch

from elasticrun import State, save_all_states
from elasticrun.testing import Job


class Noting(State):
    """Notes when it is saved."""

    def __init__(self, events: list[str]) -> None:
        super().__init__("noting")
        self.events = events

    def save(self, fileobj: BinaryIO) -> None:
        self.events.append("saved")
        fileobj.write(b"-")

    def load(self, fileobj: BinaryIO) -> None:
        del fileobj


def test_gpus_come_to_their_end_first(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the process uses; here is none, so torch's answers are made up."""
    events: list[str] = []
    for name, stand_in in {
        "is_initialized": lambda: True,
        "device_count": lambda: 3,
        "memory_reserved": lambda number: 4096 * (number != 1),
        "get_rng_state_all": list,
        "synchronize": lambda number: events.append(f"waited for {number}"),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    Noting(events)
    save_all_states()
    assert events == ["waited for 0", "waited for 2", "saved"]


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_left_as_the_program_has_it(
    job: Job, is_enabled: bool
) -> None:
    class Looking(Noting):
        def save(self, fileobj: BinaryIO) -> None:
            assert not gc.isenabled()
            super().save(fileobj)
            raise ValueError("a mistake")

    was_enabled = gc.isenabled()
    events: list[str] = []
    Looking(events)
    (gc.enable if is_enabled else gc.disable)()
    try:
        with pytest.raises(ValueError, match="a mistake"):
            job.boundary.save(is_awaited=False)
        assert (events, gc.isenabled()) == (["saved"], is_enabled)
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_training_that_waits_for_a_save_has_no_copy_made(
    job: Job, tmp_path: Path
) -> None:
    """The first touch of as much memory again takes longer than the disk does."""
    found: list[int] = []

    class Large(State):
        def save(self, fileobj: BinaryIO) -> None:
            fileobj.write(bytes(1 << 20))
            files = tmp_path.rglob("large")
            found.append(sum(file.stat().st_size for file in files))

        def load(self, fileobj: BinaryIO) -> None:
            del fileobj

    Large("large")
    save_all_states()
    assert found == [1 << 20]
    job.boundary.save(is_awaited=False)
    assert found == [1 << 20, 1 << 20]  # Of the checkpoint before alone.


def test_memory_for_copies_is_free_when_successors_are_left_the_last_save(
    job: Job,
) -> None:
    """Files take a tenth of the time where the system has pages at hand."""
    size = 64 << 20
    resident: list[int] = []

    class Large(State):
        def save(self, fileobj: BinaryIO) -> None:
            resident.append(psutil.Process().memory_info().rss)
            for _ in range(size >> 20):
                fileobj.write(bytes(1 << 20))

        def load(self, fileobj: BinaryIO) -> None:
            del fileobj

    Large("large")
    job.boundary.save(is_awaited=False)
    job.boundary.save()
    job.boundary.save(is_left=True)
    assert resident[1] - resident[2] > 0.9 * size
