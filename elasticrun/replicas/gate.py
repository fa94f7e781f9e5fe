"""What a replica's training thread and watcher share: boundary number, requests."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from elasticrun.errors import AgreementError

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
