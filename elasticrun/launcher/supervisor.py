"""The launcher's core: generations begin and end until the job does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from elasticrun.launcher import directory, processes
from elasticrun.launcher.console import Console
from elasticrun.launcher.crashes import CrashBook
from elasticrun.launcher.functions import forget_results
from elasticrun.launcher.generation import Generation, Member
from elasticrun.launcher.hangs import HangClock
from elasticrun.launcher.imports import imports_of
from elasticrun.launcher.judging import EXIT_STOPPED, Judge, Next, Stop
from elasticrun.launcher.limits import check_open_files
from elasticrun.launcher.loop import Loop
from elasticrun.launcher.news import News
from elasticrun.launcher.nodes import END, LEAVE, SCALE, Nodes, Offer, Round
from elasticrun.launcher.options import OptionError, Options
from elasticrun.launcher.orders import make_orders
from elasticrun.launcher.outcomes import CRASHED, LEFT, Outcome, outcome_of
from elasticrun.launcher.parked import Parked
from elasticrun.launcher.reserve import Reserve
from elasticrun.launcher.starter import Starter
from elasticrun.launcher.watchdog import Watchdog

_AFTER_GRACE_SECONDS = 3.0


class Supervisor:
    """Keeps a job running: starts generations, judges their ends, obeys requests.

    Args:
        meet: Makes the nodes of the job, which tell this supervisor what they do.

    Attributes:
        generation: The one that runs, or None between two.
        size: How many replicas the next generation gets on this node.
        nodes: The machines of the job.
        crashes: The crashes so far.
        judge: Decides what follows from the end of a generation.
        problem: Why it, or the generation before, ended without saving what was
            trained; empty if it did not.
        news: Tells what is heard of the generation that runs.
    """

    def __init__(
        self,
        options: Options,
        console: Console,
        loop: Loop,
        *,
        meet: Callable[[Supervisor], Nodes],
    ) -> None:
        self.options = options
        self.loop = loop
        self.generation: Generation | None = None
        self.size = options.replicas.initial
        self.crashes = CrashBook(
            options.max_restarts,
            newest_at_start=directory.newest_checkpoint(options.checkpoint_dir),
        )
        self.judge = Judge(options, console, self.crashes)
        self.exit_code: int | None = None
        self.problem = ""
        self.news = News(console, self.crashes)
        # Of whoever became the launcher, as by `tensorboard & exec elasticrun run`.
        self._strangers = set(processes.children())
        self._console = console
        self._watchdog = Watchdog(
            loop,
            console.event,
            HangClock(options.hang_timeout),
            on_hang=lambda: self.nodes.note_trouble(is_hang=True),
        )
        self._stop = Stop.NONE
        self._stop_code = EXIT_STOPPED
        self._is_hurried = False
        self._is_judging = False
        self._is_preparing = False  # For a rescaling; the generation knows nothing yet.
        self._may_begin = True
        self._last_number = -1
        self._last_size = 0
        self._starter = Starter(
            loop,
            imports=[] if options.is_exec else imports_of(options.program),
            is_exec=options.is_exec,
            say=console.event,
            on_failure=self._on_no_replicas,
        )
        self._reserve = Reserve(
            self._starter, self._begin_if_ready, on_first=self._on_first_replica
        )
        self._offered: list[Parked] = []
        self.nodes = meet(self)

    # From outside.

    def start(self) -> None:
        """Start the forkserver, and with it the first generation."""
        self._starter.start()
        self.nodes.open()

    def close(self) -> None:
        """Leave no process behind."""
        self._starter.close()
        if self.generation is not None:
            self.generation.kill()
        self.nodes.close(is_hurried=self._is_hurried)
        processes.kill_children(but=self._strangers)

    @property
    def state(self) -> str:
        """What it is doing, in a word."""
        if self._stop is not Stop.NONE:
            return "rescaling" if self._stop is Stop.SCALE else "stopping"
        if self.generation is None:
            return "starting" if self._may_begin else "waiting"
        return "training" if self.generation.has_job else "starting"

    @property
    def is_rescaling(self) -> bool:
        """Whether the generation that runs is to give way to one of another size."""
        return self._is_preparing or self._stop is Stop.SCALE

    def scale(self, size: int) -> str:
        """Go on with so many replicas; return what will happen.

        Those that run go on until the first of the others waits. If not all can be
        started, the job goes on with as many as before.

        Raises:
            OptionError: The number is out of bounds, or too large for the launcher, or
                no replica can be started.
        """
        self.options.replicas.check(size)
        if self._stop is Stop.END:
            return "the job is stopping, so it is not rescaled"
        if size == self.size:
            return f"the job has {size} replicas already"
        running = self.generation.size if self.generation is not None else 0
        if size == running and self._is_preparing and self._stop is Stop.NONE:
            return self._stay()
        check_open_files(size, num_running=running)
        before, self.size = self.size, size
        text = f"rescaling from {before} to {size} replicas"
        self._console.event(text)
        if not self._offered:  # Else it begins with those, and is rescaled then.
            self._prepare()
            if self.size != size:
                raise OptionError("no replica can be started; the launcher says why")
        return text

    def stop(self, cause: str, code: int, *, is_for_all: bool = False) -> None:
        """Save and end the job here; the second time, end it at once.

        Args:
            is_for_all: End it on all nodes, not only here.
        """
        if self._stop is Stop.END:
            self._console.event(f"{cause} again: ending at once")
            self._is_hurried = True
            if self.generation is not None:
                self.problem = "ended at once, without a new checkpoint"
            self.exit_code = self._stop_code
            return
        self._stop_code = code
        wish = END if is_for_all or self.nodes.is_needed else LEAVE
        generation = self.generation
        if self._is_judging:
            self._stop = Stop.END
            self.nodes.wish(wish, cause)
            return
        if generation is None or not generation.has_begun:
            self.judge.note_idle_end(cause)
            self.nodes.leave(wish, cause)
            self.exit_code = code
            return
        self._console.event(
            f"{cause}: saving at the next boundary (again: ends at once)"
        )
        self.nodes.wish(wish, cause)
        self._ask_to_stop(Stop.END, cause)

    # Beginning.

    def on_open(self, bind: str) -> None:
        """Have replicas wait that other nodes can reach, and begin with them."""
        if bind != self._starter.outward:
            self._starter.outward = bind
            self._reserve.discard()
            for each in self._offered:
                each.discard()
            self._offered = []
        if self.generation is None and not (self._reserve.is_asked or self._offered):
            self._reserve.prepare(self.size)
            self._begin_if_ready()

    def _prepare(self) -> None:
        """Have replicas wait; what runs gives way to them once the first one does."""
        self._is_preparing = self.generation is not None and self._stop is Stop.NONE
        self._reserve.prepare(self.size)

    def _stay(self) -> str:
        """Give up a rescaling of which what runs knows nothing yet."""
        assert self.generation is not None
        self._is_preparing = False
        self._reserve.discard()
        before, self.size = self.size, self.generation.size
        text = f"staying at {self.size} replica{'s' * (self.size > 1)}, not {before}"
        self._console.event(text)
        return text

    def _on_first_replica(self) -> None:
        """Have what runs give way: others can be started."""
        if self.generation is None:
            return
        if self._is_preparing and self._stop is Stop.NONE:
            self._is_preparing = False
            before = self.generation.size
            self.nodes.wish(SCALE, f"rescaling from {before} to {self.size} replicas")
            self._ask_to_stop(Stop.SCALE, f"a rescaling to {self.size} replicas")

    def _begin_if_ready(self) -> None:
        is_between = self.generation is None and not self._is_judging
        if is_between and self._may_begin and not self._offered:
            self.nodes.join()

    def on_seat(self) -> None:
        """Offer the replicas that wait for it."""
        if not self._reserve.is_ready or not self._may_begin:
            return
        self._offered = self._reserve.take()
        number = max(directory.next_generation(self.options.checkpoint_dir), 0)
        if self.crashes.has_trained and number <= self._last_number:
            number = self._last_number + 1  # The script has another directory.
        self.nodes.offer(
            Offer(
                share=len(self._offered),
                ports=self._offered[0].ports,
                number=number,
                has_trained=self.crashes.has_trained,
                newest_at_crash=self.crashes.budget.newest_at_crash,
                num_used=self.crashes.budget.num_used,
            )
        )

    def on_round(self, round_: Round) -> None:
        """Let the replicas go that were offered."""
        parked, self._offered = self._offered, []
        pids = {each.pid for each in parked}
        waiting = self._reserve.pids | self.nodes.pids | self._strangers
        processes.kill_children(but={self._starter.pid, *pids, *waiting})
        self._last_number, self._last_size = round_.number, round_.share
        self.crashes.adopt(round_)
        self._stop = Stop.NONE
        self._is_preparing = False
        self.news.forget()
        generation = Generation(
            parked,
            number=round_.number,
            offset=round_.offset,
            loop=self.loop,
            log_dir=self.options.log_dir,
            listener=self,
        )
        self.generation = generation
        self._watchdog.begin(generation, is_alone=round_.num_nodes == 1)
        self._starter.note_running(sorted(pids))
        if self.options.program.kind == "function":
            forget_results(Path(self.options.program.target))
        generation.start(make_orders(self.options, round_))
        self._console.event(round_.describe())
        self.news.begin(generation)
        if round_.share != self.size:  # Rescaled after it was offered.
            self._prepare()

    # While it runs.

    def on_output(self, rank: int, line: bytes, *, is_error: bool) -> None:
        """Show a line that a replica printed."""
        self.news.note_output(rank, line, is_error=is_error)

    def on_log_failure(self, rank: int, error: OSError) -> None:
        """Say that what replicas print is not kept."""
        self.news.note_log_failure(rank, error)

    def on_report(self, member: Member) -> None:
        """Note where a replica is."""
        self.news.note_report(member)

    def on_modules(self, names: list[str], variables: dict[str, str | None]) -> None:
        """Let the forkserver import what the program did, while nobody waits for it."""
        self._starter.learn(names, variables)

    def on_trouble(self) -> None:
        """End a generation in which a replica has failed."""
        self._watchdog.on_trouble()
        self.nodes.note_trouble()

    def on_trouble_elsewhere(self, *, is_hang: bool) -> None:
        """End a generation in which a replica on another node has failed."""
        if is_hang:
            self._watchdog.print_stacks("a replica on another node hangs")
        self._watchdog.on_trouble()

    def on_broken(self, text: str) -> None:
        """End a generation that has lost a node."""
        if self.generation is not None and not self.generation.is_killed:
            self._console.event(f"generation {self.generation.number} ends: {text}")
            self.generation.kill()

    def on_wish(self, kind: str, cause: str) -> None:
        """Save and exit because of another node."""
        if self._stop is Stop.END:
            return
        is_end = kind == END
        if is_end:
            self._stop_code = EXIT_STOPPED
        if self.generation is None and not self._is_judging:
            if is_end:
                self._console.event(f"{cause}: ending")
                self.exit_code = EXIT_STOPPED
        elif is_end or self._stop is Stop.NONE:
            self._console.event(f"{cause}: saving at the next boundary, on all nodes")
            if not is_end:
                self._reserve.prepare(self.size)
            self._ask_to_stop(Stop.END if is_end else Stop.SCALE, cause)

    def _ask_to_stop(self, stop: Stop, cause: str) -> None:
        generation = self.generation
        if generation is not None and stop is Stop.SCALE and not generation.has_begun:
            generation.discard()  # It could save nothing, and loses nothing.
        elif generation is not None:
            if self._stop is Stop.NONE:
                generation.ask_to_stop(cause)
            self._watchdog.expect_end(
                grace=self.options.grace, leeway=_AFTER_GRACE_SECONDS, cause=cause
            )
        self._stop = stop

    # Its end.

    def on_all_ended(self) -> None:
        """Hear how the generation ended on the other nodes."""
        generation, self.generation = self.generation, None
        assert generation is not None
        self._watchdog.end()
        self._starter.note_running([])
        self._is_judging = True
        outcome = outcome_of(
            generation,
            reason=self._watchdog.reason,
            directory=self.options.checkpoint_dir,
        )
        self.nodes.conclude(replace(outcome, has_trained=self.crashes.has_trained))

    def on_verdict(self, outcome: Outcome) -> None:
        """Begin the next generation, or end the job."""
        self._is_judging = False
        round_ = self.nodes.round
        next_ = self.judge.judge(
            outcome,
            number=self._last_number,
            stop=self._stop,
            code=self._stop_code,
            is_first=round_ is None or round_.node == 0,
        )
        if outcome.kind in (CRASHED, LEFT):
            self._stop = Stop.NONE
        self._go_on(next_)

    def on_closed(self) -> None:
        """End: the job has, on the other nodes."""
        self._go_on(self.judge.on_closed())

    def on_no_nodes(self, why: str) -> None:
        """Fail: there is nobody to go on with."""
        self._fail(why)

    def _go_on(self, next_: Next) -> None:
        self.exit_code, self.problem = next_.exit_code, next_.problem
        if next_.exit_code is not None:
            return
        self._may_begin = next_.delay == 0
        if next_.delay:
            self.loop.call_later(next_.delay, self._end_delay)
        if not self._reserve.is_asked:
            self._reserve.prepare(self.size)
        self._begin_if_ready()

    def _end_delay(self) -> None:
        self._may_begin = True
        self._begin_if_ready()

    def _on_no_replicas(self, why: str) -> None:
        is_rescaling = self._last_size not in (0, self.size)
        if self.generation is None and not is_rescaling:
            self._fail(why)
            return
        self._reserve.discard()
        self._is_preparing = False
        size = self._last_size
        why += f" The job goes on with {size} replica{'s' * (size > 1)}"
        self._console.event(why)
        if is_rescaling and self._stop is not Stop.END:
            self.size = size
            self.news.note_not_rescaled(why)
        if self.generation is None and not self._is_judging:
            self._reserve.prepare(self.size)
            self._begin_if_ready()

    def _fail(self, why: str) -> None:
        self._go_on(self.judge.fail(why))
