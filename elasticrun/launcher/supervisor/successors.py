"""The replicas that wait for the next generation."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from elasticrun.launcher import processes
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.parked import Parked
from elasticrun.launcher.forks.starter import Starter
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.supervisor.rehearsal import Rehearsal
from elasticrun.replicas.wire import Message

_LEAST_LIMIT = 60.0
_STARTS_IN_LIMIT = 3.0


class _Use(enum.Enum):
    """What the replicas are for that were asked for last."""

    NONE = 0  # They have been taken, or discarded.
    NEXT = 1  # Another generation is to begin.
    SPARES = 2  # One may have to, after a crash.


class Successors:
    """The replicas that were asked for last, as far as they are forked by now.

    Beside a generation they run their script up to where it needs the job, unless that
    has failed once, or memory would not hold both. They do so, too, while this node
    waits to join, if the nodes that train request it (`rehearse`).

    Args:
        most_patience: Seconds after which they are late at the latest.
        orders: Makes their orders for that, from their number and the first of them.
        say: Called with what the user should know.
        on_ready: Called when all are there.
        on_able: Called when those beside which they were prepared may give way.
        on_late: Called with the reason if that takes too long.
        on_failed: Called with the reason when their script has failed.

    Attributes:
        may_rehearse: Whether no script has failed beside a generation so far.
        offered: Those that were offered for the next generation, until it begins.
    """

    def __init__(
        self,
        starter: Starter,
        loop: EventLoop,
        *,
        most_patience: float,
        orders: Callable[[int, Parked], list[Message]],
        say: Callable[[str], None],
        on_ready: Callable[[], None],
        on_able: Callable[[], None],
        on_late: Callable[[str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._starter = starter
        self._loop = loop
        self._most_patience = most_patience
        self._orders = orders
        self._say = say
        self._on_ready = on_ready
        self._on_able = on_able
        self._on_late = on_late
        self._on_failed = on_failed
        self._parked: list[Parked] = []
        self.offered: list[Parked] = []
        self._size = 0
        self._num_asked = 0
        self._use = _Use.NONE
        self._is_told_to_rehearse = False
        self._rehearsal: Rehearsal | None = None
        self.may_rehearse = True
        self._longest_start = 0.0
        self._begun_at = 0.0

    @property
    def is_asked(self) -> bool:
        """Whether they were asked for, and not taken since; spares are not."""
        return self._use is _Use.NEXT

    @property
    def is_ready(self) -> bool:
        """Whether all are there."""
        return 0 < len(self._parked) == self._size

    @property
    def is_rehearsing(self) -> bool:
        """Whether they run their script, or have come to where it needs the job."""
        return self._rehearsal is not None

    @property
    def spares(self) -> list[int]:
        """The process numbers of the spares."""
        return sorted(self.pids) if self._use is _Use.SPARES else []

    @property
    def num_ready_spares(self) -> int:
        """How many of the spares have come to where their script needs the job."""
        if self._rehearsal is None or self._use is not _Use.SPARES:
            return 0
        return self._rehearsal.num_waiting

    @property
    def pids(self) -> set[int]:
        """The process numbers of all, those included that were offered."""
        return {each.pid for each in (*self._parked, *self.offered)}

    def note_start(self, seconds: float) -> None:
        """Note how long it took until replicas had made their job, or needed it."""
        self._longest_start = max(self._longest_start, seconds)

    @property
    def _limit(self) -> float:
        return max(_LEAST_LIMIT, _STARTS_IN_LIMIT * self._longest_start)

    def prepare(self, size: int, *, beside: Generation | None = None) -> None:
        """Have so many wait: the spares if these are as many, else others.

        Args:
            beside: The generation that gives way to them.
        """
        if beside is None and self._has_spares(size):
            self._use = _Use.NEXT
            return
        self.discard()
        self._use = _Use.NEXT
        if beside is not None and not self._can_rehearse(
            size, beside, otherwise="these stop first"
        ):
            beside = None
        self._park(size, beside)

    def rehearse(self) -> None:
        """Let them run their script as if beside a generation: it is elsewhere."""
        rehearsal = self._rehearsal
        if rehearsal is None and self.may_rehearse:
            self._is_told_to_rehearse = True
            for each in self._parked:
                self._rehearse(each)
        elif rehearsal is None or rehearsal.num_waiting == self._size:
            self._on_able()

    def prepare_spares(self, beside: Generation) -> None:
        """Have as many wait as run, for a crash."""
        self.discard()
        if self._can_rehearse(beside.size, beside, otherwise="there are no spares"):
            self._use = _Use.SPARES
            self._park(beside.size, beside)

    def _has_spares(self, size: int) -> bool:
        if self._use is not _Use.SPARES or self._size != size:
            return False
        if self._rehearsal is not None and self._rehearsal.is_outdated:
            self._say("the program's files have changed, so its spares are discarded")
            return False
        return True

    def _park(self, size: int, beside: Generation | None) -> None:
        number, self._size = self._num_asked, size

        def on_forked(parked: Parked) -> None:
            if number != self._num_asked:  # Others were asked for, or none, meanwhile.
                parked.discard()
                return
            self._parked.append(parked)
            if self._is_told_to_rehearse or (beside is not None and beside.running):
                self._rehearse(parked, beside)
            elif beside is None:
                self._on_able()
            if self.is_ready:
                self._on_ready()

        self._starter.park(size, on_forked)

    def offer(self) -> list[Parked]:
        """Return them; until `take` they wait for the others' offers."""
        self.offered = self._release()
        return self.offered

    def take(self) -> list[Parked]:
        """Return those that were offered, to be let go."""
        taken, self.offered = self.offered, []
        return taken

    def take_back(self) -> None:
        """Let all end, those as well that were offered."""
        self.discard()
        _discard(self.take())

    def discard(self) -> None:
        """Let them end, and those that are on their way."""
        self._num_asked += 1
        _discard(self._release())

    def _release(self) -> list[Parked]:
        if self._rehearsal is not None:
            self._rehearsal.end()
            self._rehearsal = None
        released, self._parked = self._parked, []
        self._use = _Use.NONE
        self._is_told_to_rehearse = False
        return released

    def _can_rehearse(self, size: int, beside: Generation, *, otherwise: str) -> bool:
        if not self.may_rehearse or not beside.has_job:
            return False
        most = max(processes.memory_of(member.pid) for member in beside.members)
        if size * most <= processes.available_memory():
            return True
        self._say(
            f"{size} more replicas of {most >> 20} MiB may not fit into memory beside "
            f"those that run, so {otherwise}"
        )
        return False

    def _rehearse(self, parked: Parked, beside: Generation | None = None) -> None:
        """Let one begin at once: the next ones are forked meanwhile."""
        running = {member.pid for member in beside.running} if beside else set()
        self._starter.note_running(sorted(running | self.pids))
        if self._rehearsal is None:
            self._begun_at = time.monotonic()
            self._rehearsal = Rehearsal(
                self._orders(self._size, parked),
                self._loop,
                limit=min(self._limit, self._most_patience),
                on_waiting=self._on_waiting,
                on_late=self._on_late,
                on_failure=self._on_failure,
                on_barred=self._starter.fork_no_more,
            )
        self._rehearsal.begin(parked)

    def _on_waiting(self) -> None:
        self.note_start(time.monotonic() - self._begun_at)
        self._on_able()

    def _on_failure(self, why: str, has_waited: bool) -> None:
        """Run no script beside a generation any more: alone it may not fail."""
        self.may_rehearse = self.may_rehearse and has_waited
        self._on_failed(why)


def _discard(parked: list[Parked]) -> None:
    for each in parked:
        each.discard()
