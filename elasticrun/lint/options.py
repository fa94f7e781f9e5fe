"""What the user may choose, on the command line and in pyproject.toml."""

from __future__ import annotations

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
        pedantic: Whether hints are reported.
        idempotent: The user's functions that may be replayed.
        non_idempotent: The user's functions that must not be replayed.
        loaders: The user's classes that are loaders like AdaptiveDataLoader.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    pedantic: bool = False
    idempotent: tuple[str, ...] = ()
    non_idempotent: tuple[str, ...] = ()
    loaders: tuple[str, ...] = ()

    def wants(self, code: str) -> bool:
        """Return whether findings of a code are reported."""
        if any(code.startswith(each) for each in self.ignore):
            return False
        return not self.select or any(code.startswith(each) for each in self.select)


_LISTS = ("select", "ignore", "idempotent", "non-idempotent", "loaders")


def find_pyproject(start: Path) -> Path | None:
    """Return the pyproject.toml of the nearest folder above that has one."""
    start = start.absolute()
    for folder in (start, *start.parents):
        candidate = folder / "pyproject.toml"
        if candidate.is_file():
            return candidate
    return None


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
    if "elasticrun" not in text:
        return LintOptions()
    table: Any = _parse(text, path)
    for key in ("tool", "elasticrun", "lint"):
        table = table.get(key, {}) if isinstance(table, dict) else {}
    return _options(table, path)


def _options(table: dict[str, Any], path: Path) -> LintOptions:
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key == "pedantic" and isinstance(value, bool):
            values[key] = value
        elif key in _LISTS and _is_texts(value):
            values[key.replace("-", "_")] = tuple(value)
        else:
            known = ", ".join([*_LISTS, "pedantic"])
            raise ConfigurationError(
                f"{path}: [tool.elasticrun.lint] {key} = {value!r} is not a setting of "
                f"the linter. Settings are {known}: lists of texts, and pedantic, true "
                "or false."
            )
    return LintOptions(**values)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _parse(text: str, path: Path) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        try:
            import tomli as toml
        except ImportError:
            if "[tool.elasticrun.lint]" not in text:
                return {}
            raise ConfigurationError(
                f"{path} has settings for the linter, and Python 3.10 cannot read "
                "TOML. Install tomli, use Python 3.11 or later, or pass --isolated."
            ) from None
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}.") from error
