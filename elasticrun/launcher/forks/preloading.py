"""Imports modules in the forkserver, except those that make forks unsafe."""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import shutil
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

from elasticrun.errors import counted
from elasticrun.launcher import environment, processes
from elasticrun.replicas.environment import torchrun_variables
from elasticrun.replicas.gpus import held_gpu_files

_OF_ONE_REPLICA = frozenset(torchrun_variables(rank=0, world_size=1, port=0))
_PATH_OF_MADE: dict[str, Callable[[Any], str | bytes]] = {
    "mkdtemp": lambda made: made,  # `TemporaryDirectory` calls it, too.
    "mkstemp": lambda made: made[1],
    "NamedTemporaryFile": lambda made: made.name,
}


def preload(wanted: Sequence[str]) -> tuple[str, int]:
    """Import modules, up to the first after which a fork would not be sound.

    Returns:
        Why it would not be, or nothing; and how many were imported before that.
    """
    problem = _find_problem() or _find_broken_forks()
    num_sound = 0
    for name in wanted:
        if problem:
            break
        problem = _import(name) or _find_problem() or _find_broken_forks()
        num_sound += not problem
    _disown_libraries()
    gc.collect()
    gc.freeze()  # Or the collector of each replica would copy every page.
    return problem, num_sound


def _disown_libraries() -> None:
    """Let replicas not take every operator out of torch's tables at their end.

    That takes 40 ms. All else they finalize as if they had imported it themselves.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False


def _import(name: str) -> str:
    """Import a module; return why replicas cannot share what it did, or nothing.

    Replicas that shared a temporary folder would spoil it for each other, and the first
    one to end would remove it; and all would have what one of them derives from its
    rank.
    """
    used: set[str] = set()
    with (
        _noticing_files() as made,
        environment.noticing_reads(_OF_ONE_REPLICA, used.add),
        # The script will import it again, and say what is wrong.
        contextlib.suppress(BaseException),
    ):
        importlib.import_module(name)
    left = [path for path in made if os.path.lexists(path)]
    for path in left:  # This process is given up, and would not come to remove it.
        _remove(path)
    if left:
        return f"importing {name} made the temporary {os.fsdecode(left[0])}"
    if used:
        return f"importing {name} looked at {', '.join(sorted(used))}"
    return ""


def _find_problem() -> str:
    if processes.num_threads() > 1:
        started = counted(processes.num_threads() - 1, "thread")
        return f"importing them started {started}"
    torch: Any = sys.modules["torch"]
    if torch.cuda.is_initialized():
        return "importing them used CUDA"
    if held := held_gpu_files():
        return f"importing them opened {held[0]}"
    return ""


def _find_broken_forks() -> str:
    """Ask a fork whether it could use GPUs; only there torch knows.

    Whoever asks for the number of GPUs, as `torch.cuda.is_available()` may, leaves
    CUDA uninitialized here and out of reach for all forks.
    """
    torch: Any = sys.modules["torch"]
    if not (torch.version.cuda or torch.version.hip):
        return ""
    child = os.fork()
    if child == 0:
        is_broken = True  # Also where torch has no such answer: nobody need fork.
        try:
            is_broken = torch.cuda._is_in_bad_fork()
        finally:
            os._exit(is_broken)
    _, status = os.waitpid(child, 0)
    if status:
        return "importing them asked for GPUs, and after that no fork can use any"
    return ""


@contextlib.contextmanager
def _noticing_files() -> Iterator[list[str | bytes]]:
    """Note the paths of the temporary files and folders that are made meanwhile."""
    made: list[str | bytes] = []
    with contextlib.ExitStack() as stack:
        for name, path_of in _PATH_OF_MADE.items():
            original = getattr(tempfile, name)
            stack.callback(setattr, tempfile, name, original)
            setattr(tempfile, name, _noting(original, made, path_of))
        yield made


def _noting(
    make: Callable[..., Any],
    paths: list[str | bytes],
    path_of: Callable[[Any], str | bytes],
) -> Callable[..., Any]:
    @wraps(make)
    def make_and_note(*args: Any, **kwargs: Any) -> Any:
        made = make(*args, **kwargs)
        paths.append(path_of(made))
        return made

    return make_and_note


def _remove(path: str | bytes) -> None:
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path)
