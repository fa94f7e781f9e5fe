"""Running a script's replicas for a check, with the launcher's forkserver."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from elasticrun.check.moments import Moment, moments_of, read_notes
from elasticrun.check.plan import KILL, Limits, Plan
from elasticrun.check.routes import Leg, Route
from elasticrun.check.scratch import WORK, Source, copy_source, own_arguments
from elasticrun.launcher import processes
from elasticrun.launcher.causes import Ending, first_cause
from elasticrun.launcher.generation import Generation, Member
from elasticrun.launcher.hangs import HangClock
from elasticrun.launcher.imports import imports_of
from elasticrun.launcher.loop import Loop
from elasticrun.launcher.nodes import Round
from elasticrun.launcher.options import Options, Program, Replicas
from elasticrun.launcher.orders import make_orders
from elasticrun.launcher.starter import Parked, Starter
from elasticrun.launcher.watchdog import Watchdog
from elasticrun.launcher.wire import Message

OBSERVER = "elasticrun.check.observing"
_MOST_LINES = 2000


class EngineError(Exception):
    """No replica can be started at all."""


@dataclass
class Run:
    """What became of one route.

    Attributes:
        folder: What the run left: `work`, `records`, `trace`, `logs`.
        seconds: How long it took.
        failure: How the replica ended that failed first, or None.
        hang: Why the run was ended as hung; empty if it was not.
        output: The lines of the last generation, by rank.
        missed: The leg whose place the program never came to, or None.
    """

    route: Route
    folder: Path
    seconds: float = 0.0
    failure: Ending | None = None
    hang: str = ""
    output: dict[int, list[str]] = field(default_factory=dict)
    missed: Leg | None = None
    _notes: list[dict[str, Any]] | None = None
    _moments: list[Moment] | None = None

    @property
    def has_finished(self) -> bool:
        """Whether the program came to its end."""
        return self.failure is None and not self.hang and self.missed is None

    @property
    def num_failed(self) -> int:
        """The number of the generation that was the last to run, from 0."""
        return max((note["leg"] for note in self.notes), default=0)

    @property
    def notes(self) -> list[dict[str, Any]]:
        """What the replicas noted."""
        if self._notes is None:
            self._notes = read_notes(self.folder / "records")
        return self._notes

    @property
    def moments(self) -> list[Moment]:
        """The moments that the replicas noted."""
        if self._moments is None:
            self._moments = moments_of(self.notes)
        return self._moments

    @property
    def trace(self) -> Path:
        """Where the samples are."""
        return self.folder / "trace"

    @property
    def work(self) -> Path:
        """The scratch copy that it ran in."""
        return self.folder / WORK


class Engine:
    """Runs routes, one after another; use it as a context manager.

    Args:
        folder: Where the runs' folders go.
        hang_timeout: Seconds without a boundary after which a generation is ended.
    """

    def __init__(
        self,
        source: Source,
        arguments: Sequence[str],
        *,
        folder: Path,
        limits: Limits,
        is_float64: bool = False,
        hang_timeout: float = 60.0,
    ) -> None:
        self.source = source
        self.limits = limits
        self.is_float64 = is_float64
        self.hang_timeout = hang_timeout
        self._arguments = tuple(arguments)
        self._folder = folder
        self._numbers = itertools.count()
        self._loop = Loop()
        self._problem = ""
        program = Program("script", str(source.script), (), ())
        self._starter = Starter(
            self._loop,
            imports=[OBSERVER, *imports_of(program)],
            is_exec=False,
            say=lambda _: None,
            on_failure=self._on_failure,
        )

    def __enter__(self) -> Engine:
        processes.adopt_orphans()
        self._starter.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._starter.close()
        processes.kill_children(but=set())

    def run(
        self, route: Route, *, is_perturbed: bool = False, watched: Sequence[str] = ()
    ) -> Run:
        """Take a route to its end, or to where it fails."""
        begun = time.monotonic()
        folder = self._folder / f"elasticrun-run-{next(self._numbers)}"
        script = copy_source(self.source, folder / WORK)
        run = Run(route, folder)
        base = Plan(
            directory=str(folder / WORK),
            guarded=self.source.guarded,
            records=str(folder / "records"),
            checkpoints=str(folder / "checkpoints"),
            leg=0,
            limits=self.limits,
            is_perturbed=is_perturbed,
            is_float64=self.is_float64,
        )
        program = Program(
            "script",
            str(script),
            own_arguments(self._arguments, self.source, folder / WORK),
            (str(script.parent),),
        )
        for number, leg in enumerate(route.legs):
            plan = replace(
                base,
                leg=number,
                until=leg.until,
                ending=leg.ending,
                watched=tuple(watched) if number else (),
            )
            self._run_leg(run, leg, plan, program)
            if not run.has_finished:
                break
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
        run.seconds = time.monotonic() - begun
        return run

    def _run_leg(self, run: Run, leg: Leg, plan: Plan, program: Program) -> None:
        listener = _Listener(self._starter, self._loop, self.hang_timeout)
        options = Options(
            program=program,
            replicas=Replicas(leg.size, leg.size, leg.size),
            name="check",
            is_named=False,
            checkpoint_dir=Path(plan.checkpoints),
            log_dir=run.folder / "logs",
        )
        parked = self._park(leg.size)
        round_ = Round(
            number=plan.leg,
            share=leg.size,
            offset=0,
            size=leg.size,
            address="127.0.0.1",
            port=parked[0].ports[0],
        )
        orders = [
            _observed(order, plan, run.trace) for order in make_orders(options, round_)
        ]
        generation = Generation(
            parked,
            number=plan.leg,
            offset=0,
            loop=self._loop,
            log_dir=options.log_dir,
            listener=listener,
        )
        self._starter.note_running([member.pid for member in generation.members])
        try:
            listener.watchdog.begin(generation)
            generation.start(orders)
            while not listener.has_ended:
                self._loop.turn()
        finally:
            generation.kill()
            listener.watchdog.end()
            self._starter.note_running([])
        _judge(run, leg, generation.endings, listener)

    def _park(self, size: int) -> list[Parked]:
        ready: list[list[Parked]] = []
        self._starter.park(size, ready.append)
        while not ready and not self._problem:
            self._loop.turn()
        if self._problem:
            raise EngineError(self._problem)
        return ready[0]

    def _on_failure(self, why: str) -> None:
        self._problem = why


def _observed(order: Message, plan: Plan, trace: Path) -> Message:
    """Return an order with what a check adds to it."""
    # Sums must not depend on how many threads shared the work.
    variables = {"ELASTICRUN_TRACE": str(trace), "PYTHONDONTWRITEBYTECODE": "1"}
    variables["OMP_NUM_THREADS"] = "1"
    return {
        **order,
        "environment": {**order["environment"], **variables},
        "num_threads": 1,
        "observer": OBSERVER,
        "plan": plan.encode(),
    }


def _judge(run: Run, leg: Leg, endings: list[Ending], listener: _Listener) -> None:
    """Note how a generation ended, unless it ended as it should."""
    run.output = listener.output
    if listener.watchdog.reason:
        run.hang = listener.watchdog.reason
        return
    expected = 0
    if leg.until is not None:
        expected = -9 if leg.ending == KILL else 75
    if all(ending.code == expected for ending in endings):
        return
    if leg.until is not None and all(ending.code == 0 for ending in endings):
        run.missed = leg
        return
    run.failure = first_cause(endings) or endings[0]


class _Listener:
    """Hears what happens in one generation."""

    def __init__(self, starter: Starter, loop: Loop, hang_timeout: float) -> None:
        self._starter = starter
        self.has_ended = False
        self.output: dict[int, list[str]] = {}
        self.watchdog = Watchdog(loop, lambda _: None, HangClock(hang_timeout))

    def on_output(self, rank: int, line: bytes, *, is_error: bool) -> None:
        """Keep a line, from wherever it comes."""
        del is_error
        lines = self.output.setdefault(rank, [])
        lines.append(line.decode("utf-8", "replace").rstrip("\n"))
        del lines[:-_MOST_LINES]

    def on_log_failure(self, rank: int, error: OSError) -> None:
        """Do without: the report shows what came, not what was kept."""

    def on_report(self, member: Member) -> None:
        """Where a replica is, the watchdog knows."""

    def on_modules(self, names: list[str]) -> None:
        """Let the forkserver import what the program did."""
        self._starter.learn(names)

    def on_trouble(self) -> None:
        """End a generation in which a replica has failed."""
        self.watchdog.on_trouble()

    def on_all_ended(self) -> None:
        """Let the run go on."""
        self.has_ended = True
