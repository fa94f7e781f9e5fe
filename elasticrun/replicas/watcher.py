"""The watcher: a thread that handles signals, deadlines and messages."""

from __future__ import annotations

import math
import queue
import select
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from elasticrun.errors import BY_SIGNAL
from elasticrun.logger import Logger
from elasticrun.replicas.agreement import (
    CHECKPOINT,
    STOP,
    Answer,
    Ask,
    CallOff,
    Close,
    Coordinator,
    Dead,
    Decision,
    Farewell,
    Gate,
    GiveUp,
    HasLeft,
    HungUp,
    Report,
    Request,
    decode,
    encode,
)
from elasticrun.replicas.links import Links
from elasticrun.replicas.process_end import exit_at_once
from elasticrun.replicas.signals import STOP_SIGNALS, SignalPipe
from elasticrun.replicas.stop_clock import NAMING_SECONDS, StopClock

logger = Logger(__name__)

_FAREWELL_SECONDS = 5.0
_OTHERS_SECONDS = 30.0  # For others to come to their end: they need rank 0's store.


class Watcher:
    """Handles signals, deadlines and messages; on rank 0 it also coordinates.

    Its thread waits on the connections to other watchers, and on a pipe that signals
    and the training thread write to; never on the store, so that it keeps deadlines.

    Args:
        links: The connections to the other replicas' watchers; None when there is one
            replica.
        grace: Seconds that a stop asked for by a signal may take.
        save_interval: Seconds between the checkpoints that rank 0 asks for; infinite
            for none.
        describe: Says where the program is, for the message of a stop that took too
            long.
        gone: On rank 0, it adds to it who takes part no more, and what became of that
            rank.
        is_saving: Whether a save is in flight. What is due by time then waits until
            `save_after` is called.
        stuck_seconds: How long a loop may go on without a boundary once a replica is
            gone, since collectives on GPUs wait for it; infinite where they fail.
        is_in_loop: Whether boundaries are to come.
        counts: What this replica has counted, for others to compare.

    Attributes:
        has_lost: Whether another replica has died; from any thread.
    """

    def __init__(
        self,
        gate: Gate,
        *,
        rank: int,
        world_size: int,
        links: Links | None,
        grace: float,
        save_interval: float,
        describe: Callable[[], str],
        gone: dict[int, str],
        is_saving: Callable[[], bool] = lambda: False,
        stop_signals: Sequence[int] = STOP_SIGNALS,
        stuck_seconds: float = math.inf,
        is_in_loop: Callable[[], bool] = lambda: True,
        counts: Callable[[], list[int]] = list,
    ) -> None:
        self._gate = gate
        self._rank = rank
        self._world_size = world_size
        self._grace = grace
        self._is_saving = is_saving
        self._is_in_loop = is_in_loop

        # How messages come and go. The inbox is for this replica's own threads.
        self._pipe = SignalPipe(stop_signals)
        self._links = links  # As long as they stand.
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()

        # What ends late: a stop by its clock, an agreement by rank 0's coordinator, and
        # what else is to be done at a time, by this table.
        self._clock = StopClock(grace, describe)
        self._coordinator = Coordinator(world_size, grace) if rank == 0 else None
        self._due: dict[Callable[[], None], float] = {}
        self._save_interval = save_interval
        self._saved_at = time.monotonic()
        self._save_at = self._saved_at + save_interval

        # Who takes part, and how this replica ends.
        self._present = set(range(world_size))  # The ranks that have not left.
        self._gone = gone
        self._is_leaving = False  # Rank 0, which waits for the others.
        self._has_ended = False
        self._given_up: int | None = None  # The exit code, once a stop was given up.
        self._stuck_seconds = stuck_seconds
        self._lost: tuple[str, int] | None = None  # Why, and after which boundary.
        self.has_lost = False

        # What replicas have counted, for `in_step`.
        self._counts = counts
        self._reports: dict[int, list[int]] = {}

        self._handlers: dict[type, Callable[[Any], None]] = {
            Request: self._on_request,
            Ask: self._on_ask,
            Answer: self._on_answer,
            Decision: self._on_decision,
            GiveUp: self._on_give_up,
            CallOff: lambda _: self._go_on(),
            Close: self._on_close,
            Farewell: self._on_farewell,
            HasLeft: self._on_left,
            HungUp: self._on_hung_up,
            Dead: self._on_dead,
            Report: self._on_report,
        }
        self._thread = threading.Thread(
            target=self._run, name="elasticrun-watcher", daemon=True
        )

    def start(self) -> None:
        """Take the stop signals and start watching."""
        self._pipe.install()
        self._thread.start()

    def request(self, kind: str, *, cause: str, exit_code: int = 0) -> None:
        """Ask for a checkpoint or a stop; returns at once."""
        if self._world_size == 1:
            self._gate.schedule(kind, cause, exit_code)
            return
        # Where the program is now: what is agreed before this is read may serve it.
        self._put(Request(kind, cause, exit_code, at=self._gate.number))

    def ask(self) -> None:
        """Ask the other replicas what they have counted; returns at once."""
        self._put(Report(self._rank, None, self._counts()))

    def reports(self) -> dict[int, list[int] | None]:
        """Return what each other replica has last answered, None if it has not yet.

        Those that have left the job are left out.
        """
        answers = {r: self._reports.get(r) for r in range(self._world_size)}
        del answers[self._rank]
        return {rank: each for rank, each in answers.items() if each != []}

    def note_saved(self, interval: float) -> None:
        """Let the next checkpoint by time come so many seconds after this one."""
        self._saved_at = time.monotonic()
        self.save_after(interval)

    def save_after(self, interval: float) -> None:
        """Let it come so many seconds after the last one began; from any thread."""
        self._save_interval = interval
        self._save_at = self._saved_at + interval
        if interval != math.inf:
            self._pipe.wake()  # It may be about to sleep until another deadline.

    def on_stopping(self) -> None:
        """The training thread has come to its stop; it may take its time."""
        self._clock.on_stopping()

    def close(self) -> None:
        """Stop watching; rank 0, which serves the store, first waits for the others."""
        self._put(Close())
        serves_others = self._rank == 0 and self._world_size > 1
        self._thread.join(_FAREWELL_SECONDS + _OTHERS_SECONDS * serves_others)
        self._pipe.uninstall()
        if not self._thread.is_alive():
            self._pipe.close()

    def _put(self, message: object) -> None:
        """Have the watcher's thread handle a message; from any thread."""
        self._inbox.put(message)
        self._pipe.wake()

    # The watcher thread.

    def _run(self) -> None:
        try:
            self._watch()
        except BaseException as error:
            self._gate.fail(f"the thread that watches for stops failed: {error!r}")
            raise
        finally:
            self._disconnect(timeout=_FAREWELL_SECONDS)

    def _watch(self) -> None:
        while not self._has_ended:
            self._wait()
            for number in self._pipe.read():
                self._on_signal(number)
            for message in self._received():
                self._handlers[type(message)](message)
            self._on_time(time.monotonic())

    def _wait(self) -> None:
        poll = select.poll()  # `select` takes no descriptor above 1023.
        poll.register(self._pipe, select.POLLIN)
        if self._links is not None:
            poll.register(self._links, select.POLLIN)
        seconds = self._seconds_to_next_deadline()
        poll.poll(None if seconds is None else math.ceil(seconds * 1000))

    def _seconds_to_next_deadline(self) -> float | None:
        deadlines = [self._clock.deadline, self._clock.warns_at, *self._due.values()]
        if self._coordinator is not None:
            deadlines.append(self._coordinator.deadline)
            if self._may_save_by_time():
                deadlines.append(self._save_at)
        known = [d for d in deadlines if d is not None and d != math.inf]
        if not known:
            return 1.0 if self._save_interval != math.inf else None
        return max(0.0, min(min(known) - time.monotonic(), 3600.0))

    def _on_signal(self, number: int) -> None:
        if self._clock.on_signal(number):
            number = signal.Signals(number)
            self._request(STOP, number.name, BY_SIGNAL[number])

    def _on_time(self, now: float) -> None:
        self._clock.on_time(now)
        for act in [act for act, when in self._due.items() if when <= now]:
            del self._due[act]
            act()
        if self._coordinator is None:
            return
        self._broadcast(self._coordinator.on_time(now))
        if now >= self._save_at and self._may_save_by_time():
            self._save_at = math.inf  # Not again before this one is written.
            self._request(CHECKPOINT, "save_interval", 0)

    def _do_in(self, seconds: float, act: Callable[[], None]) -> None:
        """Call it after so many seconds, unless it is taken from the table before."""
        self._due[act] = time.monotonic() + seconds

    def _may_save_by_time(self) -> bool:
        is_timed = self._save_interval > 0 and self._gate.number > 0
        return is_timed and not self._is_saving()

    def _request(self, kind: str, cause: str, exit_code: int) -> None:
        self._send({0}, Request(kind, cause, exit_code, at=self._gate.number))

    def _on_request(self, request: Request) -> None:
        if self._coordinator is None:  # Of this replica's own threads.
            self._send({0}, request)
            return
        if len(self._present) < self._world_size:
            return  # Somebody's program has ended: no boundary of all is to come.
        self._broadcast(self._coordinator.on_request(request, time.monotonic()))

    def _on_ask(self, ask: Ask) -> None:
        self._clock.on_heard()
        boundary = self._gate.promise()
        # Rank 0 gives an agreement up after the grace, and says so, unless it hangs.
        self._do_in(self._grace + _FAREWELL_SECONDS, self._on_no_answer)
        self._send({0}, Answer(ask.number, self._rank, boundary))

    def _on_answer(self, answer: Answer) -> None:
        assert self._coordinator is not None
        self._broadcast(
            self._coordinator.on_answer(answer.number, answer.rank, answer.boundary)
        )

    def _on_no_answer(self) -> None:
        self._gate.fail(
            f"rank 0 did not say where to act within {self._grace:g} s. It may hang or "
            "be stopped; look at its log. Training cannot go on without it."
        )

    def _on_decision(self, decision: Decision) -> None:
        self._due.pop(self._on_no_answer, None)
        is_pressing = decision.kind == STOP and decision.cause.startswith("SIG")
        if is_pressing:
            self._clock.on_heard()
            self._clock.on_decided()
        self._gate.settle(decision)

    def _on_give_up(self, message: GiveUp) -> None:
        text = f"{message.reason}, so no boundary could be agreed"
        if message.kind != STOP:
            logger.warning("%s: no checkpoint this time", text)
            self._go_on()
            return
        self._due.pop(self._on_no_answer, None)
        logger.error("%s: exiting without a new checkpoint", text)
        if self._rank != 0:
            exit_at_once(message.exit_code)
        # The others must have heard before rank 0 is gone.
        self._given_up = message.exit_code
        self._do_in(NAMING_SECONDS, lambda: exit_at_once(message.exit_code))
        self._end_if_alone()

    # Leaving: rank 0 serves the store, so the others must not need it any more.

    def _on_close(self, _: Close) -> None:
        if self._rank == 0:
            self._present.discard(0)
            self._is_leaving = True
            self._do_in(_OTHERS_SECONDS, self._end)  # Who is left is dead or hangs.
            self._broadcast(Farewell())
            self._end_if_alone()
        else:
            self._send({0}, HasLeft(self._rank))
            self._end()

    def _end(self) -> None:
        self._has_ended = True

    def _on_farewell(self, _: Farewell) -> None:
        self._gate.settle(None)
        self._send({0}, HasLeft(self._rank))
        self._disconnect(timeout=_FAREWELL_SECONDS)

    def _on_left(self, left: HasLeft) -> None:
        assert self._coordinator is not None
        self._remove(left.rank, "its program has ended")
        self._broadcast(self._coordinator.on_left())

    def _on_death(self, rank: int) -> None:
        assert self._coordinator is not None
        self._remove(rank, "its process died")
        given_up = self._coordinator.on_death(rank)
        self._broadcast(given_up)
        if given_up is None or given_up.kind != STOP:  # Else all exit anyway.
            self._broadcast(Dead(rank))

    def _remove(self, rank: int, fate: str) -> None:
        self._present.discard(rank)
        self._gone[rank] = fate
        self._end_if_alone()

    def _end_if_alone(self) -> None:
        """End rank 0's part once nobody needs it: its thread, or its process."""
        if self._is_leaving and not self._present:
            self._end()
        if self._given_up is not None and self._present == {0}:
            exit_at_once(self._given_up)

    def _go_on(self) -> None:
        """Let the training thread pass boundaries again, without a decision."""
        self._due.pop(self._on_no_answer, None)
        self._save_at = time.monotonic() + self._save_interval
        self._gate.settle(None)

    def _on_hung_up(self, hung_up: HungUp) -> None:
        if self._rank == 0:
            if hung_up.rank in self._present:  # It has not said that it leaves.
                self._on_death(hung_up.rank)
            return
        self._disconnect()
        self._lose(
            "rank 0 is gone. Without it no boundary can be agreed and no checkpoint "
            "committed; start the job again, it resumes at the last one."
        )

    def _on_dead(self, dead: Dead) -> None:
        self._lose(
            f"the process of rank {dead.rank} died. Without it no boundary can be "
            "agreed and no checkpoint committed. Look at its log; start the job again, "
            "it resumes at the last checkpoint."
        )

    def _lose(self, why: str) -> None:
        """Have the program fail at its next boundary, if it ever comes there."""
        self.has_lost = True
        self._gate.fail(why)
        if self._lost is None:
            self._lost = why, self._gate.number
            self._do_in(self._stuck_seconds, self._exit_if_stuck)

    def _exit_if_stuck(self) -> None:
        assert self._lost is not None
        why, boundary = self._lost
        if self._gate.number > boundary:
            self._lost = None  # It came to one, which raised.
        elif self._is_in_loop():
            self._clock.exit_stuck(why, self._stuck_seconds)
        else:
            self._do_in(self._stuck_seconds, self._exit_if_stuck)

    def _on_report(self, report: Report) -> None:
        if report.rank != self._rank and report.to in (None, self._rank):
            self._reports[report.rank] = report.counts
            if report.to is None:
                self._on_report(Report(self._rank, report.rank, self._counts()))
        if self._coordinator is None:
            if report.rank == self._rank:
                self._send({0}, report)
            return
        known = self._present if report.to is None else {report.to}
        self._send(known - {0, report.rank}, report)
        for rank in range(self._world_size if report.to is None else 0):
            if rank not in self._present:
                self._on_report(Report(rank, report.rank, []))

    # Mail.

    def _received(self) -> Iterator[object]:
        """Yield what has come, without waiting."""
        while not self._inbox.empty():
            yield self._inbox.get()
        if self._links is not None:
            yield from map(decode, self._links.read())

    def _broadcast(self, message: object) -> None:
        """Send a message to all who have not left; None is no message."""
        if message is not None:
            self._send(self._present, message)

    def _send(self, ranks: Collection[int], message: object) -> None:
        """Send a message, without waiting; it is dropped if nobody is there."""
        if self._rank in ranks:
            self._put(message)  # Wakes: it may be a deadline that sends it.
        others = sorted({*ranks} - {self._rank})
        if others and self._links is not None:
            self._links.send(others, encode(message))

    def _disconnect(self, *, timeout: float = 0.0) -> None:
        """Hang up, once everything was sent or `timeout` seconds are over."""
        if self._links is not None:
            self._links.close(timeout=timeout)
            self._links = None
