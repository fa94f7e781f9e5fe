"""Running a script's replicas for a check, with the launcher's forkserver."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Generator, Sequence
from pathlib import Path

from elasticrun.check.runs.active_run import OBSERVER, TEMPORARY, ActiveRun
from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.check.runs.plan import Limits, Plan
from elasticrun.check.runs.routes import Route
from elasticrun.check.runs.source import WORK, ProgramSource, copy_source, own_arguments
from elasticrun.launcher import environment, processes
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.starter import Starter
from elasticrun.launcher.options import Program


class EngineError(Exception):
    """No replica can be started at all."""


class Engine:
    """Runs the script along routes; use it as a context manager.

    Args:
        folder: Where the runs' folders go, and their temporary files.
        hang_timeout: Seconds without a boundary after which a generation is ended.
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
        self._starter = Starter(
            self._loop,
            # The latter is what the first optimizer of a process imports, for a second.
            imports=[OBSERVER, "torch._dynamo"],
            is_exec=False,
            say=lambda _: None,
            on_failure=_give_up,
        )

    def __enter__(self) -> Engine:
        processes.adopt_orphans()
        self._starter.start()
        return self

    def __exit__(self, *_: object) -> None:
        for active in self._active_runs:
            active.abandon()
        self._starter.close()
        processes.kill_children(but=set(), patience=processes.CLEANING_SECONDS)

    def run_each(
        self,
        routes: Sequence[Route],
        *,
        watched: Sequence[str] = (),
    ) -> Generator[CheckedRun, None, None]:
        """Run the script along each route, and yield the runs in their order.

        Several at once if there are cores for it.

        Raises:
            EngineError: No replica can be started.
        """
        waiting = list(routes)
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

    def _begin(self, route: Route, watched: Sequence[str]) -> ActiveRun:
        folder = self._folder / f"elasticrun-run-{next(self._numbers)}"
        script = copy_source(self.source, folder / WORK)
        plan = Plan(
            directory=str(folder / WORK),
            guarded=self.source.guarded,
            writable=(str(self._folder), *self.source.writable),
            records=str(folder / "records"),
            checkpoints=str(folder / "checkpoints"),
            leg=0,
            limits=self._limits,
            home=str(self.source.directory),
            is_float64=route.is_float64,
            watched=tuple(watched),
        )
        arguments = own_arguments(self._arguments, self.source, folder / WORK)
        active = ActiveRun(
            CheckedRun(route, folder),
            plan=plan,
            program=Program("script", str(script), arguments, (str(script.parent),)),
            loop=self._loop,
            starter=self._starter,
            on_change=self._note_running,
            hang_timeout=self._hang_timeout,
        )
        self._active_runs.append(active)
        active.begin_leg()
        return active

    def _end(self, active: ActiveRun) -> CheckedRun:
        self._active_runs.remove(active)
        shutil.rmtree(active.run.folder / "checkpoints", ignore_errors=True)
        return active.run

    def _note_running(self) -> None:
        """Tell the forkserver whom to kill if this process is killed."""
        groups = [group for active in self._active_runs for group in active.groups]
        self._starter.note_running(groups)


def _give_up(why: str) -> None:
    raise EngineError(why)


def _fits(route: Route, under_way: Sequence[ActiveRun]) -> bool:
    """Return whether there are cores for one more run."""
    running = [active.run.route for active in under_way if not active.is_over]
    sizes = [max(each.sizes) for each in running]
    return not sizes or sum(sizes) + max(route.sizes) <= environment.num_cores()
