"""How rank 0 agrees with all replicas on one boundary, message by message.

After a request the coordinator (rank 0) asks every replica for its current boundary s.
Each replica answers, and promises not to pass s + 1 before it hears the decision. The
agreed boundary is max(s) + 1, which no replica has passed. The watchers answer, so a
replica inside a collective takes part too; and no replica stops before a boundary that
another one needs it to reach.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from elasticrun.replicas.gate import CHECKPOINT, STOP, Decision
from elasticrun.replicas.messages import Ask, CallOff, GiveUp, Request


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
