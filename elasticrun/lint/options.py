"""What the user may choose, on the command line and in pyproject.toml."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
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
        exclude: Patterns of files and folders to pass over where a folder is linted.
        per_file_ignores: Patterns of files, and the codes not to report there.
        root: The folder from which these patterns start.
    """

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    pedantic: bool = False
    idempotent: tuple[str, ...] = ()
    non_idempotent: tuple[str, ...] = ()
    loaders: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    per_file_ignores: Mapping[str, Sequence[str]] = {}
    root: Path = Path()

    def wants(self, code: str, path: str) -> bool:
        """Return whether findings of a code are reported in a file."""
        ignored = [*self.ignore]
        for pattern, codes in self.per_file_ignores.items():
            if self._is_like(Path(path), [pattern]):
                ignored += codes
        if code.startswith(tuple(ignored)):
            return False
        return not self.select or code.startswith(tuple(self.select))

    def excludes(self, path: Path) -> bool:
        """Return whether a file or folder is passed over."""
        return self._is_like(path, self.exclude)

    def _is_like(self, path: Path, patterns: Iterable[str]) -> bool:
        """Return whether a path, or a folder above it, or a name has such a pattern."""
        if not patterns:
            return False
        whole = Path(os.path.relpath(path, self.root))
        names = {
            text for each in (whole, *whole.parents) for text in (each.name, str(each))
        }
        return any(fnmatch(name, each) for each in patterns for name in names)


_LISTS = ("select", "ignore", "idempotent", "non-idempotent", "loaders", "exclude")
_PER_FILE = "per-file-ignores"


def find_pyproject(start: Path) -> Path | None:
    """Return the pyproject.toml of the nearest folder above that has one."""
    start = start.absolute()
    every = (folder / "pyproject.toml" for folder in (start, *start.parents))
    return next((each for each in every if each.is_file()), None)


def read_options(path: Path | None) -> LintOptions:
    """Return the settings under [tool.elasticrun.lint].

    Raises:
        ConfigurationError: The file cannot be read, or a setting is unknown or wrong.
    """
    if path is None:
        return LintOptions()
    return _options(read_table(path, "lint"), path)._replace(root=path.parent)


def read_table(path: Path, *keys: str) -> dict[str, Any]:
    """Return what stands under [tool.elasticrun], or under a key of it.

    Raises:
        ConfigurationError: The file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} cannot be read: {error}.") from error
    names = ("tool", "elasticrun", *keys)
    if "elasticrun" not in text:
        return {}
    table: Any = _parse(text, path, section=f"[{'.'.join(names)}]")
    for key in names:
        table = table.get(key, {}) if isinstance(table, dict) else {}
    return table if isinstance(table, dict) else {}


def _options(table: dict[str, Any], path: Path) -> LintOptions:
    for key, value in table.items():
        if not _fits(key, value):
            raise ConfigurationError(
                f"{path}: [tool.elasticrun.lint] {key} = {value!r} is not a setting of "
                f"the linter. Settings are {', '.join(_LISTS)}: lists of texts; "
                f"{_PER_FILE}, a table of such lists by patterns of files; and "
                "pedantic, true or false."
            )
    values: dict[str, Any] = {
        key.replace("-", "_"): tuple(value) if isinstance(value, list) else value
        for key, value in table.items()
    }
    return LintOptions(**values)


def _fits(key: str, value: Any) -> bool:
    """Return whether a value is one for a setting of that name."""
    if key == "pedantic":
        return isinstance(value, bool)
    if key == _PER_FILE:
        return isinstance(value, dict) and all(map(_is_texts, value.values()))
    return key in _LISTS and _is_texts(value)


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _parse(text: str, path: Path, *, section: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib as toml
    else:
        try:
            import tomli as toml
        except ImportError:
            if section not in text:
                return {}
            raise ConfigurationError(
                f"{path} has settings for elasticrun, and Python 3.10 cannot read "
                "TOML. Install tomli, or use Python 3.11 or later."
            ) from None
    try:
        return toml.loads(text)
    except toml.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not valid TOML: {error}.") from error
