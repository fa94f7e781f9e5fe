"""Replicas that are started ahead, and wait for the next generation."""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from functools import partial

from elasticrun.errors import counted
from elasticrun.launcher import processes
from elasticrun.launcher.event_loop import EventLoop, Timer
from elasticrun.launcher.forks.starter import Starter
from elasticrun.launcher.forks.waiting import WaitingReplica, discard_all
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.replicas.wire import Message, WireError

_LEAST_LIMIT = 60.0
_STARTS_IN_LIMIT = 3.0
_MOST_OF_IMPORTS = 1 << 29  # Bytes; they usually take 100 to 300 MiB.
_MOST_PRINTED = 1 << 20
_MOST_QUOTED = 1 << 12


class _Use(enum.Enum):
    """The purpose of the replicas that were requested last."""

    NONE = 0  # They have been taken, or discarded.
    NEXT = 1  # Another generation is to begin.
    SPARES = 2  # One may have to, after a crash.


class Successors:
    """The replicas that wait for the next generation: all of them, or none so far.

    Beside a generation they import what it has imported. Then they rehearse: they run
    their script up to where it needs the job, and wait there, unless a script has
    failed so once, or memory would not hold both. Spares wait before the script, or
    rehearse, as the user wishes. What they print is kept until their generation begins.
    One that prints more than a MiB comes no further before that.

    Args:
        orders: Makes their orders, from what those before have imported.
        say: Called with what the user should know.
        on_ready: Called when all are there.
        on_may_stop: Called when the generation that they were prepared beside may stop.
        on_too_slow: Called with the reason if a rehearsal takes too long.
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
        orders: Callable[..., list[Message]],
        say: Callable[[str], None],
        on_ready: Callable[[], None],
        on_may_stop: Callable[[], None],
        on_too_slow: Callable[[str], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._starter = starter
        self._loop = loop
        self._orders = orders
        self._say = say
        self._on_ready = on_ready
        self._on_may_stop = on_may_stop
        self._on_too_slow = on_too_slow
        self._on_failed = on_failed
        self._replicas: list[WaitingReplica] = []
        self.offered: list[WaitingReplica] = []
        self._size = 0
        self._num_requests = 0
        self._use = _Use.NONE
        self.is_rehearsing = False
        self.may_rehearse = True
        self._runs_ahead = True  # Whether those of the last request rehearse.
        self._preparing: set[int] = set()  # Ranks that do not wait so far.
        self._watched: list[object] = []
        self._timer: Timer | None = None
        self._longest_start = 0.0
        self._begun_at = 0.0

    @property
    def is_requested(self) -> bool:
        """Whether they were asked for, and not taken since; spares are not."""
        return self._use is _Use.NEXT

    @property
    def is_ready(self) -> bool:
        """Whether all are there."""
        return bool(self._replicas)

    @property
    def spares(self) -> list[int]:
        """The process numbers of the spares."""
        return sorted(self.pids) if self._use is _Use.SPARES else []

    @property
    def num_ready_spares(self) -> int:
        """How many of the spares have come to where their script needs the job."""
        if self._use is not _Use.SPARES or not self.is_rehearsing:
            return 0
        return self._size - len(self._preparing)

    @property
    def pids(self) -> set[int]:
        """The process numbers of all, those included that were offered."""
        return {each.pid for each in (*self._replicas, *self.offered)}

    def note_start(self, seconds: float) -> None:
        """Note how long it took until replicas had made their job, or needed it."""
        self._longest_start = max(self._longest_start, seconds)

    def prepare(self, size: int, *, beside: Generation | None = None) -> None:
        """Fork so many, unless there are as many spares.

        Args:
            beside: The running generation, which stops for them.
        """
        are_usable = self._runs_ahead or not self._preparing  # An import may hang.
        is_as_asked = self._use is _Use.SPARES and self._size == size and are_usable
        if beside is None and is_as_asked:
            self._use = _Use.NEXT
            return
        self.discard()
        if beside is not None and not self._can_rehearse(
            size, beside, otherwise="these stop first"
        ):
            beside = None
        self._request_fork(size, _Use.NEXT, beside)

    def prepare_spares(self, beside: Generation, *, runs_ahead: bool) -> None:
        """Fork as many spares as there are replicas, if memory allows it.

        Args:
            runs_ahead: Let them rehearse; else they only import.
        """
        self.discard()
        if runs_ahead:
            fits = self._can_rehearse(
                beside.size, beside, otherwise="there are no spares"
            )
        else:
            fits = beside.size * _MOST_OF_IMPORTS <= processes.available_memory()
        if fits:
            self._request_fork(beside.size, _Use.SPARES, beside, runs_ahead=runs_ahead)

    def offer(self) -> list[WaitingReplica]:
        """Return them; until `take` they wait for the others' offers."""
        self.offered = self._release()
        return self.offered

    def take(self) -> list[WaitingReplica]:
        """Return those that were offered, to be let go."""
        taken, self.offered = self.offered, []
        return taken

    def take_back(self) -> None:
        """Discard all, including those that were offered."""
        self.discard()
        discard_all(self.take())

    def discard(self) -> None:
        """Discard all, including those that are being forked."""
        self._num_requests += 1
        discard_all(self._release())

    def _release(self) -> list[WaitingReplica]:
        self._end_rehearsal()
        released, self._replicas = self._replicas, []
        self._use = _Use.NONE
        return released

    def _can_rehearse(self, size: int, beside: Generation, *, otherwise: str) -> bool:
        if not self.may_rehearse or not beside.has_job:
            return False
        most = max(processes.memory_of(member.pid) for member in beside.members)
        if size * most <= processes.available_memory():
            return True
        self._say(
            f"{counted(size, 'more replica')} of {most >> 20} MiB may not fit into "
            f"memory beside the running ones, so {otherwise}"
        )
        return False

    def _request_fork(
        self,
        size: int,
        use: _Use,
        beside: Generation | None,
        *,
        runs_ahead: bool = True,
    ) -> None:
        number, self._size, self._use = self._num_requests, size, use
        self._runs_ahead = runs_ahead

        def on_forked(replicas: list[WaitingReplica]) -> None:
            if number != self._num_requests:  # Others, or none, are needed by now.
                discard_all(replicas)
                return
            self._replicas = replicas
            if beside is not None and beside.running:
                self._begin_rehearsal(beside)
            elif beside is None:
                self._on_may_stop()
            self._on_ready()

        self._starter.fork(size, on_forked)

    # While they rehearse.

    def _begin_rehearsal(self, beside: Generation) -> None:
        limit = max(_LEAST_LIMIT, _STARTS_IN_LIMIT * self._longest_start)
        why = (
            "not all new replicas came to the line that needs the job within "
            f"{limit:.0f} s"
        )
        self._timer = self._loop.call_later(limit, lambda: self._on_too_slow(why))
        self._begun_at = time.monotonic()
        self.is_rehearsing = True
        self._preparing = set(range(self._size))
        told = [member.imports for member in beside.members]
        orders = self._orders(self._replicas, told, runs_ahead=self._runs_ahead)
        for each, order in zip(self._replicas, orders, strict=True):
            each.begin(order)
            self._watch(each.channel, partial(self._on_messages, each))
            for output, printed in zip(each.outputs, each.printed, strict=True):
                os.set_blocking(output, False)
                self._watch(output, partial(self._keep_output, output, printed))

    def _end_rehearsal(self) -> None:
        """Stop watching them."""
        if self._timer is not None:
            self._timer.cancel()
        for each in self._watched:
            self._loop.forget(each)
        self._watched = []
        self._preparing = set()
        self.is_rehearsing = False

    def _watch(self, source: object, callback: Callable[[], None]) -> None:
        self._watched.append(source)
        self._loop.watch(source, callback)

    def _keep_output(self, output: int, printed: bytearray) -> None:
        try:
            data = os.read(output, _MOST_PRINTED)
        except BlockingIOError:
            return
        printed += data
        if not data or len(printed) >= _MOST_PRINTED:
            self._watched.remove(output)
            self._loop.forget(output)

    def _on_messages(self, replica: WaitingReplica) -> None:
        try:
            messages = replica.channel.receive()
        except WireError:
            messages, replica.channel.is_open = [], False
        for message in messages:
            if message["type"] == "waiting":
                self._note_waiting(replica)
            elif message["type"] == "failure":
                self._fail(replica, f"{message['summary']}\n{message['trace']}")
                return
        if not replica.channel.is_open:
            for output, printed in zip(replica.outputs, replica.printed, strict=True):
                if output in self._watched:
                    self._keep_output(output, printed)
            last = replica.printed[1][-_MOST_QUOTED:].decode(errors="replace")
            self._fail(
                replica, f"killed, or ended, before its generation began\n{last}"
            )

    def _note_waiting(self, replica: WaitingReplica) -> None:
        if replica.rank in self._preparing:
            self._preparing.remove(replica.rank)
            if not self._preparing:
                self.note_start(time.monotonic() - self._begun_at)
                self._on_may_stop()

    def _fail(self, replica: WaitingReplica, why: str) -> None:
        """Report the failure; rehearse no more if the script itself has failed."""
        has_script_failed = self._runs_ahead and replica.rank in self._preparing
        self.may_rehearse = self.may_rehearse and not has_script_failed
        self._end_rehearsal()
        self._on_failed(f"local rank {replica.rank}: {why.rstrip()}")
