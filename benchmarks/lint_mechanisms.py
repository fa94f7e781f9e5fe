"""What each rule and each mechanism of the linter finds in tests/lint/corpus.

    python benchmarks/lint_mechanisms.py [--only WORD]

One line for the linter as it is, one for each rule with how many of its messages are
true, and one for each mechanism that is switched off: how many mistakes are missed then
that are found with it, and how many false alarms there are more, or fewer.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).parents[1]))

from elasticrun.lint.graph import Site
from elasticrun.lint.program import Program
from elasticrun.lint.rules import dataflow, ranks, volatile
from elasticrun.lint.walk import (
    assignment,
    calls,
    expressions,
    iteration,
    statements,
)
from elasticrun.lint.walk.walk import Walk
from tests.lint.labelled import PROGRAMS, Measured, measure


def always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def place(_: Program, where: Any, __: object) -> Any:
    return Site(where.at, where.step)


# What is replaced, and by what.
MECHANISMS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "walk into functions": (Walk, "may_call", always(False)),
    "a turn for each element": (iteration, "_few_elements", always([])),
    "what a loop reads of its data set": (iteration, "_read_dataset", always(None)),
    "calls of objects": (calls.Value, "defines", always(False)),
    "steps inside expressions": (
        expressions, "_under", lambda walk, _, node: walk.evaluate(node)),
    "contents of arrays": (expressions, "_may_hold", always(False)),
    "updates told from sets": (assignment, "_how", always("set")),
    "tests that only log": (statements, "_is_quiet", always(False)),
    "tests for what is missing": (statements, "_is_lazy", always(False)),
    "losses": (calls, "taints_of_loss", lambda _, taints: taints),
    "the same test at a write and a reading": (
        dataflow, "_steady_tests", always(frozenset())),
    "clocks": (dataflow, "is_clock", always(False)),
    "flags that end the epochs": (volatile, "_ends_at_once", always(False)),
    "named at the test": (ranks, "_where_decided", lambda _, where, __: where),
    "named at the call": (Program, "called_at", place),
}  # fmt: skip


def run() -> tuple[set[tuple[str, int]], set[tuple[str, int, str]], list[Measured]]:
    """Return what is missed and what is false in the whole corpus."""
    with tempfile.TemporaryDirectory() as folder:
        every = [measure(program, Path(folder)) for program in PROGRAMS]
    missed = set().union(*(each.missed for each in every))
    return missed, set().union(*(each.false for each in every)), every


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mechanisms with this word")
    options = parser.parse_args()
    missed, false, every = run()
    num_mistakes = sum(each.num_mistakes for each in every)
    num_messages = sum(each.num_messages for each in every)
    print(f"{num_mistakes} mistakes, {len(missed)} missed; "
          f"{num_messages} messages, {len(false)} false")  # fmt: skip
    messages = Counter(code for each in every for *_, code in each.places)
    wrong = Counter(code for *_, code in false)
    for code, count in sorted(messages.items()):
        print(f"  {code}: {count - wrong[code]} true, {wrong[code]} false")
    for name, (owner, attribute, other) in MECHANISMS.items():
        if options.only not in name:
            continue
        with mock.patch.object(owner, attribute, other):
            lost, alarms, _ = run()
        more, fewer = len(alarms - false), len(false - alarms)
        lost -= missed
        print(f"without {name}: {len(lost)} missed, {more} false more, {fewer} fewer")


if __name__ == "__main__":
    main()
