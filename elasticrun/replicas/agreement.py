"""How rank 0 agrees with all replicas on one boundary, message by message.

1. A request reaches the `Coordinator`, in rank 0's watcher; it asks every replica.
2. Each watcher answers with the boundary s that its training thread has passed, and
   its `Gate` promises to hold that thread at s + 1 until the decision is heard.
3. The decision is max(s) + 1: no replica has passed that. Those behind run on to it.

The watchers answer, so a replica whose training thread is inside a collective takes
part too; and none stops before a boundary that another one needs it to reach. It costs
three messages a replica, and nothing between requests: an agreement by collectives
would cost one in each step.

The messages of watchers, to each other and from their own replica:

    message   from                      to           what follows
    Request   any thread of a replica   its watcher  it is sent on to rank 0's
              a watcher                 rank 0's     Ask, unless it is served already
    Ask       rank 0's                  all          Answer, and a promise
    Answer    a watcher                 rank 0's     Decision, once all answered
    Decision  rank 0's                  all          all act at that boundary
    GiveUp    rank 0's                  all          a stop exits; a save is left out
    CallOff   rank 0's                  all          all go on
    Close     the training thread       its watcher  on rank 0 Farewell, else HasLeft
    Farewell  rank 0's                  all          HasLeft
    HasLeft   a watcher                 rank 0's     CallOff, if they were agreeing
    HungUp    a connection that ended   its watcher  on rank 0 Dead, unless it left
    Dead      rank 0's                  all          no boundary is passed any more
    Report    a watcher                 rank 0's     it is sent on
              rank 0's                  who asked,   it is kept
                                        or all       Report to who asked

Those from one replica to another travel as JSON, {"type": "Ask", "number": 3}.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from elasticrun.errors import AgreementError
from elasticrun.replicas.wire import Message

# What replicas agree on.
STOP = "stop"
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Decision:
    """What all replicas do when they come to one boundary.

    Attributes:
        boundary: Its number, counted from the start of the generation.
        kind: CHECKPOINT, or STOP (save and exit).
        cause: Why, for people: "SIGTERM", "request_stop()", "save_interval".
    """

    boundary: int
    kind: str
    cause: str
    exit_code: int = 0


class Gate:
    """Counts boundaries, and holds the training thread back while an agreement is open.

    `arrive` is for the training thread, all else for the watcher's; or, in a replica
    that is alone, for whoever asks.

    The fast path of `arrive` is an addition and a test: the thread first counts and
    then looks at `_is_attentive`, the watcher first sets it and then reads the count.
    So either the thread notices, or the watcher sees the boundary that it has passed.
    """

    def __init__(self) -> None:
        self.number = 0
        self._is_attentive = False
        self._condition = threading.Condition()
        self._promise: int | None = None
        self._due: dict[int, Decision] = {}
        self._failure: str | None = None

    def arrive(self) -> Decision | None:
        """Pass one boundary; wait if an agreement is open; return what is due here."""
        self.number += 1
        if not self._is_attentive:
            return None
        return self._arrive_attentively()

    def promise(self) -> int:
        """Return the boundary s; `arrive` will not pass s + 1 before `settle`."""
        with self._condition:
            self._is_attentive = True
            self._promise = self.number
            return self._promise

    def settle(self, decision: Decision | None) -> None:
        """End the open agreement: with what is due, or with nothing (it failed)."""
        with self._condition:
            self._promise = None
            if decision is not None:
                self._add(decision)
            self._condition.notify_all()

    def schedule(self, kind: str, cause: str, exit_code: int) -> None:
        """Schedule a decision for the next boundary; for a replica that is alone."""
        with self._condition:
            self._is_attentive = True
            self._add(Decision(self.number + 1, kind, cause, exit_code))

    def fail(self, reason: str) -> None:
        """Make every later `arrive` raise: nothing can be agreed any more."""
        with self._condition:
            self._failure = reason
            self._is_attentive = True
            self._condition.notify_all()

    def check(self) -> None:
        """Raise what the next `arrive` would, if nothing can be agreed any more."""
        if self._failure is not None:
            raise AgreementError(self._failure)

    def _add(self, decision: Decision) -> None:
        there = self._due.get(decision.boundary)
        if there is None or there.kind != STOP:  # A stop saves as well.
            self._due[decision.boundary] = decision
        self._is_attentive = True

    def _arrive_attentively(self) -> Decision | None:
        with self._condition:
            self._condition.wait_for(self._may_go_on)
            self.check()
            decision = self._due.pop(self.number, None)
            if self._promise is None and not self._due:
                self._is_attentive = False
            return decision

    def _may_go_on(self) -> bool:
        return (
            self._failure is not None
            or self._promise is None
            or self.number <= self._promise
        )


@dataclass(frozen=True)
class Request:
    """A request for a checkpoint or a stop, for rank 0.

    Attributes:
        kind: STOP or CHECKPOINT.
        at: The boundary that the asking replica had reached.
    """

    kind: str
    cause: str
    exit_code: int
    at: int


@dataclass(frozen=True)
class Ask:
    """Asks a replica which boundary it has passed.

    Who answers passes the next one only when it has heard what is decided.

    Attributes:
        number: Of the agreement, so that a late answer counts for no other.
    """

    number: int


@dataclass(frozen=True)
class Answer:
    """The boundary that a rank has passed, and its promise to wait at the next one."""

    number: int
    rank: int
    boundary: int


@dataclass(frozen=True)
class GiveUp:
    """No boundary could be agreed.

    Attributes:
        reason: Who was silent or died.
    """

    kind: str
    exit_code: int
    reason: str


@dataclass(frozen=True)
class CallOff:
    """No boundary of all replicas is to come: a program has come to its end."""


@dataclass(frozen=True)
class Close:
    """The program has ended; there is nothing to watch any more."""


@dataclass(frozen=True)
class Farewell:
    """Rank 0 leaves, and its store with it, once all have answered."""


@dataclass(frozen=True)
class HasLeft:
    """This rank has left the job."""

    rank: int


@dataclass(frozen=True)
class HungUp:
    """The connection to this rank has ended."""

    rank: int


@dataclass(frozen=True)
class Dead:
    """The process of this rank has died."""

    rank: int


@dataclass(frozen=True)
class Report:
    """What a replica has counted.

    Attributes:
        to: Who asked; None asks all the others.
        counts: Empty of one that has left.
    """

    rank: int
    to: int | None
    counts: list[int]


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Request, Ask, Answer, Decision, GiveUp),
        *(CallOff, Farewell, HasLeft, HungUp, Dead, Report),
    )
}


def encode(message: object) -> Message:
    """Return a message as it travels."""
    return {"type": type(message).__name__, **vars(message)}


def decode(message: Message) -> Any:
    """Return the message that `encode` was given."""
    values = dict(message)
    return _KINDS[values.pop("type")](**values)


def agreed_boundary(boundaries: Iterable[int]) -> int:
    """Return the first boundary that no replica can have passed."""
    return max(boundaries) + 1


@dataclass
class Coordinator:
    """Turns requests into decisions; one agreement is open at a time.

    Attributes:
        deadline: When the open agreement fails, or None.
    """

    world_size: int
    grace: float
    deadline: float | None = None
    _number: int = 0
    _request: Request | None = None
    _answers: dict[int, int] = field(default_factory=dict)
    _decided: Decision | None = None

    def on_request(self, request: Request, now: float) -> Ask | None:
        """Take a request; return the question to all if an agreement begins with it."""
        if self._is_served(request):
            return None
        if self._request is not None:
            if request.kind == STOP != self._request.kind:
                self._request = request
            return None
        self._request = request
        self._number += 1
        self._answers.clear()
        self.deadline = now + self.grace
        return Ask(self._number)

    def on_answer(self, number: int, rank: int, boundary: int) -> Decision | None:
        """Take an answer; return the decision for every replica if it was the last."""
        if self._request is None or number != self._number:
            return None
        self._answers[rank] = boundary
        if len(self._answers) < self.world_size:
            return None
        self._decided = Decision(
            agreed_boundary(self._answers.values()),
            self._request.kind,
            self._request.cause,
            self._request.exit_code,
        )
        self._close()
        return self._decided

    def on_time(self, now: float) -> GiveUp | None:
        """Return the failure for all replicas once an agreement took too long."""
        if self.deadline is None or self._request is None or now < self.deadline:
            return None
        silent = [str(r) for r in range(self.world_size) if r not in self._answers]
        return self._give_up(
            f"rank {', '.join(silent)} never answered within {self.grace:g} s of "
            f"{self._request.cause}"
        )

    def on_death(self, rank: int) -> GiveUp | None:
        """Return the failure for all replicas if an agreement was open."""
        if self._request is None:
            return None
        return self._give_up(f"rank {rank} died after {self._request.cause}")

    def _give_up(self, reason: str) -> GiveUp:
        assert self._request is not None
        message = GiveUp(self._request.kind, self._request.exit_code, reason)
        self._close()
        return message

    def on_left(self) -> CallOff | None:
        """Call an open agreement off: a replica's program has ended.

        No boundary of all replicas is to come; the others go on to their own end.
        """
        if self._request is None:
            return None
        self._close()
        return CallOff()

    def _is_served(self, request: Request) -> bool:
        decided = self._decided
        if decided is None:
            return False
        return decided.kind == STOP or (
            request.kind == CHECKPOINT and request.at < decided.boundary
        )

    def _close(self) -> None:
        self._request = None
        self.deadline = None
