"""Imports installed packages without the collector, which never looks at them later.

Most objects of a process are those of packages: hundreds of thousands. A collector that
looks at them makes their imports up to a third longer, and a replica's end, for which
the next generation waits, by 0.2 s. At all else it looks as it does without: what a
program has made before, in between or later is freed, and finalized at the end.
"""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

from elasticrun.replicas.process_end import freeze_all_but
from elasticrun.replicas.wire import Message

_IMPORT_SYSTEM = PathFinder.find_spec.__code__.co_filename
_MOST_OTHERS = 20_000  # To leave these to the collector takes 10 ms at each import.


def freeze_packages(order: Message) -> None:
    """From now on, keep the collector away from installed packages, in this process."""
    gc.freeze()  # What there is before the program.
    finder = _PackageFinder(package_of(order))
    sys.meta_path.insert(sys.meta_path.index(PathFinder), finder)


class _PackageFinder:
    """Finds modules as Python's own finder, and freezes what packages have made.

    When the program imports one; what that imports belongs to it. No longer once the
    program has made so much that telling one from the other would take longer than it
    saves, or has threads, which make more meanwhile, or has turned the collector off.

    Args:
        own: The package that the program is itself, or nothing.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._is_on = True

    def find_spec(
        self,
        name: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target)
        loader = None if spec is None else spec.loader
        if (
            self._is_on
            and isinstance(loader, SourceFileLoader)
            and is_of_package(str(loader.path))
            and name.partition(".")[0] != self._own
        ):
            self._watch_over(loader)
        return spec

    def _watch_over(self, loader: SourceFileLoader) -> None:
        load = loader.exec_module

        def load_and_freeze(module: ModuleType) -> None:
            others, self._is_on = self._others(), False
            if others is None:
                load(module)
                return
            gc.disable()
            try:
                load(module)
                freeze_all_but(others)
            finally:
                # Or an exception that the package keeps would, with this frame.
                others.clear()
                gc.enable()
                self._is_on = True

        # To tracebacks and warnings it is a part of the import system: left out.
        code = load_and_freeze.__code__.replace(co_filename=_IMPORT_SYSTEM)
        load_and_freeze.__code__ = code
        loader.exec_module = load_and_freeze  # type: ignore[method-assign]

    def _others(self) -> list[Any] | None:
        """Return what the program has made, None where packages are not frozen."""
        if not self._is_on or not gc.isenabled() or _has_other_threads():
            return None
        others = gc.get_objects()
        return others if len(others) <= _MOST_OTHERS else None


def package_of(order: Message) -> str:
    """Return the package that a program is itself, which may be installed."""
    return order["target"].partition(".")[0] if order["kind"] == "module" else ""


def is_of_package(file: str) -> bool:
    """Return whether a file lies where packages are installed."""
    return "site-packages" in file or "dist-packages" in file


def _has_other_threads() -> bool:
    """Return whether the program has threads, which make objects meanwhile."""
    return any(
        each is not threading.main_thread() and not each.name.startswith("elasticrun-")
        for each in threading.enumerate()
    )
