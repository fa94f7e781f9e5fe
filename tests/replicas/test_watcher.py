"""The watcher of a replica that is alone: requests, time, and its own failures."""

from __future__ import annotations

import math
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elasticrun.errors import AgreementError
from elasticrun.replicas.agreement import Decision, Gate, HasLeft
from elasticrun.replicas.watcher import Watcher
from tests.support.stage import DEADLINE, wait_until


@contextmanager
def watched(
    gate: Gate,
    *,
    save_interval: float = math.inf,
    world_size: int = 1,
    grace: float = 60.0,
    is_saving: Callable[[], bool] = lambda: False,
) -> Iterator[Watcher]:
    watcher = Watcher(
        gate,
        rank=0,
        world_size=world_size,
        links=None,
        grace=grace,
        save_interval=save_interval,
        describe=lambda: "here",
        gone={},
        is_saving=is_saving,
    )
    yield watcher
    watcher.close()
    assert not watcher._thread.is_alive()


def train(gate: Gate) -> Decision:
    """Pass boundaries until something is due."""
    deadline = time.monotonic() + DEADLINE
    while (decision := gate.arrive()) is None:
        assert time.monotonic() < deadline, "nothing was ever due"
        time.sleep(0.0005)
    return decision


def test_a_wish_is_due_soon() -> None:
    gate = Gate()
    with watched(gate) as watcher:
        watcher.start()
        watcher.request("stop", cause="request_stop()", exit_code=75)
        decision = train(gate)
    assert decision == Decision(gate.number, "stop", "request_stop()", 75)


def test_it_wakes_when_half_of_the_grace_is_over() -> None:
    with watched(Gate(), grace=2000.0) as watcher:
        watcher._on_signal(signal.SIGTERM)
        seconds = watcher._seconds_to_next_deadline()
        watcher.start()
    assert seconds is not None
    assert seconds <= 1000.0


def test_a_checkpoint_by_time_does_not_wait_for_the_next_one() -> None:
    gate = Gate()
    with watched(gate, save_interval=1000.0) as watcher:
        watcher._save_at = time.monotonic()  # The interval is over.
        watcher.start()
        decision = train(gate)
    assert (decision.kind, decision.cause) == ("checkpoint", "save_interval")


def test_nothing_is_saved_by_time_before_the_first_boundary() -> None:
    gate = Gate()
    with watched(gate, save_interval=0.001) as watcher:
        watcher.start()
        time.sleep(0.05)
        assert gate.number == 0
        assert gate._promise is None
        assert train(gate).kind == "checkpoint"


def test_a_save_by_time_is_asked_for_once_until_it_is_written() -> None:
    num_looks = 0

    def is_saving() -> bool:
        nonlocal num_looks
        num_looks += 1
        return False

    def let_it_look() -> None:
        """Let the watcher see ten times what is due."""
        enough = num_looks + 10

        def has_looked() -> bool:
            watcher._pipe.wake()
            return num_looks >= enough

        wait_until(has_looked)

    gate = Gate()
    with watched(gate, save_interval=0.001, is_saving=is_saving) as watcher:
        watcher.start()
        assert train(gate).cause == "save_interval"
        let_it_look()
        assert [gate.arrive(), gate.arrive()] == [None, None]
        watcher.note_saved(0.001)
        assert train(gate).cause == "save_interval"


def test_a_save_by_time_is_asked_for_again_after_an_agreement_that_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gate = Gate()
    gate.arrive()
    with watched(gate, save_interval=0.001, world_size=2, grace=0.01) as watcher:
        watcher.start()
        coordinator = watcher._coordinator
        assert coordinator is not None
        wait_until(lambda: coordinator._number >= 3)  # Rank 1 never answers.
        watcher._put(HasLeft(1))
    assert "rank 1 never answered within 0.01 s of save_interval" in caplog.text


def test_it_takes_descriptors_above_those_of_select() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 2048:
        pytest.skip(f"this user may open {hard} files only")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    null = os.open(os.devnull, os.O_RDONLY)
    many = [os.dup(null) for _ in range(1100)]
    try:
        gate = Gate()
        with watched(gate) as watcher:
            watcher.start()
            watcher.request("checkpoint", cause="request_checkpoint()")
            assert train(gate).kind == "checkpoint"
    finally:
        for descriptor in [null, *many]:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_if_it_fails_training_does_not_go_on_without_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    caught: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", caught.append)
    gate = Gate()
    with watched(gate) as watcher:
        watcher.start()
        watcher._put("nonsense")
        with pytest.raises(AgreementError, match=r"failed: KeyError"):
            train(gate)
    assert [arguments.exc_type for arguments in caught] == [KeyError]
