"""Runs that did not finish: what went wrong, and where."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from elasticrun.check.blame import CauseFinder
from elasticrun.check.report import ExitCode, cause_lines
from elasticrun.check.runs.checked_run import CheckedRun
from elasticrun.check.runs.scenarios import RestartPlace, Scenario
from elasticrun.check.runs.source import ProgramSource, original_path, source_line
from elasticrun.launcher.supervisor.generation import Stack

_LAST_LINES = 20
# What a writer in C has to say of Landlock, or a program that was started.
_FORBIDDEN = re.compile("Permission denied|errno = 13|readonly database")


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
    problem = _hung(run, source) if run.hang else _failed(run, finder)
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


def _hung(run: CheckedRun, source: ProgramSource) -> Problem:
    return Problem(
        ExitCode.HANG,
        f"the script hangs {_when(run)}: {run.hang}",
        "\n".join(where_it_waits(*each, source) for each in run.stacks.items()),
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
    where = "after it is restarted" if run.last_leg else "before its restart"
    return f"{where} ({run.failing_scenario.describe()})"
