"""The modules of a replica: those of its program, and those of installed packages."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from itertools import takewhile
from types import FrameType, ModuleType

from elasticrun.errors import is_of_program
from elasticrun.launcher import environment
from elasticrun.launcher.replica.hold import Hold
from elasticrun.replicas.process_end import freeze_modules
from elasticrun.replicas.wire import Message

_STANDARD = os.path.dirname(os.__file__) + os.sep
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


def note_variables(names: set[str]) -> None:
    """Add the names of the variables that the program's own code sets from now on.

    What an installed package sets while it is imported, it sets wherever it is.
    """

    def note(name: str) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and not _is_importing(frame):
            if _is_of_program(frame.f_code.co_filename):
                names.add(name)
                return
            frame = frame.f_back

    environment.notice_writes(note)


def describe_imports(order: Message, *, after: str, written: set[str]) -> Message:
    """Return what a process needs to import what this one has, and as this one has.

    Args:
        order: Says which program it is, which may be an installed package.
        after: The last module that was imported before the program ran.
        written: The names of the variables that the program has set.
    """
    own = order["target"].partition(".")[0] if order["kind"] == "module" else ""
    names = [
        name
        for name in _imported(after=after)
        if _is_installed(sys.modules.get(name)) and name.partition(".")[0] != own
    ]
    variables = environment.variables()
    return {
        "type": "imports",
        "modules": names[:_MOST_MODULES],
        "path": list(map(str, sys.path)),
        "variables": {name: variables.get(name) for name in written.copy()},
    }


def import_ahead(order: Message, hold: Hold) -> None:
    """Import what the replica before has imported of installed packages.

    They find the variables that its program had set, and the folders where it looked
    for modules. The program itself then finds what it would find without.
    """
    told, start = order["imports"], environment.variables()
    if not told["modules"]:
        return
    variables: environment.Changes = told["variables"]
    environment.apply_changes(variables, but=())
    path, sys.path[:] = list(sys.path), told["path"]
    for name in told["modules"]:
        if hold.is_over:  # The program is to begin, and imports what it needs.
            break
        with contextlib.suppress(BaseException):  # The program will say it.
            importlib.import_module(name)
    sys.path[:] = [*path, *(each for each in sys.path if each not in told["path"])]
    now = environment.variables()
    changed = {name for name in variables if now.get(name) != variables[name]}
    before = {name: start.get(name) for name in variables}
    environment.apply_changes(before, but=changed)  # Those an import has changed.
    freeze_modules()


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
        # Not by the module itself, which may be one that is loaded when it is asked.
        origin = object.__getattribute__(module, "__spec__").origin
    except Exception:
        return False
    return isinstance(origin, str) and _is_of_package(origin)


def _is_importing(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith("<frozen importlib")


def _is_of_program(file: str) -> bool:
    is_standard = file.startswith(_STANDARD)
    return is_of_program(file) and not is_standard and not _is_of_package(file)


def _is_of_package(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file
