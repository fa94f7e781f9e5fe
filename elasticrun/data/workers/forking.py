"""Forks DataLoader workers, and forks again a worker that never begins.

A fork copies a lock that another thread holds at that moment, but not the thread that
would release it. Before Python 3.12 (3.11.10, 3.10.15) this can be a lock of the
interpreter: a C++ thread takes it, without the GIL, when it is about to call Python,
and a child forked just then waits for it before its first line
(https://github.com/python/cpython/issues/112275). Gloo's threads do so after each
collective; about one worker in a thousand never began.
"""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import BaseContext, ForkContext, ForkProcess
from typing import Any

from elasticrun.logger import Logger

logger = Logger(__name__)

# Seconds that each fork has until it runs; after the last of these, one has for ever.
_PATIENCE = (0.5, 1.0, 2.0, 4.0, 8.0)


def sure_to_begin(context: BaseContext | None) -> BaseContext:
    """Return a context like the given one whose forks begin; None is the default one.

    Other contexts than Python's own of "fork" are returned as they are.
    """
    context = context or multiprocessing.get_context()
    return _Context() if type(context) is ForkContext else context


class _Process(ForkProcess):
    _says_it_runs: int

    def run(self) -> None:
        os.write(self._says_it_runs, b"\0")
        os.close(self._says_it_runs)
        super().run()

    @staticmethod
    def _Popen(process: Any) -> Any:  # noqa: N802 (what a kind of process overrides)
        for patience in _PATIENCE:
            with _forked(process) as (child, reader):
                if _begins(child.pid, reader, patience):
                    return child
                _end(child)
            logger.warning(
                "process %d of a DataLoader did not begin within %g s of its fork, "
                "perhaps because the fork copied a lock that another thread held; it "
                "is forked again",
                child.pid,
                patience,
            )
        with _forked(process) as (child, _):
            return child


class _Context(ForkContext):
    Process = _Process


@contextmanager
def _forked(process: _Process) -> Iterator[tuple[Any, int]]:
    """Fork; yield the child, and where to read that it runs.

    Nobody else would end a child, which may be stopped, if a signal handler of the
    program raises meanwhile.
    """
    reader, process._says_it_runs = os.pipe()
    try:
        try:
            child = ForkProcess._Popen(process)
        finally:
            os.close(process._says_it_runs)
        try:
            yield child, reader
        except BaseException:
            _end(child)
            raise
    finally:
        os.close(reader)


def _end(child: Any) -> None:
    child.kill()
    child.wait()
    child.close()


def _begins(pid: int, reader: int, patience: float) -> bool:
    """Return whether the child has begun, or ended, in time; else it is stopped.

    One that has begun may hold the lock of its queue, and must not be killed: whoever
    took its place would wait for that for ever. So it is stopped before a last look.
    """
    poll = select.poll()
    poll.register(reader, select.POLLIN)
    if poll.poll(patience * 1000):
        return True
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
    if not poll.poll(0):
        return False
    os.kill(pid, signal.SIGCONT)
    return True
