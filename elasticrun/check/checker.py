"""The stages of a check, run in order until one finds a difference.

Words: a *route* is which generations a checked run consists of; a *leg* one of them,
and where and how it ends; the *baseline* the run
without a restart that others are compared with. A *moment* is a point that a program
passes with and without restarts, with the values of everything there; a *mismatch* one
field that two runs have differently, its *cause* the line that explains it. The *sweep*
is the stage that restarts at every kind of boundary.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from elasticrun.check.baseline import drawing_zones, note_what_differs
from elasticrun.check.blame import CauseFinder, replayed_changes
from elasticrun.check.comparing import Mask, Mismatch, show
from elasticrun.check.problems import Problem
from elasticrun.check.replica.file_watch import FILE_PREFIX
from elasticrun.check.report import ExitCode, Report, Result, Stage
from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.check.runs.engine import Engine
from elasticrun.check.runs.moments import LineChange, epochs_of, line_changes_of
from elasticrun.check.runs.routes import RestartPlace, Route, replicas_in_words
from elasticrun.check.runs.sweep import middle_of, places_to_try
from elasticrun.check.trials import Trials
from elasticrun.lint.engine import lint_paths
from elasticrun.lint.options import LintOptions

_MOST_WATCHED = 200  # Fields at once, in a search for the lines that change them.
_MOST_HITS = 4  # Differing runs of one stage: more of them seldom say more.


@dataclass(frozen=True)
class Scope:
    """What is to be checked, and how.

    Attributes:
        places: Where to restart; empty for all stages.
        sizes: Numbers of replicas; with places, those of one generation after another.
        is_killed: Whether replicas are killed as well as stopped.
        is_float64: Whether every run computes in double precision, and nothing may
            depend on the number of replicas.
        ignored: Patterns of fields and files that may differ.
        command: The command that reproduces something, for the options of a route.
    """

    places: tuple[RestartPlace, ...]
    sizes: tuple[int, ...]
    is_killed: bool
    is_float64: bool
    ignored: tuple[str, ...]
    command: Callable[[Sequence[str]], list[str]]


class Checker:
    """One check of one script.

    Args:
        say: Called with a line whenever there is something to tell meanwhile.
    """

    def __init__(
        self, engine: Engine, scope: Scope, say: Callable[[str], None]
    ) -> None:
        self._engine = engine
        self._scope = scope
        self._say = say
        self._size = scope.sizes[0]
        self._trials = Trials(engine, Mask(scope.ignored))
        self._report = Report()
        self._done: set[Route] = set()
        self._num_hits = 0
        self._differing_sizes: set[int] = set()

    def check(self) -> Report:
        """Run the stages; return what they found."""
        begun = time.monotonic()
        report = self._report
        try:
            for name, stage in self._stages():
                before = self._trials.num_runs
                text = stage()
                num_runs = self._trials.num_runs - before
                report.stages.append(Stage(name, num_runs, text))
                self._say(f"{name}: {text}")
                if report.results:
                    report.exit_code = ExitCode.DIFFERENT
                    break
        except Problem as problem:
            report.exit_code = problem.exit_code
            report.problem, report.detail = problem.text, problem.detail
            report.waits = problem.waits
            if problem.route is not None:
                report.command = self._scope.command(problem.route.options())
        report.num_runs = self._trials.num_runs
        report.seconds = time.monotonic() - begun
        return report

    def _stages(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "baseline", self._check_baseline
        if self._scope.places:
            yield "restart", self._check_scope
            return
        yield "sweep", self._check_sweep
        if len(self._scope.sizes) > 1:
            yield "replicas", self._check_sizes
        if self._scope.is_killed:
            yield "kill", self._check_kills

    # Stages: each returns what it has done, in a line.

    def _check_baseline(self) -> str:
        trials = self._trials
        base = self._base()
        again = trials.run(base.route)
        note_what_differs(trials.mask, base, again)
        self._check_reproducible(trials.differences(base, again))
        self._note_files()
        script = self._engine.source.script
        trials.finder = CauseFinder(
            self._engine.source,
            lint_paths([script], LintOptions(pedantic=True)).findings,
            mask=trials.mask,
            drawing=drawing_zones(base),
        )
        num_batches = sum(loop.batch for loop in trials.loops)
        return (
            f"reproducible; epochs: {len(epochs_of(base.moments))}, "
            f"loops: {len(trials.loops)}, batches: {num_batches}"
        )

    def _check_reproducible(self, differences: Sequence[Mismatch]) -> None:
        if not differences:
            return
        first = differences[0]
        self._report.difference = first
        when = f" at {first.key.describe()}" if first.key else ""
        raise Problem(
            ExitCode.NOT_REPRODUCIBLE,
            f"two runs without any restart differ: {first.name} "
            f"{show(first.expected)} != {show(first.found)}{when}. "
            "What a restart changes cannot be told from that. Seed every random "
            f"generator, or add --ignore '{first.name.removeprefix(FILE_PREFIX)}' "
            "if it does not matter.",
        )

    def _note_files(self) -> None:
        mask = self._trials.mask
        noted = sorted(mask.volatile_files | mask.unnamed_files)
        if noted:
            self._report.notes.append(
                f"{', '.join(noted[:5])}: not the same in two runs without a restart, "
                "so only the number of lines is compared"
            )

    def _check_scope(self) -> str:
        places, sizes = self._scope.places, self._scope.sizes
        if len(sizes) == 1:
            sizes = sizes * (len(places) + 1)
        route = Route(sizes, places, self._scope.is_killed, self._scope.is_float64)
        if route.is_resized:
            route = route._replace(is_float64=True)
            problem = self._problem_in_float64()
            if problem is not None:
                raise problem
        self._try([route])
        return "different" if self._report.results else "equal"

    def _check_sweep(self) -> str:
        trials = self._trials
        before = trials.num_runs
        epochs = epochs_of(self._base().moments)
        places = places_to_try(trials.loops, epochs)
        routes = [self._restarted_at(place) for place in places]
        first, second = middle_of(trials.loops, 0.3), middle_of(trials.loops, 0.8)
        if first < second:
            routes.append(self._restarted_at(first, second))
        self._try(routes)
        count = trials.num_runs - before
        return f"{count} more restarts with {replicas_in_words(self._size)}"

    def _check_sizes(self) -> str:
        sizes = self._scope.sizes
        problem = self._problem_in_float64()
        if problem is not None:
            self._report.notes.append(problem.text)
            return "not compared"
        for size in sizes[1:]:
            self._compare_sizes(size)
        if self._report.results:
            return "another number of replicas is another training"
        loops = self._trials.loops
        first, second = middle_of(loops, 0.3), middle_of(loops, 0.8)
        taken: list[str] = []
        routes: list[Route] = []
        for one, other in itertools.pairwise(sizes):
            if {one, other} & self._differing_sizes:
                continue  # They do not even train for as long.
            if first < second:
                routes.append(self._in_float64((one, other, one), first, second))
                taken.append(f"{one} to {other} to {one}")
            routes.append(self._in_float64((one, other), second))
            routes.append(self._in_float64((other, other), second))
            taken += [f"{one} to {other}", f"{other} to {other}"]
        self._try(routes)
        return ", ".join(taken)

    def _compare_sizes(self, size: int) -> None:
        """Note what depends on the number of replicas without any restart."""
        trials = self._trials
        base = trials.baseline(self._size, is_float64=True)
        other = trials.baseline(size, is_float64=True)
        while differences := trials.differences(base, other):
            if self._scope.is_float64 or trials.is_exact(base, differences):
                sizes = ",".join(map(str, self._scope.sizes))
                words = ["--replicas", sizes, *["--float64"] * self._scope.is_float64]
                command = self._scope.command(words)
                self._report.results.append(
                    Result(other.route, differences, [], command, base.route)
                )
                return
            if not trials.mask.sized:
                self._report.notes.append(
                    f"with {replicas_in_words(size)} instead of {self._size}, "
                    f"{differences[0].name} differs by more than rounding without any "
                    "restart (dropout and batch normalisation do that); what depends "
                    "on it is not compared between numbers of replicas"
                )
            if not trials.mask.hide_sized(each.name for each in differences):
                self._differing_sizes.add(size)
                return

    def _check_kills(self) -> str:
        before = self._trials.num_runs
        loops = self._trials.loops
        places = [middle_of(loops, part) for part in (0.0, 0.5, 0.9)]
        routes = [self._restarted_at(place) for place in places]
        self._try([route._replace(is_killed=True) for route in routes])
        count = self._trials.num_runs - before
        return f"{count} kills with {replicas_in_words(self._size)}"

    # Runs.

    def _base(self) -> CheckedRun:
        """Return the run without a restart, and with no other number of replicas."""
        return self._trials.baseline(self._size, is_float64=self._scope.is_float64)

    def _problem_in_float64(self) -> Problem | None:
        """Return why the program cannot be run in double precision, if it cannot."""
        try:
            self._trials.baseline(self._size, is_float64=True)
        except Problem as problem:
            problem.text += (
                ". Numbers of replicas are compared in double precision only, in which "
                "rounding is no difference, so these cannot be compared"
            )
            return problem
        return None

    def _in_float64(self, sizes: tuple[int, ...], *places: RestartPlace) -> Route:
        return Route(sizes, places, is_float64=True)

    def _restarted_at(self, *places: RestartPlace) -> Route:
        sizes = (self._size,) * (len(places) + 1)
        return Route(sizes, places, is_float64=self._scope.is_float64)

    def _try(self, routes: Sequence[Route]) -> None:
        """Run the script along each route once, and report what that changes."""
        new = [route for route in dict.fromkeys(routes) if route not in self._done]
        for route in new:
            self._trials.baseline_of(route)
        with contextlib.closing(self._trials.run_each(new)) as runs:
            for run in runs:
                self._done.add(run.route)
                base = self._trials.baseline_of(run.route)
                differences = self._trials.differences(base, run)
                if differences:
                    self._add(run, differences)
                if self._num_hits >= _MOST_HITS:
                    break

    def _add(self, run: CheckedRun, differences: list[Mismatch]) -> None:
        self._num_hits += 1
        finder = self._trials.finder
        assert finder is not None
        lines = self._lines_of(run, finder)
        drifted = self._trials.baseline(
            max(run.route.sizes), is_float64=run.route.is_float64
        ).drifted
        causes = finder.causes(run, differences, lines, drifted)
        for known in self._report.results:
            if causes and known.causes and known.causes[0].place == causes[0].place:
                known.also.append(run.route)
                return
        command = self._scope.command(run.route.options())
        self._report.results.append(Result(run.route, differences, causes, command))

    def _lines_of(self, run: CheckedRun, finder: CauseFinder) -> list[LineChange]:
        """Run the script again, and find which lines of its replays change what."""
        changed = [change.name for change in replayed_changes(run, self._trials.mask)]
        names = changed[:_MOST_WATCHED]
        if not names and finder.drawing:
            names = sorted(run.moments[-1].random)
        if not names:
            return []
        return line_changes_of(self._trials.run(run.route, watched=names).notes)
