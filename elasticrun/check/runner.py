"""Running a script's replicas for a check, with the launcher's forkserver."""

from __future__ import annotations

import itertools
import shutil
import signal
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from elasticrun.check.checked_run import CheckedRun
from elasticrun.check.scenarios import Limits, Plan, Scenario
from elasticrun.check.source import WORK, ProgramSource, copy_source, own_arguments
from elasticrun.errors import STOPPED
from elasticrun.launcher import environment, processes
from elasticrun.launcher.endings import Ending, first_cause
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.starter import ForkserverClient
from elasticrun.launcher.forks.waiting import ForkedReplica, discard_all
from elasticrun.launcher.nodes.nodes import LOOPBACK, RoundPlan
from elasticrun.launcher.options import Options, Program, Replicas
from elasticrun.launcher.supervisor.generation import Generation, Member
from elasticrun.launcher.supervisor.orders import make_orders
from elasticrun.launcher.supervisor.watchdog import HangClock, Watchdog
from elasticrun.replicas.wire import Message

OBSERVER = "elasticrun.check.replica.observing"
TEMPORARY = "tmp"
_MOST_LINES = 2000
_TIMES_BEFORE_TRAINING = 5


class RunnerError(Exception):
    """No replica can be started at all."""


class ActiveRun:
    """Runs the script in one scenario, as the subscriber of its generations.

    Args:
        plan: Of all generations, but for what differs between them.
        on_change: Called when other replicas run than before.
        hang_timeout: Seconds without a boundary after which a generation is ended.

    Attributes:
        groups: The process groups of its replicas that run.
        is_over: Whether it has come to its end, or to a failure.
    """

    def __init__(
        self,
        run: CheckedRun,
        *,
        plan: Plan,
        program: Program,
        loop: EventLoop,
        starter: ForkserverClient,
        on_change: Callable[[], None],
        hang_timeout: float,
    ) -> None:
        self.run = run
        self.groups: list[int] = []
        self.is_over = False
        self._plan = plan
        self._program = program
        self._loop = loop
        self._starter = starter
        self._on_change = on_change
        self._hang_timeout = hang_timeout
        self._number = 0
        self._began_at = 0.0
        self._generation: Generation | None = None
        self._clock = HangClock(None)
        self._watchdog = Watchdog(loop, lambda _: None, self._clock, grace=0.0)

    @property
    def _size(self) -> int:
        return self.run.scenario.sizes[self._number]

    def begin_generation(self) -> None:
        self._starter.fork(self._size, self._start)

    def abandon(self) -> None:
        """Kill what runs, and let nothing follow."""
        self.is_over = True
        if self._generation is not None:
            self._generation.kill()

    def _start(self, replicas: list[ForkedReplica]) -> None:
        if self.is_over:
            discard_all(replicas)
            return
        scenario, number, size = self.run.scenario, self._number, self._size
        self._began_at = self._began_at or time.monotonic()
        self.run.last_generation = number
        options = self._options(size)
        plan = replace(
            self._plan,
            generation=number,
            until=scenario.end_of(number),
            is_killed=scenario.is_killed,
        )
        round_ = RoundPlan(number, size, 0, size, LOOPBACK, replicas[0].ports[0])
        orders = make_orders(options, round_)
        self.run.output = {}
        generation = self._generation = Generation(
            replicas,
            number=number,
            offset=0,
            loop=self._loop,
            log_dir=options.log_dir,
            audience=self,
            subscriber=self,
        )
        self.groups = [member.pid for member in generation.members]
        self._on_change()
        # Until it trains, a program may import and prepare for long.
        self._clock.setting = _TIMES_BEFORE_TRAINING * self._hang_timeout
        self._watchdog.begin(generation)
        generation.start([_observed(order, plan, self.run.trace) for order in orders])

    def _options(self, size: int) -> Options:
        folder = Path(self._plan.checkpoints)
        return Options(
            program=self._program,
            replicas=Replicas(size, size, size),
            name="check",
            is_named=False,
            checkpoint_dir=folder,
            local_dir=folder,
            log_dir=self.run.folder / "logs",
        )

    # As a subscriber.

    def on_output(self, rank: int, line: bytes, *, is_error: bool) -> None:
        del is_error
        lines = self.run.output.setdefault(rank, [])
        lines.append(line.decode("utf-8", "replace").rstrip("\n"))
        del lines[:-_MOST_LINES]

    def on_report(self, member: Member) -> None:
        """Lose patience sooner, now that the program trains."""
        if member.report["has_trained"]:
            self._clock.setting = self._hang_timeout

    def on_log_failure(self, rank: int, error: OSError) -> None:
        """Go on without the log: the last lines are kept here, too."""

    def on_trouble(self) -> None:
        self._watchdog.on_trouble()

    def on_all_ended(self) -> None:
        """Go on with the next generation if this one ended as it should."""
        generation, self._generation = self._generation, None
        assert generation is not None
        reason = self._watchdog.reason
        self._watchdog.end()
        self.groups = []
        self._on_change()
        if self.is_over:
            return
        self.run.stacks = {each.rank: each.stack for each in generation.members}
        self.run.seconds = time.monotonic() - self._began_at
        _judge(self.run, self._number, generation.endings, reason)
        self._number += 1
        if self.run.has_finished and self._number < len(self.run.scenario.sizes):
            self.begin_generation()
        else:
            self.is_over = True


