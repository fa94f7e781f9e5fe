"""The stages of a check, run in order until one finds a difference.

Words: a *scenario* is which generations a checked run consists of, and where and how
each ends; the *baseline* the run without a restart that others are compared with. A
*snapshot* has the values of everything at a point that a program passes with and
without restarts; a *mismatch* is one field that two runs have differently, its *cause*
the line that explains it. The *sweep* restarts at every kind of boundary.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elasticrun.check.blame import CauseFinder, replayed_changes
from elasticrun.check.checked_run import CheckedRun
from elasticrun.check.comparing import (
    IgnoredDifferences,
    Mismatch,
    compare_samples,
    compare_snapshots,
    is_tensor,
    shape_of_name,
    show,
)
from elasticrun.check.replica.fields import VARIABLE_PREFIX
from elasticrun.check.replica.file_watch import FILE_PREFIX
from elasticrun.check.report import (
    ExitCode,
    Problem,
    Report,
    Result,
    cause_lines,
    problem_of,
)
from elasticrun.check.runner import ScriptRunner
from elasticrun.check.scenarios import (
    RestartPlace,
    Scenario,
    places_to_try,
    replicas_in_words,
    spread,
)
from elasticrun.job.trace import read_trace, samples_of_loop
from elasticrun.lint.engine import lint_paths
from elasticrun.lint.options import LintOptions

_MOST_WATCHED = 200  # Fields at once, in a search for the lines that change them.
_NUM_SWEEPS = 2  # Runs of a sweep, each with half of its restarts.
_NUM_KILLS = 3


@dataclass(frozen=True)
class Scope:
    """What is to be checked, and how.

    Attributes:
        places: Where to restart; empty for all stages.
        sizes: Numbers of replicas; with places, those of one generation after another.
        is_killed: Whether replicas are killed as well as stopped.
        ignored: Patterns of fields and files that may differ.
        command: The command that reproduces something, for the options of a scenario.
    """

    places: tuple[RestartPlace, ...]
    sizes: tuple[int, ...]
    is_killed: bool
    ignored: tuple[str, ...]
    command: Callable[[Sequence[str]], list[str]]


def samples_of(run: CheckedRun) -> dict[tuple[int, str, int], list[int]]:
    """Return the samples of each global batch by (epoch, loop, batch).

    A loop is told by its number; one in the body of another also by the batches around
    it, each with how many loops had begun there before.
    """
    loops: dict[tuple[int, int, tuple[int, ...]], list[dict[str, Any]]] = {}
    for line in read_trace(run.trace):
        place = (line["epoch"], line["loop"], tuple(line.pop("inside", ())))
        loops.setdefault(place, []).append(line)
    return {
        (epoch, ".".join(map(str, (loop, *inside))), batch): samples
        for (epoch, loop, inside), lines in sorted(loops.items())
        for batch, samples in samples_of_loop(lines, epoch=epoch, loop=loop).items()
    }


def note_what_differs(
    ignored: IgnoredDifferences, base: CheckedRun, again: CheckedRun
) -> None:
    """Note what differs between two runs without a restart."""
    for key, snapshot in base.compared.items():
        other = again.compared.get(key, snapshot)
        ignored.unseeded |= _differing(snapshot.random, other.random)
        ignored.noise |= _differing(snapshot.variables, other.variables)
        paths = snapshot.files.keys() & other.files.keys()
        differing = _differing(snapshot.files, other.files)
        ignored.volatile_files |= {p for p in differing & paths if not ignored.hides(p)}
        only = snapshot.files.keys() ^ other.files.keys()
        num_alike = collections.Counter(map(shape_of_name, only))
        for path in sorted(only):
            if num_alike[shape_of_name(path)] > 1:
                ignored.unnamed_files[shape_of_name(path)] = path


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> set[str]:
    return {name for name, value in one.items() if other.get(name) != value}


class CheckRuns:
    """The runs of one check.

    Attributes:
        finder: Who explains differences; None before the baseline is known.
    """

    def __init__(
        self,
        runner: ScriptRunner,
        ignored: IgnoredDifferences,
        say: Callable[[str], None],
    ) -> None:
        self.runner = runner
        self.ignored = ignored
        self._say = say
        self.num_runs = 0
        self.finder: CauseFinder | None = None
        self._baselines: dict[Scenario, CheckedRun] = {}

    def run(self, scenario: Scenario, *, watched: Sequence[str] = ()) -> CheckedRun:
        """Run the script in a scenario."""
        (run,) = self.run_each([scenario], watched=watched)
        return run

    def run_each(
        self,
        scenarios: Sequence[Scenario],
        *,
        watched: Sequence[str] = (),
    ) -> Generator[CheckedRun, None, None]:
        """Run the script in scenarios, several at once where there are cores."""
        with contextlib.closing(
            self.runner.run_each(scenarios, watched=watched)
        ) as runs:
            for run in runs:
                self.num_runs += 1
                how = run.scenario.describe()
                self._say(f"run {self.num_runs}: {how} ({run.seconds:.1f} s)")
                # A place that is missed only after a restart is a difference.
                if not (run.has_finished or (run.missed and run.last_generation)):
                    raise self.problem_of(run)
                yield run

    def problem_of(self, run: CheckedRun) -> Problem:
        first = next(iter(self._baselines.values()), run)
        return problem_of(
            run, first.boundaries, source=self.runner.source, finder=self.finder
        )

    def baseline(self, size: int, *, is_float64: bool = False) -> CheckedRun:
        """Return the run without a restart with so many replicas."""
        scenario = Scenario((size,), is_float64=is_float64)
        if scenario not in self._baselines:
            self._baselines[scenario] = self.run(scenario)
        return self._baselines[scenario]

    def two_baselines(self, size: int) -> list[CheckedRun]:
        """Return two runs without a restart, to see what differs by itself."""
        scenario = Scenario((size,))
        runs = list(self.run_each([scenario, scenario]))
        self._baselines[scenario] = runs[0]
        return runs

    def baseline_of(self, scenario: Scenario) -> CheckedRun:
        """Return the run without a restart that one of a scenario is compared with."""
        return self.baseline(scenario.sizes[0], is_float64=scenario.is_float64)

    def differences(self, base: CheckedRun, run: CheckedRun) -> list[Mismatch]:
        """Return what differs first: samples, and what does in one snapshot."""
        snapshots = compare_snapshots(base, run, ignored=self.ignored)
        return [*compare_samples(samples_of(base), samples_of(run)), *snapshots]


class Checker:
    """One check of one script.

    Args:
        say: Called with a line whenever there is something to tell meanwhile.
    """

    def __init__(
        self, runner: ScriptRunner, scope: Scope, say: Callable[[str], None]
    ) -> None:
        self._runner = runner
        self._scope = scope
        self._say = say
        self._size = scope.sizes[0]
        self._runs = CheckRuns(runner, IgnoredDifferences(scope.ignored), say)
        self._report = Report()
        # Numbers of replicas with which the program trains as with the first one.
        self._comparable = {self._size: True}

    def check(self) -> Report:
        begun = time.monotonic()
        report = self._report
        try:
            for name, stage in self._stages():
                report.stages.append(f"{name}: {stage()}")
                self._say(report.stages[-1])
                if report.results:
                    report.exit_code = ExitCode.DIFFERENT
                    break
        except Problem as problem:
            report.exit_code = problem.exit_code
            report.problem, report.detail = problem.text, problem.detail
            if problem.scenario is not None:
                report.command = self._scope.command(problem.scenario.options())
        report.num_runs = self._runs.num_runs
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
        runs, script = self._runs, self._runner.source.script
        base, again = runs.two_baselines(self._size)
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
        note_what_differs(runs.ignored, base, again)
        runs.finder = CauseFinder(
            self._runner.source,
            lint_paths([script], LintOptions(pedantic=True)).findings,
            runs.ignored,
        )
        self._check_reproducible(runs.differences(base, again), runs.finder)
        self._note_files()
        return f"reproducible; boundaries: {len(base.boundaries)}"

    def _check_reproducible(
        self, differences: Sequence[Mismatch], finder: CauseFinder
    ) -> None:
        if not differences:
            return
        first = differences[0]
        when = f" at {first.key.describe()}" if first.key else ""
        unseeded = sorted(finder.ignored.unseeded)
        causes = []
        if unseeded:
            again = self._runs.run(self._base().scenario, watched=unseeded)
            causes = finder.drawn(again.line_changes, unseeded)
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
        ignored = self._runs.ignored
        noted = sorted([*ignored.volatile_files, *ignored.unnamed_files.values()])
        if noted:
            self._report.notes.append(
                f"{', '.join(noted[:5])}: not the same in two runs without a restart, "
                "so only the number of lines is compared"
            )

    def _check_scope(self) -> str:
        places, sizes = self._scope.places, self._scope.sizes
        if len(sizes) == 1:
            sizes = sizes * (len(places) + 1)
        scenario = Scenario(sizes, places, self._scope.is_killed)
        if scenario.is_resized:
            scenario = scenario._replace(is_float64=self._widens)
            problem = self._problem_in_float64()
            if problem is not None:
                raise problem
        self._try([scenario])
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
        most = self._base().num_virtual
        left_out = [size for size in self._scope.sizes if most and size > most]
        for size in left_out:
            self._report.notes.append(
                f"{size} replicas are more than {most} virtual ones"
            )
        first, *others = [size for size in self._scope.sizes if size not in left_out]
        if not others:
            return "not compared"
        problem = self._problem_in_float64()
        if problem is not None:
            self._report.not_compared.append(
                f"other numbers of replicas: {problem.text}"
            )
            return "not compared"
        if not self._can_compare(others[0]):
            return (
                "another number of replicas is another training"
                if self._report.results
                else "not compared"
            )
        sizes = [*others, first]
        places = spread(self._base().boundaries, len(sizes) - 1)
        del sizes[len(places) + 1 :]
        self._try([Scenario(tuple(sizes), tuple(places), is_float64=self._widens)])
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
        base = self._runs.baseline(self._size, is_float64=self._widens)
        other = self._runs.baseline(size, is_float64=self._widens)
        differences = self._runs.differences(base, other)
        self._comparable[size] = not differences
        is_trained = any(is_tensor(each.expected) for each in differences)
        if is_trained and self._widens:
            self._report.not_compared.append(
                f"{replicas_in_words(size)} in place of {self._size}: "
                f"{differences[0].name} differs by more than rounding without any "
                "restart (dropout and batch normalisation do that)"
            )
        elif differences:
            sizes = ",".join(map(str, self._scope.sizes))
            command = self._scope.command(["--replicas", sizes])
            result = Result(other.scenario, differences, [], command, base.scenario)
            self._report.results.append(result)
        return not differences

    def _check_kills(self) -> str:
        places = spread(self._base().boundaries, _NUM_KILLS)
        self._try([self._restarted_at(*places)._replace(is_killed=True)])
        return f"{len(places)} kills with {replicas_in_words(self._size)}"

    # Runs.

    def _base(self) -> CheckedRun:
        """Return the run without a restart, and with no other number of replicas."""
        return self._runs.baseline(self._size)

    @property
    def _widens(self) -> bool:
        """Whether numbers of replicas are compared in double precision."""
        return self._base().num_virtual is None

    def _problem_in_float64(self) -> Problem | None:
        """Return why the program cannot be run in double precision, if it cannot."""
        try:
            self._runs.baseline(self._size, is_float64=self._widens)
        except Problem as problem:
            problem.text += (
                ". Numbers of replicas are compared in double precision only, in which "
                "rounding is no difference, so these cannot be compared"
            )
            return problem
        return None

    def _restarted_at(self, *places: RestartPlace) -> Scenario:
        sizes = (self._size,) * (len(places) + 1)
        return Scenario(sizes, places)

    def _try(self, scenarios: Sequence[Scenario]) -> None:
        """Run the script in each scenario once, and report what that changes."""
        for scenario in scenarios:
            self._runs.baseline_of(scenario)
        try:
            with contextlib.closing(self._runs.run_each(scenarios)) as runs:
                for run in runs:
                    differences = self._differences(run)
                    if differences:
                        self._add(run, differences)
                    elif run.missed:
                        raise self._runs.problem_of(run)
        except Problem as problem:
            for scenario in self._shorter(problem.scenario):
                self._runs.run(scenario)  # It may have the problem, too.
            raise

    def _differences(self, run: CheckedRun) -> list[Mismatch]:
        """Return what differs that numbers of replicas do not explain by themselves."""
        base = self._runs.baseline_of(run.scenario)
        differences = self._runs.differences(base, run)
        if differences and run.scenario.is_resized:
            comparable = [
                self._can_compare(size) for size in sorted({*run.scenario.sizes})
            ]
            return differences if all(comparable) else []
        return differences

    def _add(self, run: CheckedRun, differences: list[Mismatch]) -> None:
        finder = self._runs.finder
        assert finder is not None
        run, differences = self._look_closer(run, differences, finder)
        causes = finder.causes(run, differences, run.line_changes)
        for known in self._report.results:
            if causes and known.causes and known.causes[0].place == causes[0].place:
                known.also.append(run.scenario)
                return
        command = self._scope.command(run.scenario.options())
        self._report.results.append(Result(run.scenario, differences, causes, command))

    def _look_closer(
        self, run: CheckedRun, differences: list[Mismatch], finder: CauseFinder
    ) -> tuple[CheckedRun, list[Mismatch]]:
        """Run the script again, and see which lines of its replays change what.

        With the one restart after which it differs, if that is enough to show it; else
        with those before as well, or with all that the user has asked for.
        """
        watched = self._names_to_watch(run, finder)
        whole = run.scenario
        if not self._scope.places:
            whole = whole.until_generation(run.generation_of(differences[-1].key))
        for scenario in [*self._shorter(whole), whole]:
            closer = self._runs.run(scenario, watched=watched)
            found = self._runs.differences(self._runs.baseline_of(scenario), closer)
            if found:
                return closer, found
        return run, differences

    def _shorter(self, scenario: Scenario | None) -> list[Scenario]:
        """Return the scenario with its last restart alone, unless a user chose it."""
        if scenario is None or len(scenario.places) < 2 or scenario.is_resized:
            return []
        alone = self._restarted_at(scenario.places[-1])._replace(
            is_killed=scenario.is_killed
        )
        return [] if self._scope.places else [alone]

    def _names_to_watch(self, run: CheckedRun, finder: CauseFinder) -> list[str]:
        changed = [change.name for change in replayed_changes(run, self._runs.ignored)]
        if changed:
            return changed[:_MOST_WATCHED]
        lost = [VARIABLE_PREFIX + cause.name for cause in finder.lost(run)]
        return lost[:_MOST_WATCHED]
