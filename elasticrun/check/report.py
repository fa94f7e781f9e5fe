"""What a check found, or why a run did not finish, and how it says that."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

from elasticrun.check.blame import Cause, CauseFinder
from elasticrun.check.checked_run import CheckedRun
from elasticrun.check.comparing import Mismatch, show
from elasticrun.check.scenarios import RestartPlace, Scenario
from elasticrun.check.source import ProgramSource, original_path, source_line
from elasticrun.launcher.supervisor.generation import Stack

_MOST_OTHERS = 5
_LAST_LINES = 20
# What a writer in C has to say of Landlock, or a program that was started.
_FORBIDDEN = re.compile("Permission denied|errno = 13|readonly database")


class ExitCode(IntEnum):
    """How a check ends; the names are words for users, too."""

    EQUAL = 0
    DIFFERENT = 1
    USAGE = 2
    NOT_REPRODUCIBLE = 3
    SCRIPT_FAILS = 4
    HANG = 5

    def describe(self) -> str:
        return self.name.lower().replace("_", " ")


@dataclass
class Result:
    """One restart that changed something.

    Attributes:
        differences: What differs in the first snapshot in which something does.
        causes: What explains it, the best first.
        also: Other scenarios that show the same.
        command: What reproduces it.
        base: What it differs from, if that is not the same without a restart.
    """

    scenario: Scenario
    differences: list[Mismatch]
    causes: list[Cause]
    command: list[str]
    base: Scenario | None = None
    also: list[Scenario] = field(default_factory=list)

    @property
    def first(self) -> Mismatch:
        """The difference to show first: that of the cause, if it is among them."""
        by_name = {each.name: each for each in self.differences}
        for cause in self.causes:
            if cause.name in by_name:
                return by_name[cause.name]
        return self.differences[0]


@dataclass
class Report:
    """Everything that a check has to say.

    Attributes:
        stages: What each that was finished has done, in a line.
        problem: What happened, if it is neither equal nor different.
        detail: More of it, in any number of lines: a traceback, or stacks.
        command: What reproduces the problem; empty for differences, which have theirs.
        compared: Which restarts have had their stage; empty if the user chose them.
        not_compared: What was not compared, and why.
    """

    exit_code: ExitCode = ExitCode.EQUAL
    stages: list[str] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: str = ""
    not_compared: list[str] = field(default_factory=list)
    problem: str = ""
    detail: str = ""
    command: list[str] = field(default_factory=list)
    num_runs: int = 0
    seconds: float = 0.0


def as_text(report: Report) -> str:
    """Return the report for people."""
    lines = [*report.stages]
    for result in report.results:
        lines += ["", *_result_lines(result)]
    if report.problem:
        lines += ["", report.problem]
    if report.detail:
        lines += [f"  {line}" for line in report.detail.splitlines()]
    if report.command:
        lines.append(f"  reproduce: {shlex.join(report.command)}")
    lines += [f"note: {note}" for note in report.notes]
    lines += [
        "",
        f"{_verdict(report)} ({report.num_runs} runs, {report.seconds:.0f} s)",
    ]
    return "\n".join(lines)


def _verdict(report: Report) -> str:
    if report.exit_code == ExitCode.EQUAL:
        if not report.not_compared:
            return "equal: restarts change nothing"
        equal = f"equal after {report.compared}; " if report.compared else ""
        return f"{equal}not compared: {'; '.join(report.not_compared)}"
    if report.exit_code == ExitCode.DIFFERENT:
        count = len(report.results)
        what = "restarts change"
        if all(result.base for result in report.results):
            what = "another number of replicas changes"
        return f"different: {what} the outcome ({count} found)"
    return report.exit_code.describe()


def _result_lines(result: Result) -> list[str]:
    first = result.first
    when_run = f"when {result.scenario.describe()}"
    if result.base is not None:
        sizes = f"{result.base.sizes[0]} to {result.scenario.sizes[0]}"
        when_run = f"without any restart, from {sizes} replicas"
    when = "" if first.key is None else f" at {first.key.describe()}"
    lines = [
        f"different {when_run}",
        f"  {first.name} {show(first.expected)} != {show(first.found)}{when}",
    ]
    shown = set()
    for cause in result.causes[:_MOST_OTHERS]:
        said = cause_lines(cause)
        # One line may have lost several variables.
        lines += [f"  {line}" for line in said[: 1 if cause.place in shown else None]]
        shown.add(cause.place)
    others = [each.name for each in result.differences if each is not first]
    if others:
        more = len(others) - _MOST_OTHERS
        names = ", ".join(others[:_MOST_OTHERS]) + (f" and {more} more" * (more > 0))
        lines.append(f"  also different there: {names}")
    if result.also:
        places = ", ".join(
            str(place) for scenario in result.also for place in scenario.places
        )
        lines.append(f"  the same difference also when restarted at {places}")
    lines.append(f"  reproduce: {shlex.join(result.command)}")
    return lines


def cause_lines(cause: Cause) -> list[str]:
    """Return a cause as lines."""
    text = cause.describe()
    if not cause.path:
        return [text + (f" ({cause.rule})" if cause.rule else "")]
    rule = f": {cause.rule}: {cause.message}" if cause.rule else ""
    if cause.rule and not cause.message:
        rule = f": a case of {cause.rule}, though the linter has no finding here"
    path = os.path.relpath(cause.path)
    path = cause.path if path.startswith("..") else path
    lines = [text, f"{path}:{cause.line}{rule}"]
    if cause.source.strip():
        lines.append(f"   {cause.line} | {cause.source.rstrip()}")
    return lines


@dataclass(eq=False)
class Problem(Exception):
    """Why a check cannot go on.

    Attributes:
        text: What happened, and what to do.
        detail: A traceback, or where each replica waits.
        scenario: With what restarts it happens; None if it does without any.
    """

    exit_code: ExitCode
    text: str
    detail: str = ""
    scenario: Scenario | None = None


def problem_of(
    run: CheckedRun,
    boundaries: Sequence[RestartPlace],
    *,
    source: ProgramSource,
    finder: CauseFinder | None,
) -> Problem:
    """Return why a run has not finished.

    Args:
        finder: Knows what a restart lost; None before the first one.
    """
    if run.missed is not None:
        return _missed(run, boundaries)
    if run.hang:
        waits = (where_it_waits(*each, source) for each in run.stacks.items())
        text = f"the script hangs {_when(run)}: {run.hang}"
        problem = Problem(ExitCode.HANG, text, "\n".join(waits))
    else:
        problem = _failed(run, finder)
    problem.scenario = run.failing_scenario if run.scenario.places else None
    return problem


def _missed(run: CheckedRun, boundaries: Sequence[RestartPlace]) -> Problem:
    loops = {place.at(0): place for place in boundaries if not place.is_end}
    have = ", ".join(map(str, list(loops.values())[:6]))
    return Problem(
        ExitCode.USAGE,
        f"the program never came to {run.missed}"
        + (f"; the last batches of its loops are {have}" if have else "")
        + ". Give a place that it passes, or raise --max-epochs and --max-batches.",
    )


def where_it_waits(rank: int, stack: Stack, source: ProgramSource) -> str:
    """Return at which of the program's lines a replica waits."""
    for printed, line, function in stack.frames:
        path = original_path(printed, source)
        if path != printed:
            own = source_line(path, int(line)).strip()
            return f"rank {rank} waits at {path}:{line} in {function}: {own}"
    return f"rank {rank} did not say where it waits"


