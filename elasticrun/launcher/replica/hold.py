"""Pauses a replica that rehearses, at the line that needs the job."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import threading
from collections.abc import Callable, Collection
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from elasticrun.launcher import environment, processes
from elasticrun.replicas.environment import torchrun_variables

_OF_THE_JOB = frozenset(
    [*torchrun_variables(rank=0, world_size=1, port=0), "ELASTICRUN_CHECKPOINT_DIR"]
)


class Hold:
    """Pauses the program where it first asks which replica it is.

    Whatever needs the job asks for the rank first, and so do process groups: all of
    them look into its variables. Before GPUs are used it waits as well, since the other
    generation has them. Processes that the program starts meanwhile find the variables
    as the order has them, and do not wait.

    Args:
        on_waiting: Called when the program has come so far; perhaps more than once.
    """

    def __init__(self, on_waiting: Callable[[], None]) -> None:
        self._on_waiting = on_waiting
        self._pid = os.getpid()
        self._is_over = threading.Event()
        self._is_over.set()
        self._ending_thread = 0
        self._meanwhile = contextlib.ExitStack()
        self._awaited: Collection[str] = _OF_THE_JOB

    @property
    def is_over(self) -> bool:
        """Whether the program may go on."""
        return self._is_over.is_set()

    def begin(self, unknown: Collection[str]) -> None:
        """Pause what is imported from now on where it needs the job.

        Args:
            unknown: The variables that have no value so far.
        """
        self._is_over.clear()
        self._awaited = unknown
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

    def wait(self) -> None:
        """Wait until the other generation has ended; from any thread."""
        is_ending = threading.get_ident() == self._ending_thread
        if not self._is_over.is_set() and os.getpid() == self._pid and not is_ending:
            awaited, self._awaited = self._awaited, ()  # By what is imported meanwhile.
            self._on_waiting()
            self._awaited = awaited
            self._is_over.wait()

    def end(self, take_up: Callable[[], None]) -> None:
        """Let the program go on: its generation has begun. In the reporter's thread.

        Args:
            take_up: Called before, for what the program is to find.
        """
        self._ending_thread = threading.get_ident()
        take_up()
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
