"""The gate holds a training thread at the right boundary, and never for ever."""

from __future__ import annotations

import threading
import time

import pytest

from elasticrun.errors import AgreementError
from elasticrun.replicas.agreement import Decision, Gate
from tests.support.stage import DEADLINE, wait_until


def stop_at(boundary: int) -> Decision:
    return Decision(boundary, "stop", "SIGTERM", 143)


def save_at(boundary: int) -> Decision:
    return Decision(boundary, "checkpoint", "save_interval")


class Training(threading.Thread):
    """Passes boundaries until something is due there, or something is wrong."""

    def __init__(self, gate: Gate, *, limit: int = 10**15) -> None:
        super().__init__(daemon=True)
        self.gate = gate
        self.limit = limit
        self.decision: Decision | None = None
        self.error: AgreementError | None = None
        self.start()

    def run(self) -> None:
        try:
            while self.decision is None and self.gate.number < self.limit:
                self.decision = self.gate.arrive()
        except AgreementError as error:
            self.error = error

    def end(self) -> Training:
        self.join(DEADLINE)
        assert not self.is_alive(), f"held at boundary {self.gate.number}"
        return self


def test_boundaries_are_counted_and_nothing_is_due() -> None:
    gate = Gate()
    assert [gate.arrive() for _ in range(3)] == [None, None, None]
    assert gate.number == 3


def test_a_promise_tells_the_boundary_and_holds_the_one_after_the_next() -> None:
    gate = Gate()
    training = Training(gate)
    wait_until(lambda: gate.number > 100)
    promised = gate.promise()
    wait_until(lambda: gate.number == promised + 1)
    for _ in range(20):
        time.sleep(0.001)
        assert gate.number == promised + 1
    gate.settle(stop_at(promised + 1))
    assert training.end().decision == stop_at(promised + 1)
    assert gate.number == promised + 1


def test_no_boundary_slips_past_a_promise() -> None:
    """The thread counts and then looks; the watcher first asks, and then reads."""
    for _ in range(300):
        gate = Gate()
        training = Training(gate)
        decision = stop_at(gate.promise() + 1)
        gate.settle(decision)
        assert training.end().decision == decision
        assert gate.number == decision.boundary


def test_a_replica_behind_runs_on_to_the_agreed_boundary() -> None:
    gate = Gate()
    assert gate.promise() == 0
    gate.settle(save_at(3))
    assert [gate.arrive() for _ in range(4)] == [None, None, save_at(3), None]


def test_an_agreement_that_failed_lets_go() -> None:
    gate = Gate()
    training = Training(gate, limit=5000)
    gate.promise()
    gate.settle(None)
    assert training.end().decision is None
    assert gate.number == 5000


def test_decisions_wait_for_their_boundaries() -> None:
    gate = Gate()
    gate.promise()
    gate.settle(save_at(2))
    gate.promise()
    gate.settle(stop_at(4))
    passed = [gate.arrive() for _ in range(4)]
    assert passed == [None, save_at(2), None, stop_at(4)]


def test_a_gate_that_failed_raises_in_the_waiting_thread_and_ever_after() -> None:
    gate = Gate()
    training = Training(gate)
    promised = gate.promise()
    wait_until(lambda: gate.number == promised + 1)
    gate.fail("rank 0 is gone")
    assert "rank 0 is gone" in str(training.end().error)
    with pytest.raises(AgreementError, match="rank 0 is gone"):
        gate.arrive()


def test_a_boundary_costs_no_lock_once_all_is_settled() -> None:
    gate = Gate()
    gate.promise()
    gate.settle(save_at(1))
    assert gate.arrive() == save_at(1)
    with gate._condition:  # Whoever wants it now would wait for ever.
        training = Training(gate, limit=1000)
        training.end()
    assert gate.number == 1000


def test_what_is_scheduled_from_another_thread_is_never_missed() -> None:
    for _ in range(300):
        gate = Gate()
        training = Training(gate)
        gate.schedule("checkpoint", "request_checkpoint()", 0)
        decision = training.end().decision
        assert decision is not None
        assert decision.boundary == gate.number


def test_what_is_scheduled_is_due_at_the_very_next_boundary() -> None:
    gate = Gate()
    gate.arrive()
    gate.schedule("stop", "request_stop()", 75)
    assert gate.arrive() == Decision(2, "stop", "request_stop()", 75)


@pytest.mark.parametrize("is_stop_first", [True, False])
def test_a_stop_at_a_boundary_is_not_lost_to_a_checkpoint_there(
    is_stop_first: bool,
) -> None:
    gate = Gate()
    kinds = [("stop", "SIGTERM", 143), ("checkpoint", "request_checkpoint()", 0)]
    for kind in kinds if is_stop_first else reversed(kinds):
        gate.schedule(*kind)
    assert gate.arrive() == stop_at(1)
    gate.promise()
    for decision in (
        [stop_at(2), save_at(2)] if is_stop_first else [save_at(2), stop_at(2)]
    ):
        gate.settle(decision)
    assert gate.arrive() == stop_at(2)


def test_scheduling_leaves_an_open_agreement_open() -> None:
    gate = Gate()
    gate.promise()
    gate.schedule("checkpoint", "request_checkpoint()", 0)
    training = Training(gate)
    wait_until(lambda: gate.number == 1)
    assert training.is_alive()
    gate.settle(stop_at(1))
    assert training.end().decision == stop_at(1)
