"""What the user may choose, on the command line and in pyproject.toml."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, NamedTuple


class ConfigurationError(Exception):
    """The settings cannot be used; the text says which one and why."""


class LintOptions(NamedTuple):
    """The settings of the linter.

    Attributes:
        select: Codes or beginnings of codes to report; empty for all.
        ignore: Codes or beginnings of codes not to report.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    pedantic: bool = False

    def wants(self, code: str) -> bool:
        """Return whether findings of a code are reported."""
        is_selected = not self.select or code.startswith(self.select)
        return is_selected and not code.startswith(self.ignore)


_SECTION = "[tool.elasticrun"
_LISTS = ("select", "ignore")


def find_pyproject(start: Path) -> Path | None:
    """Return the pyproject.toml of the nearest folder above that has one.

    One that belongs to somebody else, as in a folder that all may write to, is passed
    over: it could hide what is to be seen.
    """
    start, owners = start.absolute(), (0, os.getuid())
    every = (folder / "pyproject.toml" for folder in (start, *start.parents))
    own = (e for e in every if e.is_file() and e.stat().st_uid in owners)
    return next(own, None)


def read_options(path: Path | None) -> LintOptions:
    """Return the settings under [tool.elasticrun.lint].

    Raises:
        ConfigurationError: The file cannot be read, or a setting is unknown or wrong.
    """
    if path is None:
        return LintOptions()
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    table: Any = _parse(text, path) if _SECTION in text else {}
    for key in ("tool", "elasticrun", "lint"):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    return _options(table if isinstance(table, dict) else {}, path)


def _options(table: dict[str, Any], path: Path) -> LintOptions:
    values: dict[str, Any] = {}
    for key, value in table.items():
        is_list = isinstance(value, list) and all(isinstance(e, str) for e in value)
        is_right = is_list if key in _LISTS else isinstance(value, bool)
        if not is_right or key not in (*_LISTS, "pedantic"):
            raise ConfigurationError(
                f"{path}: [tool.elasticrun.lint] {key} = {value!r} is not a setting of "
                f"the linter. Settings are {', '.join(_LISTS)}: lists of texts; and "
                "pedantic, true or false."
            )
        values[key] = tuple(value) if is_list else value
    return LintOptions(**values)


def _parse(text: str, path: Path) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        try:
            import tomli as toml
        except ImportError:
            raise ConfigurationError(
                f"{path} has settings for elasticrun, and Python 3.10 cannot read "
                "TOML. Install tomli, or use Python 3.11 or later."
            ) from None
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}.") from error