def _failed(run: CheckedRun, finder: CauseFinder | None) -> Problem:
    assert run.failure is not None
    failure = run.failure.failure
    if failure is not None:
        lines = failure.summary.splitlines()  # A worker's has its traceback in it.
        text = f"raised {' ... '.join(dict.fromkeys([lines[0], lines[-1]]))}"
        detail = failure.trace
    else:
        text = f"ended with code {run.failure.code}"
        detail = "\n".join(run.output.get(run.failure.rank, [])[-_LAST_LINES:])
    said = "\n".join([text, detail, *run.output.get(run.failure.rank, [])])
    if _FORBIDDEN.search(said) and "--writable" not in text:
        text += (
            ". A checked program may write in its copy alone, so that it cannot change "
            "your files; to allow it to change those of a folder, add --writable FOLDER"
        )
    if finder is not None and run.scenario.places:
        # Such as a name that only a loop sets, which had finished before the restart.
        named = [c for c in finder.lost(run) if c.rule and f"'{c.name}'" in text]
        detail = "\n".join([detail, *(line for c in named for line in cause_lines(c))])
    return Problem(
        ExitCode.SCRIPT_FAILS,
        f"the script fails {_when(run)}: rank {run.failure.rank} {text}",
        detail,
    )


def _when(run: CheckedRun) -> str:
    if not run.scenario.places:
        precision = " in double precision" * run.scenario.is_float64
        return f"{run.scenario.describe()}{precision}"
    where = "after it is restarted" if run.last_generation else "before its restart"
    return f"{where} ({run.failing_scenario.describe()})"
