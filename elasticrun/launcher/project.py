"""Options of `elasticrun run` that a project's pyproject.toml gives."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from elasticrun.launcher import environment
from elasticrun.launcher.options import options_of_torchrun
from elasticrun.lint.options import ConfigurationError, find_pyproject, read_table
from elasticrun.saving.settings import Settings

_NOT_FOR_ALL_RUNS = ("fresh", "help", "lifeline", "function")
_OF_OTHERS = ("lint",)  # Tables below [tool.elasticrun].


def take_settings(parser: argparse.ArgumentParser) -> None:
    """Make what stands under [tool.elasticrun] the defaults of a parser's options.

    The file is that of the working directory, or of the nearest folder above it. What
    the command line or a variable says goes before it. Exits if a setting is wrong.
    """
    path = find_pyproject(Path.cwd())
    if path is None:
        return
    variables = environment.variables()
    told = options_of_torchrun(variables)
    try:
        for key, value in read_table(path).items():
            if key in _OF_OTHERS:
                continue
            action = _find(parser, key)
            text = _given(action, value) if action is not None else None
            if action is None or text is None:
                raise ConfigurationError(
                    f"{path}: [tool.elasticrun] {key} = {value!r} is no option of "
                    "`elasticrun run` that holds for each. They are called as on the "
                    "command line: replicas = 4, save-interval = 60, quiet = true."
                )
            if action.dest not in told and _variable_of(action.dest) not in variables:
                parser.set_defaults(**{action.dest: text})
    except ConfigurationError as error:
        parser.error(str(error))


def _find(parser: argparse.ArgumentParser, key: str) -> argparse.Action | None:
    for action in parser._actions:
        is_called_so = f"--{key}" in action.option_strings
        if is_called_so and key not in _NOT_FOR_ALL_RUNS and not isinstance(key, int):
            return action
    return None


def _given(action: argparse.Action, value: Any) -> Any:
    """Return a setting as the command line would give it; None if it cannot be."""
    if action.nargs == 0:  # A switch.
        return (
            (action.const if value else action.default)
            if isinstance(value, bool)
            else None
        )
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    text = str(value)
    return text if action.choices is None or text in action.choices else None


def _variable_of(name: str) -> str:
    """Return the variable that says the same as an option; empty if none does."""
    known = {each.name: str(each.metadata["variable"]) for each in fields(Settings)}
    known["name"] = known["job"]
    return known.get(name, "")
