"""The replicas of the next generation, and when the running one stops for them.

They are forked ahead. Beside a generation they import what it has imported; then they
rehearse: they run their script up to where it needs the job, and wait there. What the
generation is told of them, which is nothing until it is to stop:

    none        no successors: no other generation is asked for
    spares      they wait for a crash, and nobody waits for them
    next        another generation is to begin. While one runs, it goes on until all of
                them wait. If one fails, or nobody needs them any more, it trains on;
                where they cannot rehearse beside it, it stops once they are forked, and
                among nodes at once
    offered     the others know what this node brings; they begin with the next round
"""

from __future__ import annotations

import enum
import os
import time
from collections.abc import Callable
from functools import partial

from elasticrun.errors import counted
from elasticrun.launcher import processes
from elasticrun.launcher.event_loop import EventLoop, Timer
from elasticrun.launcher.forks.starter import ForkserverClient
from elasticrun.launcher.forks.waiting import ForkedReplica, discard_all
from elasticrun.launcher.options import (
    OptionError,
    Options,
    check_batch,
    check_processors,
    check_shares,
)
from elasticrun.launcher.supervisor.generation import NO_IMPORTS, Generation
from elasticrun.launcher.supervisor.orders import orders_ahead
from elasticrun.launcher.supervisor.replica_reports import ReplicaReports
from elasticrun.launcher.terminal.console import Console
from elasticrun.replicas.wire import WireError

