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
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from elasticrun.check.baseline import note_what_differs
from elasticrun.check.blame import CauseFinder, replayed_changes
from elasticrun.check.comparing import Mask, Mismatch, is_tensor, show
from elasticrun.check.problems import Problem
from elasticrun.check.replica.file_watch import FILE_PREFIX
from elasticrun.check.report import ExitCode, Report, Result, Stage, cause_lines
from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.check.runs.engine import Engine
from elasticrun.check.runs.moments import VARIABLE_PREFIX, line_changes_of
from elasticrun.check.runs.routes import RestartPlace, Route, replicas_in_words
from elasticrun.check.runs.sweep import places_to_try, spread
from elasticrun.check.trials import Trials
from elasticrun.lint.engine import lint_paths
from elasticrun.lint.options import LintOptions

_MOST_WATCHED = 200  # Fields at once, in a search for the lines that change them.
_NUM_SWEEPS = 2  # Runs of a sweep, each with half of its restarts.
_NUM_KILLS = 3
MOST_RUNS = 10  # What is not looked at for that is said.


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
        self._trials = Trials(engine, Mask(scope.ignored), say)
        self._report = Report()
        # Numbers of replicas with which the program trains as with the first one.
        self._comparable = {self._size: True}

    def check(self) -> Report:
        """Run the stages; return what they found."""
        begun = time.monotonic()
        report = self._report
        try:
            for name, stage in self._stages():
                before = self._trials.num_runs
                if not self._has_room(report.not_compared, f"the stage {name}"):
                    continue
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
        trials, script = self._trials, self._engine.source.script
        base, again = trials.two_baselines(
            self._size, is_float64=self._scope.is_float64
        )
        if not base.boundaries:
            raise Problem(
                ExitCode.USAGE,
                f"{script.name} has run no loop over an AdaptiveDataLoader, and no "
                "epoch or step of elasticrun, so there is nothing to restart in. Check "
                "a script that trains with elasticrun, with arguments with which it "
                "does.",
            )
        self._say(
            f"one run of the shortened script takes {base.seconds:.1f} s, the check "
            "about ten times that at most"
        )
        note_what_differs(trials.mask, base, again)
        trials.finder = CauseFinder(
            self._engine.source,
            lint_paths([script], LintOptions(pedantic=True)).findings,
            trials.mask,
        )
        self._check_reproducible(trials.differences(base, again), trials.finder)
        self._note_files()
        return f"reproducible; boundaries: {len(base.boundaries)}"

    def _check_reproducible(
        self, differences: Sequence[Mismatch], finder: CauseFinder
    ) -> None:
        if not differences:
            return
        first = differences[0]
        self._report.difference = first
        when = f" at {first.key.describe()}" if first.key else ""
        unseeded = sorted(finder.mask.unseeded)
        causes = []
        if unseeded:
            notes = self._trials.run(self._base().route, watched=unseeded).notes
            causes = finder.at_lines("drawn", line_changes_of(notes), unseeded)
        raise Problem(
            ExitCode.NOT_REPRODUCIBLE,
            f"two runs without any restart differ: {first.name} "
            f"{show(first.expected)} != {show(first.found)}{when}. "
            "What a restart changes cannot be told from that. Seed every random "
            f"generator, or add --ignore '{first.name.removeprefix(FILE_PREFIX)}' "
            "if it does not matter.",
            "\n".join(line for cause in causes for line in cause_lines(cause)),
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
        if self._report.results:
            return "different"
        return "not compared" if self._report.not_compared else "equal"

    def _check_sweep(self) -> str:
        places = places_to_try(self._base().boundaries)
        halves = [tuple(places[first::_NUM_SWEEPS]) for first in range(_NUM_SWEEPS)]
        self._try([self._restarted_at(*half) for half in halves if half])
        text = f"{len(places)} restarts with {replicas_in_words(self._size)}"
        self._report.compared = text
        return text

    def _check_sizes(self) -> str:
        first, second, *others = self._scope.sizes
        problem = self._problem_in_float64()
        if problem is not None:
            self._report.not_compared.append(
                f"other numbers of replicas: {problem.text}"
            )
            return "not compared"
        if not self._can_compare(second):
            return (
                "another number of replicas is another training"
                if self._report.results
                else "not compared"
            )
        sizes = [second, *others, first]
        places = spread(self._base().boundaries, len(sizes) - 1)
        del sizes[len(places) + 1 :]
        self._try([Route(tuple(sizes), tuple(places), is_float64=True)])
        if self._report.not_compared:
            return "not compared"
        return " to ".join(map(str, sizes))

    def _can_compare(self, size: int) -> bool:
        """Return whether another number of replicas trains alike without any restart.

        What the program sets may not depend on it; where the first difference is one
        of weights, as with dropout, the report has it among what was not compared.
        """
        if size in self._comparable:
            return self._comparable[size]
        base = self._trials.baseline(self._size, is_float64=True)
        other = self._trials.baseline(size, is_float64=True)
        differences = self._trials.differences(base, other)
        self._comparable[size] = not differences
        is_trained = any(is_tensor(each.expected) for each in differences)
        if is_trained and not self._scope.is_float64:
            self._report.not_compared.append(
                f"{replicas_in_words(size)} in place of {self._size}: "
                f"{differences[0].name} differs by more than rounding without any "
                "restart (dropout and batch normalisation do that)"
            )
        elif differences:
            sizes = ",".join(map(str, self._scope.sizes))
            words = ["--replicas", sizes, *["--float64"] * self._scope.is_float64]
            command = self._scope.command(words)
            result = Result(other.route, differences, [], command, base.route)
            self._report.results.append(result)
        return not differences

    def _check_kills(self) -> str:
        places = spread(self._base().boundaries, _NUM_KILLS)
        self._try([self._restarted_at(*places)._replace(is_killed=True)])
        return f"{len(places)} kills with {replicas_in_words(self._size)}"

    # Runs.

    def _has_room(self, notes: list[str], otherwise: str) -> bool:
        """Return whether there may be more runs; note what happens if there may not."""
        if self._trials.num_runs < MOST_RUNS:
            return True
        note = f"{otherwise}, since there were {self._trials.num_runs} runs"
        if note not in notes:
            notes.append(note)
        return False

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

    def _restarted_at(self, *places: RestartPlace) -> Route:
        sizes = (self._size,) * (len(places) + 1)
        return Route(sizes, places, is_float64=self._scope.is_float64)

    def _try(self, routes: Sequence[Route]) -> None:
        """Run the script along each route once, and report what that changes."""
        for route in routes:
            self._trials.baseline_of(route)
        try:
            with contextlib.closing(self._trials.run_each(routes)) as runs:
                for run in runs:
                    differences = self._differences(run)
                    if differences:
                        self._add(run, differences)
                    elif run.missed:
                        raise self._trials.problem_of(run)
        except Problem as problem:
            for route in self._shorter(problem.route):
                self._trials.run(route)  # It may have the problem, too.
            raise

    def _differences(self, run: CheckedRun) -> list[Mismatch]:
        """Return what differs that numbers of replicas do not explain by themselves."""
        base = self._trials.baseline_of(run.route)
        differences = self._trials.differences(base, run)
        if differences and run.route.is_resized:
            comparable = [
                self._can_compare(size) for size in sorted({*run.route.sizes})
            ]
            return differences if all(comparable) else []
        return differences

    def _add(self, run: CheckedRun, differences: list[Mismatch]) -> None:
        finder = self._trials.finder
        assert finder is not None
        run, differences = self._look_closer(run, differences, finder)
        causes = finder.causes(run, differences, line_changes_of(run.notes))
        for known in self._report.results:
            if causes and known.causes and known.causes[0].place == causes[0].place:
                known.also.append(run.route)
                return
        command = self._scope.command(run.route.options())
        self._report.results.append(Result(run.route, differences, causes, command))

    def _look_closer(
        self, run: CheckedRun, differences: list[Mismatch], finder: CauseFinder
    ) -> tuple[CheckedRun, list[Mismatch]]:
        """Run the script again, and see which lines of its replays change what.

        With the one restart after which it differs, if that is enough to show it; else
        with those before as well, or with all that the user has asked for.
        """
        watched = self._names_to_watch(run, finder)
        whole = run.route
        if not self._scope.places:
            whole = whole.until_leg(run.leg_of(differences[-1].key))
        for route in [*self._shorter(whole), whole]:
            if not self._has_room(self._report.notes, "not every cause was looked for"):
                break
            closer = self._trials.run(route, watched=watched)
            found = self._trials.differences(self._trials.baseline_of(route), closer)
            if found:
                return closer, found
        return run, differences

    def _shorter(self, route: Route | None) -> list[Route]:
        """Return the route with the last restart alone, unless the user has chosen."""
        if route is None or len(route.places) < 2 or route.is_resized:
            return []
        alone = self._restarted_at(route.places[-1])._replace(is_killed=route.is_killed)
        return [] if self._scope.places else [alone]

    def _names_to_watch(self, run: CheckedRun, finder: CauseFinder) -> list[str]:
        changed = [change.name for change in replayed_changes(run, self._trials.mask)]
        if changed:
            return changed[:_MOST_WATCHED]
        lost = [VARIABLE_PREFIX + cause.name for cause in finder.lost(run)]
        return lost[:_MOST_WATCHED]
