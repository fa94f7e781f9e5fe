"""What a check found, and how it says that."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from enum import IntEnum

from elasticrun.check.blame import Cause
from elasticrun.check.comparing import Mismatch, show
from elasticrun.check.runs.scenarios import Scenario

_MOST_OTHERS = 5


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
        differences: What differs at the first moment at which something does.
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
class Stage:
    """A stage of the check that was finished or failed."""

    name: str
    num_runs: int
    text: str


@dataclass
class Report:
    """Everything that a check has to say.

    Attributes:
        problem: What happened, if it is neither equal nor different.
        detail: More of it, in any number of lines: a traceback, or stacks.
        command: What reproduces the problem; empty for differences, which have theirs.
        compared: Which restarts have had their stage; empty if the user chose them.
        not_compared: What was not compared, and why.
    """

    exit_code: ExitCode = ExitCode.EQUAL
    stages: list[Stage] = field(default_factory=list)
    results: list[Result] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    compared: str = ""
    not_compared: list[str] = field(default_factory=list)
    problem: str = ""
    detail: str = ""
    difference: Mismatch | None = None
    command: list[str] = field(default_factory=list)
    num_runs: int = 0
    seconds: float = 0.0


def as_text(report: Report) -> str:
    """Return the report for people."""
    lines = [f"{stage.name}: {stage.text}" for stage in report.stages]
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
    lines = [text, f"{relative(cause.path)}:{cause.line}{rule}"]
    if cause.source.strip():
        lines.append(f"   {cause.line} | {cause.source.rstrip()}")
    return lines


def relative(path: str) -> str:
    """Return a path from here, if that is shorter."""
    short = os.path.relpath(path)
    return path if short.startswith("..") else short