_CALM_SECONDS = 5.0  # A generation that crashes before has other needs than spares.
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

    None rehearses once a script has failed so, or where memory would not hold both.
    Spares wait before the script, or rehearse, as the user wishes. What they print is
    kept until their generation begins. One that prints more than a MiB comes no further
    before that.

    Args:
        on_ready: Called when all are there.
        on_prepared: Called with the reason when the running generation is to save and
            exit.

    Attributes:
        size: How many replicas the next generation gets on this node.
        beside: The generation that runs; None once it was asked to stop, or has ended.
        offered: The ones that this node has offered, until their generation begins.
    """

    def __init__(
        self,
        options: Options,
        loop: EventLoop,
        *,
        starter: ForkserverClient,
        console: Console,
        reports: ReplicaReports,
        on_ready: Callable[[], None],
        on_prepared: Callable[[str], None],
    ) -> None:
        self.size = options.replicas.initial
        self.beside: Generation | None = None
        self.offered: list[ForkedReplica] = []
        self._options = options
        self._loop = loop
        self._starter = starter
        self._console = console
        self._reports = reports
        self._on_ready = on_ready
        self._on_prepared = on_prepared
        self._replicas: list[ForkedReplica] = []
        self._num_requested = 0
        self._num_requests = 0
        self._use = _Use.NONE
        self._may_rehearse = True  # No script has failed beside a generation so far.
        self._runs_ahead = True  # Whether those of the last request rehearse.
        self._imports_ahead = True  # And whether such import before that.
        self._preparing: set[int] = set()  # Ranks that do not wait so far.
        self._watched: list[object] = []
        self._timer: Timer | None = None
        self._longest_start = 0.0
        self._begun_at = 0.0
        reports.on_ready.append(self._on_start)
        reports.on_trained.append(self._on_trained)

    @property
    def is_requested(self) -> bool:
        """Whether they were asked for, and not taken since; spares are not."""
        return self._use is _Use.NEXT

    @property
    def is_rescaling(self) -> bool:
        """Whether the running generation is to stop for one of another size."""
        beside = self.beside if self.is_requested else None
        return beside is not None and self.size != beside.size

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
        """How many of the spares have come to where they wait."""
        if self._use is not _Use.SPARES or not self._watched:
            return 0
        return self._num_requested - len(self._preparing)

    @property
    def pids(self) -> set[int]:
        """The process numbers of all, those included that were offered."""
        return {each.pid for each in (*self._replicas, *self.offered)}

    # What the supervisor asks for.

    def scale(
        self,
        size: int,
        generation: Generation | None,
        *,
        elsewhere: int = 0,
        is_forced: bool = False,
    ) -> str:
        """Go on with so many replicas; return what will happen.

        Those that run go on until all of the others need the job. If not all come so
        far, the job goes on with as many as before.

        Args:
            generation: The one that runs; it may have been asked to stop.
            elsewhere: How many there are on other nodes.
            is_forced: Even if there are too few samples, GPUs or cores for them.
        """
        before = self.size
        if size == before:
            return f"the job has {counted(size, 'replica')} already"
        if self.is_requested and self.beside is not None and size == self.beside.size:
            self._call_off(self.beside)  # It knows nothing of the rescaling yet.
            text = f"staying at {counted(size, 'replica')}, not {before}"
            self._console.event(text)
            return text
        # What the program itself gives, only its replicas know.
        told = None if generation is None else generation.num_shares
        num_shares = told or self._options.settings.virtual_replicas
        check_shares(size, elsewhere, num_shares)
        if size > before and not is_forced:
            uses_gpus = generation is not None and generation.uses_gpus
            check_processors(size, uses_gpus=uses_gpus)
            if generation is not None:
                check_batch(size, elsewhere, generation.batch_size)
        self.size = size
        text = _describe(before, size)
        self._console.event(text)
        if not self.offered:  # Else it is done once these have begun.
            self.prepare()
            if self.size != size:
                raise OptionError(
                    "no replica can be started; the launcher's output says why"
                )
        return text

    def prepare(self) -> None:
        """Fork them, or take the spares; a generation that runs stops for them."""
        beside = self.beside
        if beside is None and self._use is _Use.SPARES:
            may_come = self._runs_ahead or not self._preparing  # An import may hang.
            if self._num_requested == self.size and may_come:
                self._use = _Use.NEXT
                return
        if beside is not None and self._options.nodes is not None:
            self._stop(beside)
        self.prepare_beside(beside)

    def prepare_beside(self, generation: Generation | None) -> None:
        """Fork them, to rehearse beside a generation if they can."""
        self.discard()
        if generation is not None and not self._can_rehearse(
            self.size, generation, otherwise="these stop first"
        ):
            generation = None
        self._request_fork(self.size, _Use.NEXT, generation)

    def offer(self) -> list[ForkedReplica]:
        """Return them; until `take` they wait for the others' offers."""
        self.offered = self._release()
        return self.offered

    def take(self) -> list[ForkedReplica]:
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

    def _release(self) -> list[ForkedReplica]:
        self._end_rehearsal()
        released, self._replicas = self._replicas, []
        self._use = _Use.NONE
        return released

    def _stop(self, beside: Generation) -> None:
        self._on_prepared(_describe(beside.size, self.size))

    def _call_off(self, beside: Generation) -> None:
        """Let the running generation go on as it is."""
        self.size = beside.size
        self._discard_beside(beside)
        self._keep_spares()

    def _discard_beside(self, beside: Generation | None) -> None:
        self.discard()
        if beside is not None:
            self._starter.tell_groups([each.pid for each in beside.running])

    # How they come to be, and to be spares.

    def _keep_spares(self) -> None:
        """Fork as many spares as there are replicas, if the job is to have any."""
        beside = self.beside
        if (
            not self._options.spares
            or self.is_requested
            or beside is None
            or not beside.has_trained
        ):
            return
        self.discard()
        runs_ahead = self._options.spares == "prepared"
        if runs_ahead:
            fits = self._can_rehearse(
                beside.size, beside, otherwise="there are no spares"
            )
        else:
            fits = beside.size * _MOST_OF_IMPORTS <= processes.available_memory()
        if fits:
            self._request_fork(beside.size, _Use.SPARES, beside, runs_ahead=runs_ahead)

    def _on_trained(self, generation: Generation) -> None:
        def keep_spares() -> None:
            if generation is self.beside and not self.spares:
                self._keep_spares()

        self._loop.call_later(_CALM_SECONDS, keep_spares)

    def _on_start(self, generation: Generation) -> None:
        self._learn_start(time.monotonic() - generation.started_at)

    def _learn_start(self, seconds: float) -> None:
        """Learn how long it took until replicas had made their job, or needed it."""
        self._longest_start = max(self._longest_start, seconds)

    def _can_rehearse(self, size: int, beside: Generation, *, otherwise: str) -> bool:
        if not self._may_rehearse or not beside.has_job:
            return False
        most = max(processes.memory_of(member.pid) for member in beside.members)
        if size * most <= processes.available_memory():
            return True
        self._reports.tell(
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
        number, self._num_requested, self._use = self._num_requests, size, use
        self._runs_ahead = runs_ahead

        def on_forked(replicas: list[ForkedReplica]) -> None:
            if number != self._num_requests:  # Others, or none, are needed by now.
                discard_all(replicas)
                return
            self._replicas = replicas
            if beside is not None and beside.running:
                self._begin_rehearsal(beside)
            else:
                self._on_may_stop()
            self._on_ready()

        self._starter.fork(size, on_forked)

    # While they rehearse.

    def _begin_rehearsal(self, beside: Generation) -> None:
        limit = max(_LEAST_LIMIT, _STARTS_IN_LIMIT * self._longest_start)
        self._timer = self._loop.call_later(limit, lambda: self._on_too_slow(limit))
        self._begun_at = time.monotonic()
        self._preparing = set(range(self._num_requested))
        # Among nodes their generation may begin while they still import: too late for
        # others, if what they find does not suit.
        imports_ahead = self._imports_ahead and self._options.nodes is None
        orders = orders_ahead(
            self._options,
            self._replicas,
            [member.imports for member in beside.members]
            if imports_ahead or not self._runs_ahead
            else [NO_IMPORTS],
            runs_ahead=self._runs_ahead,
        )
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

    def _on_messages(self, replica: ForkedReplica) -> None:
        try:
            messages = replica.channel.receive()
        except WireError:
            messages, replica.channel.is_open = [], False
        for message in messages:
            if message["type"] == "waiting":
                self._on_waiting(replica)
            elif message["type"] == "unlike":
                self._on_unlike()
                return
            elif message["type"] == "failure":
                self._on_failed(replica, f"{message['summary']}\n{message['trace']}")
                return
        if not replica.channel.is_open:
            for output, printed in zip(replica.outputs, replica.printed, strict=True):
                if output in self._watched:
                    self._keep_output(output, printed)
            last = replica.printed[1][-_MOST_QUOTED:].decode(errors="replace")
            self._on_failed(
                replica, f"killed, or ended, before its generation began\n{last}"
            )

    def _on_waiting(self, replica: ForkedReplica) -> None:
        if replica.rank in self._preparing:
            self._preparing.remove(replica.rank)
            if not self._preparing:
                self._learn_start(time.monotonic() - self._begun_at)
                self._on_may_stop()

    def _on_may_stop(self) -> None:
        """Stop the generation for them: they wait, or cannot run beside it."""
        if self.is_requested and self.beside is not None:
            self._stop(self.beside)

    def _on_too_slow(self, limit: float) -> None:
        """Stop the generation: they may never be ready beside it."""
        if self.is_requested and self.beside is not None:
            self._reports.tell(
                "not all new replicas came to the line that needs the job within "
                f"{limit:.0f} s; the running replicas stop for them now"
            )
            self._stop(self.beside)

    def _on_unlike(self) -> None:
        """Do without those that import ahead: the program might find something else."""
        if self.is_requested:
            self._imports_ahead = False
            self.prepare_beside(self.beside)
            return
        self._discard_beside(self.beside)
        if self._options.spares == "prepared":
            self._imports_ahead = False
            self._keep_spares()

    def _on_failed(self, replica: ForkedReplica, why: str) -> None:
        """Do without a successor whose script has raised, or that has ended."""
        if self._runs_ahead and replica.rank in self._preparing:
            self._may_rehearse = False  # Not by a kill of one that waits.
        self._end_rehearsal()
        why = f"It was local rank {replica.rank}: {why.rstrip()}"
        beside, may_rehearse = self.beside, self._may_rehearse
        if self.is_requested and beside is not None:
            # The running generation knows nothing of them, so it goes on.
            first = "" if may_rehearse else "; the next rescaling stops them first"
            self._call_off(beside)
            self._reports.tell(
                f"a new replica failed, so the running ones go on{first}. {why}",
                is_over=True,
            )
        elif self.is_requested:
            # It has been asked to stop, or has ended, so there must be successors.
            self._console.event(f"a new replica failed, so others are started. {why}")
            self.prepare_beside(None)
        elif self._options.spares == "prepared":
            more = "others take their place" if may_rehearse else "there are no more"
            self._console.event(f"a spare failed; {more}. {why}")
            self._discard_beside(beside)
            self._keep_spares()
        else:
            # Nobody has asked for spares that only import: a crash just takes longer.
            self._discard_beside(beside)


def _describe(before: int, size: int) -> str:
    return f"rescaling from {before} to {counted(size, 'replica')}"