def _observed(order: Message, plan: Plan, trace: Path) -> Message:
    """Return an order with what a check adds to it."""
    variables = {
        "OMP_NUM_THREADS": "1",  # On which sums depend.
        "ELASTICRUN_TRACE": str(trace),
        "ELASTICRUN_RESCUE": "off",  # It compares what checkpoints bring back.
        "PYTHONDONTWRITEBYTECODE": "1",
        # Beside the runs' folders: paths of sockets in it must be short.
        "TMPDIR": str(trace.parents[1] / TEMPORARY),
    }
    return {
        **order,
        "environment": {**order["environment"], **variables},
        "num_threads": 1,
        "observer": OBSERVER,
        "plan": asdict(plan),
    }


def _judge(run: CheckedRun, number: int, endings: list[Ending], reason: str) -> None:
    """Note how a generation ended, unless it ended as it should."""
    if reason:
        run.hang = reason
        return
    codes = [ending.code for ending in endings]
    until = run.scenario.end_of(number)
    if until is None:
        is_expected = not any(codes)
    elif run.scenario.is_killed:  # The first one to die may take others along.
        is_expected = -signal.SIGKILL in codes
    else:
        is_expected = set(codes) == {STOPPED}
    if is_expected:
        return
    if until is not None and not any(codes):
        run.missed = until
        return
    run.failure = first_cause(endings) or endings[0]


class ScriptRunner:
    """Runs the script in scenarios; use it as a context manager.

    Args:
        folder: Where the runs' folders go, and their temporary files.
    """

    def __init__(
        self,
        source: ProgramSource,
        arguments: Sequence[str],
        *,
        folder: Path,
        limits: Limits,
        hang_timeout: float = 60.0,
    ) -> None:
        self.source = source
        self._limits = limits
        self._hang_timeout = hang_timeout
        self._arguments = tuple(arguments)
        self._folder = folder
        self._numbers = itertools.count()
        self._loop = EventLoop()
        self._active_runs: list[ActiveRun] = []
        (folder / TEMPORARY).mkdir()
        self._starter = ForkserverClient(
            self._loop,
            # The latter is what the first optimizer of a process imports, for a second.
            imports=[OBSERVER, "torch._dynamo"],
            is_exec=False,
            say=lambda _: None,
            on_failure=_give_up,
        )

    def __enter__(self) -> ScriptRunner:
        processes.adopt_orphans()
        self._starter.start()
        return self

    def __exit__(self, *_: object) -> None:
        for active in self._active_runs:
            active.abandon()
        self._starter.close()
        processes.kill_children(but=set(), patience=processes.CLEANING_SECONDS)

    def run_each(
        self, scenarios: Sequence[Scenario], *, watched: Sequence[str] = ()
    ) -> Generator[CheckedRun, None, None]:
        """Run the script in each scenario, and yield the runs in their order.

        Several at once if there are cores for it.
        """
        waiting = list(scenarios)
        under_way: list[ActiveRun] = []
        try:
            while waiting or under_way:
                while waiting and _fits(waiting[0], under_way):
                    under_way.append(self._begin(waiting.pop(0), watched))
                if under_way[0].is_over:
                    yield self._end(under_way.pop(0))
                else:
                    self._loop.run_once()
        finally:  # Whoever asked may have seen enough.
            for active in under_way:
                active.abandon()

    def _begin(self, scenario: Scenario, watched: Sequence[str]) -> ActiveRun:
        folder = self._folder / f"elasticrun-run-{next(self._numbers)}"
        script = copy_source(self.source, folder / WORK)
        plan = Plan(
            directory=str(folder / WORK),
            guarded=self.source.guarded,
            writable=(str(self._folder), *self.source.writable),
            records=str(folder / "records"),
            checkpoints=str(folder / "checkpoints"),
            generation=0,
            limits=self._limits,
            home=str(self.source.directory),
            is_float64=scenario.is_float64,
            watched=tuple(watched),
        )
        arguments = own_arguments(self._arguments, self.source, folder / WORK)
        active = ActiveRun(
            CheckedRun(scenario, folder),
            plan=plan,
            program=Program("script", str(script), arguments, (str(script.parent),)),
            loop=self._loop,
            starter=self._starter,
            on_change=self._note_running,
            hang_timeout=self._hang_timeout,
        )
        self._active_runs.append(active)
        active.begin_generation()
        return active

    def _end(self, active: ActiveRun) -> CheckedRun:
        self._active_runs.remove(active)
        shutil.rmtree(active.run.folder / "checkpoints", ignore_errors=True)
        return active.run

    def _note_running(self) -> None:
        """Tell the forkserver whom to kill if this process is killed."""
        groups = [group for active in self._active_runs for group in active.groups]
        self._starter.tell_groups(groups)


def _give_up(why: str) -> None:
    raise RunnerError(why)


def _fits(scenario: Scenario, under_way: Sequence[ActiveRun]) -> bool:
    """Return whether there are cores for one more run."""
    running = [active.run.scenario for active in under_way if not active.is_over]
    sizes = [max(each.sizes) for each in running]
    return not sizes or sum(sizes) + max(scenario.sizes) <= environment.num_cores()
