"""However messages and boundaries interleave, all replicas act at the same ones.

Replicas are real gates around simulated threads; the coordinator is the real one. What
hypothesis chooses is who moves next: a replica to its next boundary, a message to its
reader, a new request. Mailboxes keep their order, as the job's store does.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrun.replicas.agreement import (
    CHECKPOINT,
    STOP,
    Ask,
    Coordinator,
    Decision,
    Gate,
    Request,
)

EXIT_CODES = {STOP: 143, CHECKPOINT: 0}


class Held(Exception):
    """Raised where the training thread would wait."""


class NoWaiting:
    """In place of a gate's condition: says that the thread would wait."""

    def __enter__(self) -> NoWaiting:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def notify_all(self) -> None:
        return

    def wait_for(self, predicate: Callable[[], bool]) -> None:
        if not predicate():
            raise Held


@dataclass
class Replica:
    gate: Gate = field(default_factory=Gate)
    passed: int = 0
    is_held: bool = False
    acted: list[tuple[int, str]] = field(default_factory=list)
    mail: deque[dict[str, Any]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self.gate._condition = NoWaiting()  # type: ignore[assignment]

    @property
    def has_stopped(self) -> bool:
        return bool(self.acted) and self.acted[-1][1] == STOP

    def move(self) -> bool:
        """Go to the next boundary, or on from the one it is held at."""
        try:
            if self.is_held:
                decision = self.gate._arrive_attentively()
            else:
                decision = self.gate.arrive()
        except Held:
            was_held, self.is_held = self.is_held, True
            return not was_held
        self.is_held = False
        self.passed = self.gate.number
        if decision is not None:
            assert decision.boundary == self.passed
            self.acted.append((decision.boundary, decision.kind))
        return True


class Replicas:
    """The replicas, the coordinator and the messages between them."""

    def __init__(self, world_size: int, *, is_lock_step: bool) -> None:
        self.replicas = [Replica() for _ in range(world_size)]
        self.coordinator = Coordinator(world_size, grace=10.0)
        self.requests: deque[Request] = deque()
        self.answers: deque[tuple[int, int, int]] = deque()
        self.is_lock_step = is_lock_step

    def request(self, rank: int, kind: str) -> None:
        at = self.replicas[rank].gate.number
        self.requests.append(Request(kind, "test", EXIT_CODES[kind], at))

    def actions(self) -> list[Callable[[], bool]]:
        """Return every move that is possible now; each says whether it was one."""
        moves: list[Callable[[], bool]] = []
        if self.requests:
            moves.append(self._deliver_request)
        if self.answers:
            moves.append(self._deliver_answer)
        for rank, replica in enumerate(self.replicas):
            if replica.mail:
                moves.append(lambda rank=rank: self._read_mail(rank))  # type: ignore[misc]
            if not replica.has_stopped and self._is_batch_complete(replica):
                moves.append(replica.move)
        return moves

    def run_out(self, is_done: Callable[[], bool]) -> None:
        """Move everything in turn until `is_done`; nobody may be held for ever."""
        for _ in range(1000):
            if is_done():
                return
            results = [action() for action in self.actions()]
            assert any(results), "a deadlock"
        raise AssertionError("never done")

    def _is_batch_complete(self, replica: Replica) -> bool:
        """In lock-step, a batch ends only once every replica has begun it."""
        if not self.is_lock_step or replica.is_held:
            return True
        return all(other.passed >= replica.passed for other in self.replicas)

    def _broadcast(self, message: object) -> None:
        if message is not None:
            for replica in self.replicas:
                replica.mail.append(message)

    def _deliver_request(self) -> bool:
        request = self.requests.popleft()
        self._broadcast(self.coordinator.on_request(request, now=0.0))
        return True

    def _deliver_answer(self) -> bool:
        self._broadcast(self.coordinator.on_answer(*self.answers.popleft()))
        return True

    def _read_mail(self, rank: int) -> bool:
        replica = self.replicas[rank]
        message = replica.mail.popleft()
        if isinstance(message, Ask):
            self.answers.append((message.number, rank, replica.gate.promise()))
        elif isinstance(message, Decision):
            replica.gate.settle(message)
        else:
            replica.gate.settle(None)
        return True


kinds = st.sampled_from([STOP, CHECKPOINT, CHECKPOINT])
requests = st.tuples(st.integers(0, 4), kinds)
moves = st.lists(st.one_of(st.integers(0, 30), requests), max_size=120)


@pytest.mark.parametrize("is_lock_step", [True, False])
@settings(max_examples=300)
@given(world_size=st.integers(1, 5), moves=moves)
def test_all_act_at_the_same_boundaries_and_nobody_is_held_for_ever(
    is_lock_step: bool, world_size: int, moves: list[int | tuple[int, str]]
) -> None:
    job = Replicas(world_size, is_lock_step=is_lock_step)
    for move in moves:
        if isinstance(move, tuple):
            job.request(move[0] % world_size, move[1])
        elif actions := job.actions():
            actions[move % len(actions)]()
    job.request(0, STOP)
    job.run_out(lambda: all(replica.has_stopped for replica in job.replicas))
    acted = [replica.acted for replica in job.replicas]
    assert acted.count(acted[0]) == world_size
    assert [kind for _, kind in acted[0]].count(STOP) == 1
    boundaries = [boundary for boundary, _ in acted[0]]
    assert boundaries == sorted(set(boundaries))


@pytest.mark.parametrize("is_lock_step", [True, False])
@settings(max_examples=100)
@given(world_size=st.integers(1, 5), rank=st.integers(0, 4), steps=st.integers(0, 40))
def test_every_checkpoint_asked_for_is_made_soon_after(
    is_lock_step: bool, world_size: int, rank: int, steps: int
) -> None:
    job = Replicas(world_size, is_lock_step=is_lock_step)
    for step in range(steps):
        actions = job.actions()
        actions[step % len(actions)]()
    job.request(rank % world_size, CHECKPOINT)
    asked_at = max(replica.gate.number for replica in job.replicas)
    job.run_out(lambda: all(replica.acted for replica in job.replicas))
    boundaries = {replica.acted[0][0] for replica in job.replicas}
    assert len(boundaries) == 1
    if is_lock_step:
        assert boundaries.pop() <= asked_at + 8


@settings(max_examples=200)
@given(world_size=st.integers(2, 6), data=st.data())
def test_whoever_never_answers_is_named_and_the_others_go_on(
    world_size: int, data: st.DataObject
) -> None:
    silent = data.draw(st.sets(st.integers(0, world_size - 1), min_size=1))
    job = Replicas(world_size, is_lock_step=False)
    job.request(data.draw(st.integers(0, world_size - 1)), CHECKPOINT)
    answering = [rank for rank in range(world_size) if rank not in silent]
    job._deliver_request()
    for rank in data.draw(st.permutations(answering)):
        job._read_mail(rank)
    while job.answers:
        job._deliver_answer()
    assert job.coordinator.deadline is not None
    given_up = job.coordinator.on_time(job.coordinator.deadline)
    assert given_up is not None
    named = ", ".join(map(str, sorted(silent)))
    assert given_up.reason.startswith(f"rank {named} never answered")
    job._broadcast(given_up)
    for rank in answering:
        job._read_mail(rank)
        replica = job.replicas[rank]
        assert [replica.move() for _ in range(5)] == [True] * 5
        assert replica.passed == 5
