"""Finds what `python -m NAME` would run, without importing it."""

from __future__ import annotations

import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path


def why_not_runnable(name: str) -> str:
    """Return why Python could not run a module as a program, or nothing."""
    found = _find_main(name)
    return found if isinstance(found, str) else ""


def main_file(name: str) -> Path | None:
    """Return the file that Python would run for a module, if it is one."""
    found = _find_main(name)
    if isinstance(found, str) or found.origin is None:
        return None
    path = Path(found.origin)
    return path if path.is_file() else None


def _find_main(name: str) -> ModuleSpec | str:
    """Return what would be run, or why nothing would.

    Importing its package could do anything, and would do it once more than the user
    expects; so parts below the first one are only looked for as files.
    """
    parts = name.split(".")
    spec = _find_first(parts[0])
    for number, part in enumerate(parts[1:], start=1):
        if spec is None:
            break
        if spec.submodule_search_locations is None:
            return f"{'.'.join(parts[:number])} is a module, not a package"
        path = list(spec.submodule_search_locations)
        spec = PathFinder.find_spec(f"{spec.name}.{part}", path)
    if spec is None:
        return "there is no such module"
    if spec.submodule_search_locations is None:
        return spec
    main = PathFinder.find_spec(
        f"{name}.__main__", list(spec.submodule_search_locations)
    )
    return main or "this package has no __main__ to run"


def _find_first(name: str) -> ModuleSpec | None:
    """Look where a replica does: in the working directory, then as usual."""
    sys.path.insert(0, os.getcwd())
    try:
        return importlib.util.find_spec(name)
    except ValueError:  # An empty name, or a module without a specification.
        return None
    finally:
        sys.path.remove(os.getcwd())
