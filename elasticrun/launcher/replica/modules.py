"""The modules of a replica: those of its program, and those of installed packages."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Mapping
from itertools import takewhile
from types import ModuleType

from elasticrun.launcher import environment
from elasticrun.launcher.replica.hold import Hold
from elasticrun.replicas.wire import Message

_MOST_MODULES = 10_000  # A message holds no more than a MiB.


def modules_of_program(*, after: str) -> dict[str, ModuleType]:
    """Return the program's own modules that it has imported so far, by name.

    Args:
        after: The last module that was imported before.
    """
    modules = {}
    for name in ["__main__", *_imported(after=after)]:
        module = sys.modules.get(name)
        is_standard = name.partition(".")[0] in sys.stdlib_module_names
        if module is not None and not is_standard and not _is_installed(module):
            modules[name] = module
    return modules


def describe_imports(*, after: str, start: Mapping[str, str]) -> Message:
    """Return what a process needs to import what this one has, and as this one has.

    Args:
        after: The last module that was imported before the program ran.
        start: The variables that the program was started with.
    """
    names = [
        name for name in _imported(after=after) if _is_installed(sys.modules.get(name))
    ]
    return {
        "type": "imports",
        "modules": names[:_MOST_MODULES],
        "path": list(sys.path),
        "variables": environment.changes(start, environment.variables()),
    }


def import_ahead(order: Message, hold: Hold) -> None:
    """Import what the replica before has imported of installed packages.

    They find the variables that its program had set, and the folders where it looked
    for modules. The program itself then finds what it would find without, but for what
    an import has looked at: it may be an import that has set it.
    """
    told, start = order["imports"], environment.variables()
    environment.apply_changes(told["variables"], but=())
    before, sys.path[:] = list(sys.path), told["path"] or sys.path
    for name in told["modules"]:
        if hold.is_over:  # The program is to begin, and imports what it needs.
            break
        with contextlib.suppress(BaseException):  # The program will say it.
            importlib.import_module(name)
    sys.path[:] = [*before, *(each for each in sys.path if each not in told["path"])]
    unread = told["variables"].keys() - hold.read
    environment.apply_changes({name: start.get(name) for name in unread}, but=())


def _imported(*, after: str) -> list[str]:
    """Return the names of the modules that were imported later than one of them.

    A fork that looked at those before, if only at their names, would copy the memory in
    which they are: a page for every second one.
    """
    return list(takewhile(after.__ne__, reversed(sys.modules)))[::-1]


def _is_installed(module: object) -> bool:
    """Return whether it comes from where packages are installed.

    Programs put stand-ins there that answer anything, or raise anything.
    """
    try:
        origin = module.__spec__.origin  # type: ignore[attr-defined]
    except Exception:
        return False
    is_path = isinstance(origin, str)
    return is_path and ("site-packages" in origin or "dist-packages" in origin)
