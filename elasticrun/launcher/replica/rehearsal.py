"""What a successor does before its generation: it imports ahead, and pauses."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import math
import os
import sys
import threading
import zlib
from collections.abc import Callable, Collection
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from itertools import takewhile
from types import FrameType, ModuleType
from typing import Any

from elasticrun import errors
from elasticrun.errors import is_of_package, is_of_program
from elasticrun.launcher import environment, processes
from elasticrun.replicas.environment import torchrun_variables
from elasticrun.replicas.process_end import freeze_modules
from elasticrun.replicas.wire import Channel, Message

_OF_THE_JOB = frozenset(
    [*torchrun_variables(rank=0, world_size=1, port=0), "ELASTICRUN_CHECKPOINT_DIR"]
)
_OWN = os.path.dirname(errors.__file__) + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_MOST_MODULES = 8_000  # A message holds no more than a MiB.
_WITHOUT_FILES = ("mp_main__", "cython_")  # Cython makes such modules.


class Rehearsal:
    """Pauses the program where it first asks which replica it is.

    Whatever needs the job asks for the rank first, and so do process groups: all of
    them look into its variables. Before GPUs are used it waits as well, since the other
    generation has them. Processes that the program starts meanwhile find the variables
    as the order has them, and do not wait.

    Args:
        take_up: Called in the reporter's thread with what the launcher says when the
            generation begins, before the program goes on.
    """

    def __init__(
        self, order: Message, channel: Channel, take_up: Callable[[Message], None]
    ) -> None:
        self._order = order
        self._channel = channel
        self._take_up = take_up
        self._pid = os.getpid()
        self._is_over = threading.Event()
        self._is_over.set()
        self._ending_thread = 0
        self._meanwhile = contextlib.ExitStack()
        self._awaited: Collection[str] = ()

    def begin(self) -> None:
        """Pause what is imported ahead where it needs what is still unknown."""
        self._is_over.clear()
        self._awaited = self._order["unknown"]
        self._meanwhile.enter_context(processes.yielding_memory())
        self._meanwhile.enter_context(
            environment.noticing_reads(_OF_THE_JOB, self._on_read)
        )
        if "torch" in sys.modules:
            self._wait_before_gpus()
        else:  # A new interpreter, whose program may set variables before it imports.
            sys.meta_path.insert(0, _Imports("torch", self._wait_before_gpus))

    def _wait_before_gpus(self) -> None:
        torch: Any = sys.modules["torch"]
        if torch.version.cuda or torch.version.hip:
            torch.cuda._lazy_call(self.wait)

    def begin_program(self) -> None:
        """Pause the program, too, from now on."""
        self._awaited = _OF_THE_JOB

    def _on_read(self, name: str) -> None:
        if name in self._awaited:
            self.wait()

    def end_unlike(self) -> None:
        """End this process, in which the program might not find what it should."""
        self._channel.send({"type": "unlike"})
        os._exit(1)

    def wait(self) -> None:
        """Wait until the other generation has ended; from any thread."""
        is_ending = threading.get_ident() == self._ending_thread
        if not self._is_over.is_set() and os.getpid() == self._pid and not is_ending:
            self._channel.send({"type": "waiting"})
            self._is_over.wait()

    def end(self, begun: Message) -> None:
        """Let the program go on: its generation has begun."""
        self._ending_thread = threading.get_ident()
        self._take_up(begun)
        self._meanwhile.close()
        self._is_over.set()


class _Imports(MetaPathFinder):
    """Calls once a module has been imported."""

    def __init__(self, name: str, call: Callable[[], None]) -> None:
        self._name = name
        self._call = call

    def find_spec(self, name: str, *_: object) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_call(module: ModuleType) -> None:
                execute(module)
                self._call()

            spec.loader.exec_module = execute_and_call  # type: ignore[method-assign]
        return spec


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


class ProgramImports:
    """Notes what a program imports, and what these imports may have looked at.

    Args:
        order: Says which program it is, which may be an installed package.
        after: The last module that was imported before the program ran.
    """

    def __init__(self, order: Message, *, after: str) -> None:
        is_module = order["kind"] == "module"
        self._own = order["target"].partition(".")[0] if is_module else ""
        self._after = after
        self._folder = os.getcwd()
        # With the newest module of then. What an installed package sets while it is
        # imported, it sets wherever it is.
        self._written: list[tuple[str, str, str | None]] = []
        environment.notice_writes(self._on_write)

    def _on_write(self, name: str, value: str | None) -> None:
        frame: FrameType | None = sys._getframe(2)  # Behind the function that calls it.
        while frame is not None and not _is_importing(frame):
            if frame.f_code.co_filename.startswith(_OWN):
                return  # It does so in the next generation, too.
            if _is_of_program(frame.f_code.co_filename):
                self._written.append((next(reversed(sys.modules)), name, value))
                return
            frame = frame.f_back

    def describe(self) -> Message:
        """Return what a process needs to import what this one has, and as this one has.

        Each module comes with a checksum of where it is; each variable that the program
        has set with the number of modules that had been imported before that.
        """
        written = list(self._written)
        modules: list[tuple[str, int]] = []
        variables = []
        for name in [self._after, *_imported(after=self._after)]:
            module = sys.modules.get(name)
            if _is_stand_in(name, module) or len(modules) == _MOST_MODULES:
                break  # What is imported behind it may depend on it.
            origin = _origin(module)
            is_own = name == self._after or name.partition(".")[0] == self._own
            if is_of_package(origin) and not is_own:
                modules.append((name, zlib.crc32(origin.encode())))
            variables += [
                (len(modules), *each[1:]) for each in written if each[0] == name
            ]
        if os.getcwd() != self._folder:
            modules = []  # Any of them may have looked for files in either folder.
        path = [each for each in map(str, sys.path) if is_of_package(each)]
        return {
            "type": "imports",
            "modules": modules,
            "path": path,
            "variables": variables,
        }


def import_ahead(order: Message) -> bool:
    """Import what the replica before has imported of installed packages.

    Each finds the variables that the program had set before it, but nothing of the
    program's own. None is looked at again by the collector, which would take longer
    than all else at this process's end.

    Returns:
        Whether the program finds what it would find without, as far as is known.
    """
    told, start, path = order["imports"], environment.variables(), list(sys.path)
    if not told["modules"]:
        return True
    more = [each for each in told["path"] if each not in path]
    sys.path[:] = [*(each for each in path if each not in order["path"]), *more]
    draws = _draws()
    variables: dict[str, str | None] = {}
    changes = iter([*told["variables"], (math.inf, "", None)])
    next_change = next(changes)
    for number, (name, _) in enumerate(told["modules"]):
        while next_change[0] <= number:
            variables[next_change[1]] = next_change[2]
            environment.apply_changes({next_change[1]: next_change[2]})
            next_change = next(changes)
        with contextlib.suppress(BaseException):  # The program will say it.
            importlib.import_module(name)
    if _draws() != draws or any(map(_is_elsewhere, told["modules"])):
        return False
    sys.path[:] = [*path, *(e for e in sys.path if e not in path and e not in more)]
    now = environment.variables()
    changed = {name for name in variables if now.get(name) != variables[name]}
    before = {name: start.get(name) for name in variables}
    # What an import has changed stays: the program would find it so, too.
    environment.apply_changes(before, but=changed)
    freeze_modules()
    return True


def _draws() -> tuple[object, ...]:
    """Return NumPy's and torch's generators, if the process has them.

    Not Python's, from which many packages draw a name or two.
    """
    numpy: Any = sys.modules.get("numpy")
    torch: Any = sys.modules.get("torch")
    return (
        None if numpy is None else numpy.random.get_state()[1].tobytes(),
        None if torch is None else torch.get_rng_state().numpy().tobytes(),
    )


def _is_elsewhere(told: tuple[str, int]) -> bool:
    """Return whether a module has come from another file than in the other replica."""
    name, checksum = told
    origin = _origin(sys.modules.get(name))
    return bool(origin) and zlib.crc32(origin.encode()) != checksum


def _is_stand_in(name: str, module: object) -> bool:
    """Return whether a program has put it there, for others to import."""
    if "." in name or name.lstrip("_").startswith(_WITHOUT_FILES):
        return False
    return module is not None and _spec(module) is None


def _imported(*, after: str) -> list[str]:
    """Return the names of the modules that were imported later than one of them.

    A fork that looked at those before, if only at their names, would copy the memory in
    which they are: a page for every second one.
    """
    return list(takewhile(after.__ne__, reversed(sys.modules)))[::-1]


def _is_installed(module: object) -> bool:
    """Return whether it comes from where packages are installed."""
    return is_of_package(_origin(module))


def _origin(module: object) -> str:
    """Return the file that a module comes from, nothing if it comes from none."""
    origin = getattr(_spec(module), "origin", None)
    return origin if isinstance(origin, str) else ""


def _spec(module: object) -> object:
    """Return what has found a module.

    Programs put stand-ins there that answer anything, or raise anything.
    """
    try:
        # Not by the module itself, which may be one that is loaded when it is asked.
        return object.__getattribute__(module, "__spec__")
    except Exception:
        return None


def _is_importing(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith("<frozen importlib")


def _is_of_program(file: str) -> bool:
    is_standard = file.startswith(_STANDARD)
    return is_of_program(file) and not is_standard and not is_of_package(file)
