"""The stages of a check, the cheap ones first; the first that fails is the last."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from elasticrun.check import report as verdicts
from elasticrun.check.blame import Detective, replayed_changes
from elasticrun.check.comparing import (
    Difference,
    Mask,
    compare_moments,
    compare_samples,
    show,
)
from elasticrun.check.engine import Engine, Run
from elasticrun.check.file_watch import FILE_PREFIX
from elasticrun.check.moments import (
    LineChange,
    compared,
    epochs_of,
    line_changes_of,
    loops_of,
)
from elasticrun.check.places import LoopPlace, Place
from elasticrun.check.plan import KILL, STOP
from elasticrun.check.report import Report, Result, Stage
from elasticrun.check.routes import Route, straight, through
from elasticrun.check.sweep import first_place_in, middle_of, places_to_try
from elasticrun.check.tolerance import Tolerances
from elasticrun.check.waiting import waits_of
from elasticrun.lint.engine import lint_paths
from elasticrun.lint.options import Options as LintOptions
from elasticrun.testing.traces import read_trace, samples_of_loop

_MOST_WATCHED = 200  # Fields at once, in a search for the lines that change them.
_MOST_HITS = 4  # Differing runs of one stage: more of them seldom say more.


@dataclass(frozen=True)
class Wish:
    """What the user wants to be checked.

    Attributes:
        places: Where to restart; empty for all stages.
        sizes: Numbers of replicas; with places, those of one generation after another.
        is_killed: Whether replicas are killed as well as stopped.
        ignored: Patterns of fields and files that may differ.
        command: The beginning of a command that reproduces something.
    """

    places: tuple[Place, ...]
    sizes: tuple[int, ...]
    is_killed: bool
    ignored: tuple[str, ...]
    command: Callable[[Sequence[str]], list[str]]


class _Ended(Exception):
    """The check cannot go on."""


class Checker:
    """One check of one script.

    Args:
        say: Called with a line whenever there is something to tell meanwhile.
    """

    def __init__(self, engine: Engine, wish: Wish, say: Callable[[str], None]) -> None:
        self._engine = engine
        self._wish = wish
        self._say = say
        self._report = Report()
        self._mask = Mask(wish.ignored)
        self._noise: set[str] = set()
        self._baselines: dict[int, Run] = {}
        self._loops: list[LoopPlace] = []
        self._tolerances: Tolerances | None = None
        self._detective: Detective | None = None
        self._done: set[Route] = set()
        self._num_hits = 0

    def check(self) -> Report:
        """Run the stages; return what they found."""
        begun = time.monotonic()
        try:
            for name, stage in self._stages():
                before = self._report.num_runs
                text = stage()
                num_runs = self._report.num_runs - before
                if text:
                    self._report.stages.append(Stage(name, num_runs, text))
                    self._say(f"{name}: {text}")
                if self._report.results:
                    self._report.exit_code = verdicts.DIFFERENT
                    break
        except _Ended:
            pass
        self._report.seconds = time.monotonic() - begun
        return self._report

    def _stages(self) -> Iterator[tuple[str, Callable[[], str]]]:
        yield "baseline", self._check_baseline
        if self._wish.places:
            yield "restart", self._check_wish
            return
        yield "zones", self._check_zones
        yield "sweep", self._check_sweep
        if len(self._wish.sizes) > 1:
            yield "replicas", self._check_sizes
        if self._wish.is_killed:
            yield "kill", self._check_kills

    # Stages.

    def _check_baseline(self) -> str:
        size = self._wish.sizes[0]
        base = self._baseline(size)
        again = self._take(straight(size))
        self._note_volatile_files(base, again)
        self._noise = _variables_that_differ(base, again)
        self._mask.unseeded |= _unseeded_generators(base, again)
        differences = self._differences(base, again)
        if differences:
            first = differences[0]
            when = f" at {first.key.describe()}" if first.key else ""
            self._report.difference = first
            self._end(
                verdicts.NOT_REPRODUCIBLE,
                "two runs without any restart differ: "
                f"{first.name} {show(first.expected)} != {show(first.found)}{when}. "
                "What a restart changes cannot be told from that. Seed every random "
                f"generator, or add --ignore '{first.name.removeprefix(FILE_PREFIX)}' "
                "if it does not matter.",
            )
        findings = lint_paths(
            [self._engine.source.script], LintOptions(pedantic=True)
        ).findings
        self._detective = Detective(
            self._engine.source,
            findings,
            mask=self._mask,
            noise=self._noise,
            drawing=_drawing_zones(base),
        )
        num_batches = sum(loop.num_batches for loop in self._loops)
        return (
            f"reproducible; {len(epochs_of(base.moments))} epochs, "
            f"{len(self._loops)} loops, {num_batches} batches"
        )

    def _check_wish(self) -> str:
        places, sizes = self._wish.places, self._wish.sizes
        if len(sizes) == 1:
            sizes = sizes * (len(places) + 1)
        self._try(through(places, sizes, KILL if self._wish.is_killed else STOP))
        return "different" if self._report.results else "equal"

    def _check_zones(self) -> str:
        base = self._baselines[self._wish.sizes[0]]
        candidates = _candidates(base)
        tried = []
        for zone, (key, names) in candidates.items():
            place = first_place_in(self._loops, key[0], key[1])
            if place is not None:
                tried.append(f"{len(names)} in {zone}")
                last = first_place_in(reversed(self._loops), None, key[1])
                for each in dict.fromkeys([place, last or place]):
                    self._try(through((each,), (base.route.sizes[0],) * 2, STOP))
        if not tried:
            return "nothing is changed between the loops of an epoch"
        found = f"; {len(self._report.results)} of them matter" * bool(
            self._report.results
        )
        return f"fields, files and generators that change: {', '.join(tried)}{found}"

    def _check_sweep(self) -> str:
        size = self._wish.sizes[0]
        base = self._baselines[size]
        before = self._report.num_runs
        for place in places_to_try(self._loops, epochs_of(base.moments)):
            self._try(through((place,), (size, size), STOP))
        middle = [middle_of(self._loops, 0.3), middle_of(self._loops, 0.8)]
        if middle[0] and middle[1] and middle[0] < middle[1]:
            twice = (middle[0], middle[1])
            self._try(through(twice, (size, size, size), STOP))
        return f"{self._report.num_runs - before} restarts with {_replicas(size)}"

    def _check_sizes(self) -> str:
        sizes = self._wish.sizes
        base = self._baselines[sizes[0]]
        for size in sizes[1:]:
            self._compare_sizes(base, size)
        if self._report.results:
            return "another number of replicas is another training"
        first, second = middle_of(self._loops, 0.3), middle_of(self._loops, 0.8)
        taken = []
        for one, other in itertools.pairwise(sizes):
            self._baseline(one)
            if first and second and first < second:
                self._try(through((first, second), (one, other, one), STOP))
                taken.append(f"{one} to {other} to {one}")
            elif first:
                self._try(through((first,), (one, other), STOP))
                taken.append(f"{one} to {other}")
            if first:
                self._try(through((first,), (other, other), STOP))
                taken.append(f"{other} to {other}")
        return ", ".join(taken)

    def _compare_sizes(self, base: Run, size: int) -> None:
        """Note what depends on the number of replicas without any restart."""
        other = self._baseline(size)
        differences = self._differences(base, other)
        while differences:
            soft = [each for each in differences if _is_soft(each)]
            if len(soft) < len(differences) or self._engine.is_float64:
                self._add(other, differences, with_causes=False)
                return
            if not self._mask.sized:
                self._report.notes.append(
                    f"with {_replicas(size)} instead of {base.route.sizes[0]}, "
                    f"{soft[0].name} differs by more than rounding without any restart "
                    "(dropout and batch normalisation do that); such fields are not "
                    "compared between numbers of replicas"
                )
            self._mask.sized |= {each.name for each in soft}
            differences = self._differences(base, other)

    def _check_kills(self) -> str:
        size = self._wish.sizes[0]
        before = self._report.num_runs
        for part in (0.0, 0.5, 0.9):
            place = middle_of(self._loops, part)
            if place is not None:
                self._try(through((place,), (size, size), KILL))
        return f"{self._report.num_runs - before} kills with {_replicas(size)}"

    # Runs.

    def _baseline(self, size: int) -> Run:
        if size not in self._baselines:
            run = self._baselines[size] = self._take(straight(size))
            if len(self._baselines) == 1:
                self._loops = loops_of(run.moments)
                self._check_has_loops()
        return self._baselines[size]

    def _check_has_loops(self) -> None:
        if not any(loop.num_batches for loop in self._loops):
            self._end(
                verdicts.USAGE,
                f"{self._engine.source.script.name} has run no loop over an "
                "AdaptiveDataLoader, so there is nothing to restart in. Check a script "
                "that trains with elasticrun, with arguments with which it does.",
            )

    def _try(self, route: Route) -> None:
        """Take a route once, and add what it changes to the report."""
        if route in self._done or self._num_hits >= _MOST_HITS:
            return
        self._done.add(route)
        run = self._take(route)
        base = self._baseline(route.sizes[0])
        differences = self._differences(base, run)
        if differences:
            self._add(run, differences, with_causes=True)

    def _add(
        self, run: Run, differences: list[Difference], *, with_causes: bool
    ) -> None:
        self._num_hits += 1
        causes = []
        if with_causes and self._detective is not None:
            lines = self._lines_of(run)
            causes = self._detective.causes(run, differences, lines)
        result = Result(
            run.route, differences, causes, self._wish.command(run.route.options())
        )
        for known in self._report.results:
            if causes and known.causes and known.causes[0].place == causes[0].place:
                known.also.append(run.route)
                return
        self._report.results.append(result)

    def _lines_of(self, run: Run) -> list[LineChange]:
        """Take a route again, and see which lines of its replays change what."""
        assert self._detective is not None
        changed = [change.name for change in replayed_changes(run, self._mask)]
        names = changed[:_MOST_WATCHED]
        if not names and self._detective.drawing:
            names = sorted(run.moments[-1].random)
        if not names:
            return []
        return line_changes_of(self._take(run.route, watched=names).notes)

    def _take(self, route: Route, *, watched: Sequence[str] = ()) -> Run:
        run = self._engine.run(route, watched=watched)
        self._report.num_runs += 1
        if run.missed is not None:
            self._end_missed(run)
        elif run.hang:
            self._end_hung(run)
        elif run.failure is not None:
            self._end_failed(run)
        return run

    def _differences(self, base: Run, run: Run) -> list[Difference]:
        """Return what differs first, in samples or at a moment."""
        tolerances = None
        if len({*base.route.sizes, *run.route.sizes}) > 1:
            tolerances = self._tolerances_of(base)
        samples = compare_samples(_samples(base), _samples(run))
        moments = compare_moments(
            base.moments,
            run.moments,
            last_leg=len(run.route.legs) - 1,
            mask=self._mask,
            tolerances=tolerances,
            is_killed=run.route.is_killed,
        )
        return [*samples, *moments]

    def _tolerances_of(self, base: Run) -> Tolerances:
        if self._tolerances is None:
            size = base.route.sizes[0]
            perturbed = self._engine.run(straight(size), is_perturbed=True)
            self._report.num_runs += 1
            self._tolerances = Tolerances(base.moments, perturbed.moments)
        return self._tolerances

    def _note_volatile_files(self, base: Run, again: Run) -> None:
        one, other = base.moments[-1].files, again.moments[-1].files
        for path in one.keys() & other.keys():
            if one[path] != other[path] and not self._mask.hides(path):
                self._mask.volatile_files.add(path)
        only = one.keys() ^ other.keys()
        for path in only:
            twins = [each for each in only if _shape(each) == _shape(path)]
            if len(twins) > 1:
                self._mask.unnamed_files.add(path)
        noted = sorted(self._mask.volatile_files | self._mask.unnamed_files)
        if noted:
            self._report.notes.append(
                f"{', '.join(noted[:5])}: not the same in two runs without a restart, "
                "so only the number of lines is compared"
            )

    # Ends.

    def _end(self, code: int, problem: str, detail: str = "") -> None:
        self._report.exit_code = code
        self._report.problem = problem
        self._report.detail = detail
        raise _Ended

    def _end_missed(self, run: Run) -> None:
        assert run.missed is not None
        have = ", ".join(f"{loop.at(loop.num_batches)}" for loop in self._loops[:6])
        self._end(
            verdicts.USAGE,
            f"the program never came to {run.missed.until}"
            + (f"; the last batches of its loops are {have}" if have else "")
            + ". Give a place that it passes, or raise --max-epochs and --max-batches.",
        )

    def _end_failed(self, run: Run) -> None:
        assert run.failure is not None
        if run.route.places:
            self._report.command = self._wish.command(run.route.options())
        failure = run.failure.failure
        if failure is not None:
            text, detail = f"raised {failure.summary}", failure.trace
        else:
            text = f"ended with code {run.failure.code}"
            detail = "\n".join(run.output.get(run.failure.rank, [])[-20:])
        self._end(
            verdicts.SCRIPT_FAILS,
            f"the script fails {_leg_text(run)}: rank {run.failure.rank} {text}",
            detail,
        )

    def _end_hung(self, run: Run) -> None:
        size = run.route.legs[run.num_failed].size
        waits = waits_of(run.output, size, self._engine.source)
        self._report.waits = [wait._asdict() for wait in waits]
        if run.route.places:
            self._report.command = self._wish.command(run.route.options())
        self._end(
            verdicts.HANG,
            f"the script hangs {_leg_text(run)}: {run.hang}",
            "\n".join(wait.describe() for wait in waits),
        )


def _leg_text(run: Run) -> str:
    if not run.route.places:
        return run.route.describe()
    number = run.num_failed
    where = "before its restart" if number == 0 else "after it is restarted"
    return f"{where} ({run.route.describe()})"


def _samples(run: Run) -> dict[tuple[int, int, int], list[int]]:
    lines = read_trace(run.trace)
    places = sorted({(line["epoch"], line["loop"]) for line in lines})
    return {
        (epoch, loop, batch): samples
        for epoch, loop in places
        for batch, samples in samples_of_loop(lines, epoch=epoch, loop=loop).items()
    }


def _variables_that_differ(base: Run, again: Run) -> set[str]:
    found = set()
    others = compared(again.moments, last_leg=0)
    for key, moment in compared(base.moments, last_leg=0).items():
        other = others[key].variables if key in others else {}
        for name, value in moment.variables.items():
            if value != other.get(name):
                found.add(name)
    return found


def _unseeded_generators(base: Run, again: Run) -> set[str]:
    others = compared(again.moments, last_leg=0)
    return {
        name
        for key, moment in compared(base.moments, last_leg=0).items()
        for name, state in moment.random.items()
        if key in others and others[key].random.get(name) != state
    }


def _candidates(base: Run) -> dict[str, tuple[tuple[int, int], set[str]]]:
    """Return what changes in each zone between loops, where that is seen first.

    By the zone and the number of the loop that it leads to.
    """
    found: dict[str, tuple[tuple[int, int], set[str]]] = {}
    moments = [m for m in base.moments if m.key.kind in ("begin", "enter", "leave")]
    for before, after in itertools.pairwise(moments):
        key = after.key
        if key.kind != "enter" or not key.in_epoch or before.key.kind == "enter":
            continue
        zone = "zone A" if before.key.kind == "begin" else "zone B"
        names = {
            name
            for one, other in (
                (before.fields, after.fields),
                (before.random, after.random),
                (before.files, after.files),
            )
            for name in {*one, *other}
            if one.get(name) != other.get(name)
        }
        if names:
            label = f"{zone} before loop {key.loop}"
            found.setdefault(label, ((key.epoch, key.loop), set()))[1].update(names)
    return found


def _drawing_zones(base: Run) -> set[str]:
    """Return the zones in which the program moves a random generator."""
    zones = set()
    for before, after in zip(base.moments, base.moments[1:], strict=False):
        if after.key.kind == "enter" and before.random != after.random:
            zones.add("A" if before.key.kind == "begin" else "B")
        elif after.key.kind == "begin" and before.random != after.random:
            zones.add("D" if after.key.epoch else "P")
    return zones


def _is_soft(difference: Difference) -> bool:
    """Return whether it is a number that another order of sums may well move."""
    value = difference.expected
    return isinstance(value, float) or (isinstance(value, dict) and "sketch" in value)


def _shape(path: str) -> str:
    return re.sub(r"[0-9a-f]*\d[0-9a-f]*", "#", path)


def _replicas(size: int) -> str:
    return f"{size} replica{'s' * (size > 1)}"
