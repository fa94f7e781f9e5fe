"""Runs the script along routes, and compares the runs with their baselines."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Sequence

from elasticrun.check.baseline import samples_of
from elasticrun.check.blame import CauseFinder
from elasticrun.check.comparing import (
    Mask,
    Mismatch,
    compare_moments,
    compare_samples,
)
from elasticrun.check.problems import Problem, problem_of
from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.check.runs.engine import Engine
from elasticrun.check.runs.routes import Route, route_without_restart


class Trials:
    """The runs of one check.

    Attributes:
        mask: What is not compared.
        num_runs: How many runs there were.
        finder: Who explains differences; None before the baseline is known.
    """

    def __init__(self, engine: Engine, mask: Mask, say: Callable[[str], None]) -> None:
        self.engine = engine
        self.mask = mask
        self._say = say
        self.num_runs = 0
        self.finder: CauseFinder | None = None
        self._baselines: dict[Route, CheckedRun] = {}

    def run(self, route: Route, *, watched: Sequence[str] = ()) -> CheckedRun:
        """Run the script along a route.

        Raises:
            Problem: It has none: the script fails, hangs, or misses a place.
        """
        (run,) = self.run_each([route], watched=watched)
        return run

    def run_each(
        self,
        routes: Sequence[Route],
        *,
        watched: Sequence[str] = (),
    ) -> Generator[CheckedRun, None, None]:
        """Run the script along routes, several at once where there are cores.

        Raises:
            Problem: One has none.
        """
        with contextlib.closing(self.engine.run_each(routes, watched=watched)) as runs:
            for run in runs:
                self.num_runs += 1
                how = run.route.describe()
                self._say(f"run {self.num_runs}: {how} ({run.seconds:.1f} s)")
                # A place that is missed only after a restart is a difference.
                if not (run.has_finished or (run.missed and run.last_leg)):
                    raise self.problem_of(run)
                yield run

    def problem_of(self, run: CheckedRun) -> Problem:
        """Return why a run has not finished."""
        first = next(iter(self._baselines.values()), run)
        return problem_of(
            run, first.boundaries, source=self.engine.source, finder=self.finder
        )

    def baseline(self, size: int, *, is_float64: bool) -> CheckedRun:
        """Return the run without a restart with so many replicas.

        Raises:
            Problem: It has no end.
        """
        route = route_without_restart(size, is_float64=is_float64)
        if route not in self._baselines:
            self._baselines[route] = self.run(route)
        return self._baselines[route]

    def two_baselines(self, size: int, *, is_float64: bool) -> list[CheckedRun]:
        """Return two runs without a restart, to see what differs by itself.

        Raises:
            Problem: One has no end.
        """
        route = route_without_restart(size, is_float64=is_float64)
        runs = list(self.run_each([route, route]))
        self._baselines[route] = runs[0]
        return runs

    def baseline_of(self, route: Route) -> CheckedRun:
        """Return the run without a restart that one of a route is compared with.

        Raises:
            Problem: It has no end.
        """
        return self.baseline(route.sizes[0], is_float64=route.is_float64)

    def differences(self, base: CheckedRun, run: CheckedRun) -> list[Mismatch]:
        """Return what differs first: samples, and what does at one moment."""
        moments = compare_moments(base, run, mask=self.mask)
        return [*compare_samples(samples_of(base), samples_of(run)), *moments]
