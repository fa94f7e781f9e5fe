"""The watcher of a replica that is alone: requests, time, and its own failures."""

from __future__ import annotations

import math
import os
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from elasticrun.control.gate import Decision, Gate
from elasticrun.control.watcher import Watcher
from elasticrun.errors import AgreementError

DEADLINE = 30.0


@contextmanager
def watched(gate: Gate, *, save_interval: float = math.inf) -> Iterator[Watcher]:
    watcher = Watcher(
        gate,
        rank=0,
        world_size=1,
        links=None,
        grace=60.0,
        save_interval=save_interval,
        describe=lambda: "here",
        on_gone=lambda rank, fate: None,
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
        watcher._mail.put({"type": "nonsense"})
        with pytest.raises(AgreementError, match=r"failed: KeyError\('nonsense'\)"):
            train(gate)
    assert [arguments.exc_type for arguments in caught] == [KeyError]
