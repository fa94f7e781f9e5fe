"""States are told that the save in which they were captured was committed."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import BinaryIO

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    CheckpointWarning,
    State,
    request_checkpoint,
    save_all_states,
)
from elasticrun.testing import run_generation
from tests.support.data import Numbers
from tests.support.full_disk import no_space
from tests.support.generations import run_once
from tests.support.held import Held
from tests.support.in_flight import batches, is_writing
from tests.support.stage import wait_until


class Told(State):
    """Notes what was captured last at each commit that it is told of."""

    def __init__(self, name: str = "told") -> None:
        self.value = 0
        self.captured = -1
        self.committed_values: list[int] = []
        super().__init__(name)

    def sync(self) -> None:
        self.captured = self.value

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(b"%d" % self.value)

    def load(self, fileobj: BinaryIO) -> None:
        self.value = int(fileobj.read())

    def committed(self) -> None:
        assert threading.current_thread() is threading.main_thread()
        self.committed_values.append(self.captured)


def test_a_state_is_told_of_each_commit_and_of_no_failure(
    tmp_path: Path, held: Held
) -> None:
    def script() -> list[int]:
        state = Told()
        for _ in (loader := batches(30)):
            state.value = index = loader.batch_index
            if index in (0, 10):
                held.hold_again()
                held.error = no_space() if index == 10 else None
                request_checkpoint()
            if index in (2, 12):
                held.wait_for_writer()
                assert state.committed_values == ([] if index == 2 else [0])
                held.let_go()
                wait_until(lambda: not is_writing())
            if index == 5:
                assert state.committed_values == [0]  # At the boundary after its end.
            if index == 15:
                assert state.committed_values == [0]
                held.error = None
                save_all_states()
                assert state.committed_values == [0, 15]
        return state.committed_values

    with pytest.warns(CheckpointWarning, match="checkpoint 2 was not saved"):
        assert run_once(script, tmp_path)[:2] == [0, 15]


def test_a_state_that_was_not_captured_is_not_told(tmp_path: Path, held: Held) -> None:
    def script() -> None:
        late = None
        for _ in (loader := batches(6)):
            if loader.batch_index == 0:
                request_checkpoint()
            if loader.batch_index == 2:
                held.wait_for_writer()
                held.let_go()
                wait_until(lambda: not is_writing())
                late = Told("late")
        assert late is not None
        assert late.committed_values == []

    run_once(script, tmp_path)


def test_every_replica_is_told(tmp_path: Path) -> None:
    def script() -> list[int]:
        state = Told()
        for _ in AdaptiveDataLoader(Numbers(8), 4):
            state.value += 1
            save_all_states()
        return state.committed_values

    variables = {"ELASTICRUN_CHECKPOINT_DIR": str(tmp_path), "ELASTICRUN_JOB": "job"}
    assert run_generation(script, 2, variables=variables) == [[1, 2]] * 2
