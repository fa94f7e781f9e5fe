"""Options of `elasticrun run` from a project's pyproject.toml."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import Any

from elasticrun.launcher import environment
from elasticrun.launcher.options import options_of_torchrun
from elasticrun.lint.options import ConfigurationError, find_pyproject, read_table
from elasticrun.saving.settings import Settings

_OF_OTHERS = ("lint",)  # Tables below [tool.elasticrun].


def words_of_project(parser: argparse.ArgumentParser) -> list[str]:
    """Return what stands under [tool.elasticrun], as words of the command line.

    The file is that of the working directory, or of the nearest folder above it. What a
    variable says goes before it. Exits if a setting is wrong.
    """
    path = find_pyproject(Path.cwd())
    if path is None:
        return []
    variables = environment.variables()
    by_variable = {each.metadata["variable"]: each.name for each in fields(Settings)}
    told = {by_variable[name] for name in by_variable.keys() & variables.keys()}
    told |= options_of_torchrun(variables).keys()
    told |= {"name"} if "job" in told else set()
    words = []
    try:
        for key, value in read_table(path).items():
            if key in _OF_OTHERS:
                continue
            word = _word(parser, key, value)
            if word is None:
                raise ConfigurationError(
                    f"{path}: [tool.elasticrun] {key} = {value!r} is no option that a "
                    "project can set. Options have the names of the command line: "
                    "replicas = 4, save-interval = 60, quiet = true."
                )
            if key.replace("-", "_") not in told:
                words.append(word)
    except ConfigurationError as error:
        parser.error(str(error))
    return [word for word in words if word]


def _word(parser: argparse.ArgumentParser, key: str, value: Any) -> str | None:
    """Return a setting as a word; empty for a switch that is off, None if unfit."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        value = ",".join(value)
    word = f"--{key}" if isinstance(value, bool) else f"--{key}={value}"
    if key == "fresh" or not isinstance(value, bool | int | float | str):
        return None
    _, unknown = parser.parse_known_args(["run", word, "--", "SCRIPT"])
    return None if unknown else "" if value is False else word
