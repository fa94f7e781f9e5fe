"""The launcher's core: generations begin and end until the job does."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable

from elasticrun.launcher import directory, processes
from elasticrun.launcher.causes import (
    STOP_CODES,
    Ending,
    first_cause,
)
from elasticrun.launcher.console import Console
from elasticrun.launcher.generation import Generation, Member
from elasticrun.launcher.hangs import HangClock
from elasticrun.launcher.imports import imports_of
from elasticrun.launcher.loop import Loop
from elasticrun.launcher.options import Options
from elasticrun.launcher.orders import make_orders
from elasticrun.launcher.output import marked
from elasticrun.launcher.restarts import Budget
from elasticrun.launcher.starter import Parked, Starter
from elasticrun.launcher.stragglers import Stragglers
from elasticrun.launcher.watchdog import Watchdog

EXIT_FAILED = 1
EXIT_STOPPED = 75
_AFTER_GRACE_SECONDS = 3.0


class Stop(enum.Enum):
    """Why the launcher asked the running generation to save and exit."""

    NONE = 0
    SCALE = 1
    END = 2


class Supervisor:
    """Keeps a job running: starts generations, judges their ends, obeys requests.

    Attributes:
        generation: The one that runs, or None between two.
        size: How many replicas the next generation gets.
        num_restarts: Restarts after crashes so far.
        causes: What they were, the last ones.
        on_ready: Called when all replicas of a generation have made their job.
        on_reported: Called with each replica that said where it is.
    """

    def __init__(self, options: Options, console: Console, loop: Loop) -> None:
        self.options = options
        self.loop = loop
        self.generation: Generation | None = None
        self.size = options.replicas.initial
        self.num_restarts = 0
        self.causes: list[str] = []
        self.exit_code: int | None = None
        self.started_at = time.time()
        self.on_ready: list[Callable[[], None]] = []
        self.on_reported: list[Callable[[Member], None]] = []
        self._console = console
        self._budget = Budget(options.max_restarts)
        self._stragglers = Stragglers()
        self._watchdog = Watchdog(loop, console.event, HangClock(options.hang_timeout))
        self._stop = Stop.NONE
        self._stop_code = EXIT_STOPPED
        self._parked: list[Parked] | None = None
        self._num_asked = 0
        self._may_begin = True
        self._last_number = -1
        self._has_trained = False
        self._newest_at_start = directory.newest_checkpoint(options.checkpoint_dir)
        self._last_trace = ""
        self._is_known_ready = False
        self._starter = Starter(
            loop,
            imports=[] if options.is_exec else imports_of(options.program),
            is_exec=options.is_exec,
            say=console.event,
            on_failure=self._fail,
        )

    # From outside.

    def start(self) -> None:
        """Start the forkserver, and with it the first generation."""
        self._starter.start()
        self._prepare()

    def close(self) -> None:
        """Leave no process behind."""
        self._starter.close()
        if self.generation is not None:
            self.generation.kill()
        processes.kill_children(but=set())

    @property
    def state(self) -> str:
        """What it is doing, in a word."""
        if self._stop is not Stop.NONE:
            return "rescaling" if self._stop is Stop.SCALE else "stopping"
        if self.generation is None:
            return "starting" if self._may_begin else "waiting"
        return "training" if self.generation.has_job else "starting"

    def scale(self, size: int) -> str:
        """Go on with so many replicas; return what will happen.

        Raises:
            OptionError: The number is out of bounds.
        """
        self.options.replicas.check(size)
        if self._stop is Stop.END:
            return "the job is stopping, so it is not rescaled"
        if size == self.size:
            return f"the job has {size} replicas already"
        before, self.size = self.size, size
        text = f"rescaling from {before} to {size} replicas"
        self._console.event(text)
        self._prepare()
        if self.generation is not None and self._stop is Stop.NONE:
            self._ask_to_stop(Stop.SCALE, f"a rescaling to {size} replicas")
        return text

    def stop(self, cause: str, code: int) -> None:
        """Save and end the job; the second time, end it at once."""
        if self._stop is Stop.END:
            self._console.event(f"{cause} again: ending at once")
            self.exit_code = self._stop_code
            return
        self._stop_code = code
        generation = self.generation
        if generation is None or not any(m.report for m in generation.members):
            self._console.event(f"{cause}: ending; nothing was trained since the start")
            self.exit_code = code
            return
        self._console.event(
            f"{cause}: saving at the next boundary (again: ends at once)"
        )
        self._ask_to_stop(Stop.END, cause)

    # Beginning.

    def _prepare(self) -> None:
        """Have replicas wait for the next generation."""
        if self._parked is not None:
            for parked in self._parked:
                parked.discard()
            self._parked = None
        self._num_asked += 1
        number = self._num_asked

        def on_ready(parked: list[Parked]) -> None:
            if number != self._num_asked:
                for each in parked:
                    each.discard()
                return
            self._parked = parked
            self._begin_if_ready()

        self._starter.park(self.size, on_ready)

    def _begin_if_ready(self) -> None:
        if self.generation is not None or not self._may_begin or self._parked is None:
            return
        parked, self._parked = self._parked, None
        pids = [each.pid for each in parked]
        processes.kill_children(but={self._starter.pid, *pids})
        number = max(directory.next_generation(self.options.checkpoint_dir), 0)
        if self._has_trained and number <= self._last_number:
            number = self._last_number + 1  # The script has another directory.
        self._last_number = number
        self._stop = Stop.NONE
        self._is_known_ready = False
        generation = Generation(
            parked,
            number=number,
            loop=self.loop,
            log_dir=self.options.log_dir,
            listener=self,
        )
        self.generation = generation
        self._watchdog.begin(generation)
        self._starter.note_running(pids)
        generation.start(
            make_orders(
                self.options,
                generation=number,
                size=len(parked),
                port=parked[0].port,
            )
        )
        self._console.event(
            f"generation {number}: {len(parked)} replica"
            f"{'s' * (len(parked) > 1)} started"
        )

    # While it runs.

    def on_output(self, rank: int, line: bytes, *, is_error: bool) -> None:
        """Show a line that a replica printed."""
        self._console.output(marked(rank, line), is_error=is_error)

    def on_report(self, member: Member) -> None:
        """Note where a replica is."""
        generation = self.generation
        assert generation is not None
        if not self._is_known_ready and generation.has_job:
            self._is_known_ready = True
            if member.report["was_resumed"]:
                self._console.event(
                    f"generation {generation.number}: resumed at "
                    f"{member.report['position']}"
                )
            for call in self.on_ready:
                call()
        for report_to in self.on_reported:
            report_to(member)
        if member.report["has_trained"]:
            self._has_trained = True
        slow = self._stragglers.note([each.report for each in generation.members])
        if slow:
            self._console.event(slow)

    def on_modules(self, names: list[str]) -> None:
        """Let the forkserver import what the program did, while nobody waits for it."""
        self._starter.learn(names)

    def on_trouble(self) -> None:
        """End a generation in which a replica has failed."""
        self._watchdog.on_trouble()

    def _ask_to_stop(self, stop: Stop, cause: str) -> None:
        assert self.generation is not None
        if self._stop is Stop.NONE:
            self.generation.ask_to_stop(cause)
        self._stop = stop
        self._watchdog.expect_end(
            grace=self.options.grace, leeway=_AFTER_GRACE_SECONDS, cause=cause
        )

    # Its end.

    def on_all_ended(self) -> None:
        """Judge how the generation ended, and begin the next one or end the job."""
        generation, self.generation = self.generation, None
        assert generation is not None
        self._watchdog.end()
        self._starter.note_running([])
        cause = first_cause(generation.endings)
        if cause is None and all(ending.code == 0 for ending in generation.endings):
            self._finish()
        elif self._stop is Stop.END:
            self._end_stopped(generation, cause)
        elif cause is not None or self._watchdog.reason:
            self._restart(generation, cause)
        elif self._stop is Stop.SCALE:
            self._begin_if_ready()
        else:
            code = max(e.code for e in generation.endings if e.code in STOP_CODES)
            self._console.event(
                f"stopped by itself with exit code {code}; the same command goes on"
            )
            self.exit_code = code

    def _finish(self) -> None:
        directory.note_finished(self.options.checkpoint_dir, self.options.program)
        self._console.event(
            f"finished after {time.time() - self.started_at:.0f} s"
            + (f" and {self.num_restarts} restarts" if self.num_restarts else "")
        )
        self.exit_code = 0

    def _end_stopped(self, generation: Generation, cause: Ending | None) -> None:
        if cause is None:
            newest = generation.newest_checkpoint(self.options.checkpoint_dir)
            saved = f"checkpoint {newest} is saved" if newest else "nothing was saved"
            self._console.event(f"stopped; {saved}; the same command goes on")
        else:
            reason = self._watchdog.reason or generation.explain(cause)
            self._console.event(f"stopped without a new checkpoint: {reason}")
        self.exit_code = self._stop_code

    def _restart(self, generation: Generation, cause: Ending | None) -> None:
        text = self._watchdog.reason or (generation.explain(cause) if cause else "")
        where = generation.members[0].report.get("position", "the start of the script")
        self.causes = [*self.causes[-9:], f"generation {generation.number}: {text}"]
        self._console.event(
            f"generation {generation.number} crashed at {where}: {text}"
        )
        self._last_trace = cause.failure.trace if cause and cause.failure else ""
        newest = generation.newest_checkpoint(self.options.checkpoint_dir)
        if not self._has_trained and newest <= self._newest_at_start:
            self._fail("this was before the first batch, so it is not tried again")
            return
        delay = self._budget.on_crash(newest)
        if delay is None:
            self._fail(
                f"{self.options.max_restarts} restarts without a newer checkpoint are "
                "used up (--max-restarts)"
            )
            return
        self.num_restarts += 1
        self._console.event(
            f"restart {self._budget.num_used} of {self.options.max_restarts}"
            + (f" in {delay:.0f} s" if delay else "")
            + (f" from checkpoint {newest}" if newest else " from the beginning")
        )
        self._stop = Stop.NONE
        self._may_begin = delay == 0
        if delay:
            self.loop.call_later(delay, self._end_delay)
        if self._parked is None:
            self._prepare()
        self._begin_if_ready()

    def _end_delay(self) -> None:
        self._may_begin = True
        self._begin_if_ready()

    def _fail(self, why: str) -> None:
        if self._last_trace:
            self._console.detail(self._last_trace)
        self._console.event(f"failed: {why}")
        self.exit_code = EXIT_FAILED
