"""Write the tables of reference/command-line.md, from what `--help` says.

python docs/command_line.py
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

from elasticrun import __main__ as command_line
from elasticrun.checkpoint.inspection import command as inspection

PAGE = Path(__file__).with_name("reference") / "command-line.md"
_TABLE = re.compile(
    r"^## elasticrun (?P<name>\w+)\n\n(?P<table>(?:.+\n)+)", re.MULTILINE
)


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Return what parses each command."""
    names = {}
    for name in _actions_of(command_line._make_parser("")):
        names[name] = _actions_of(command_line._make_parser(name))[name]
    return {**names, "checkpoints": inspection._make_parser()}


def complete(text: str) -> str:
    """Return the page with the tables that the parsers have now."""
    of = parsers()
    written = {match["name"] for match in _TABLE.finditer(text)}
    assert written == of.keys(), written ^ of.keys()
    return _TABLE.sub(
        lambda match: f"## elasticrun {match['name']}\n\n{table(of[match['name']])}",
        text,
    )


def table(parser: argparse.ArgumentParser) -> str:
    """Return a parser's arguments as a table."""
    rows = ["| argument | what it does |", "| --- | --- |"]
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                words = " ".join([name, *_usages(inner)])
                rows.append(f"| `{words}` | {inner.description} |")
        elif not isinstance(action, argparse._HelpAction):
            rows += [f"| `{usage(action)}` | {text} |" for text in _helps(action)]
    return "\n".join(row.replace("\0", r"\|") for row in rows) + "\n"


def _helps(action: argparse.Action) -> Iterator[str]:
    if action.help is None and action.metavar == "SCRIPT":
        yield "the script; what follows belongs to it"
    elif action.dest == "job" and action.metavar == "JOB":
        yield "[which job](#which-job)"
    elif action.help != argparse.SUPPRESS:
        assert action.help, f"{action.option_strings} {action.dest} says nothing"
        yield action.help.replace("|", "\0")


def _usages(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            words = usage(action)
            is_optional = action.option_strings or action.nargs in ("?", "*")
            yield f"[{words}]" if is_optional else words


def usage(action: argparse.Action) -> str:
    """Return how an argument is written; a bar, which would end a cell, as NUL."""
    names = ", ".join(action.option_strings)
    value = action.metavar
    if value is None and action.choices:
        value = "|".join(map(str, action.choices))
    elif value is None and action.nargs != 0:
        value = action.dest.upper()
    return " ".join(filter(None, (names, value if action.nargs != 0 else ""))).replace(
        "|", "\0"
    )


def _actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    (commands,) = (
        action
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return dict(commands.choices)


if __name__ == "__main__":
    PAGE.write_text(complete(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
