"""Ends a replica's process: flushes its output, and lets no thread abort it.

It imports no torch: programs without torch use it as well.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import sys
import threading
import time
import weakref
from itertools import compress
from pathlib import Path
from typing import Any

_FLUSH_SECONDS = 1.0
_TASKS = Path("/proc/self/task")
_FileRef = weakref.ref[io.IOBase]
_FILE = io.IOBase.__mro__[1]  # The type in C, which all files have.
_frozen: list[io.IOBase] = []  # Files that the collector does not know any more.
_NAME = "pt_gloo_runloop"  # The threads in which gloo runs collectives.


def exit_at_once(code: int) -> None:
    """End this process now, without unwinding; what was written still comes out.

    But for what nobody reads: a full pipe must not keep the process.
    """
    flushing = threading.Thread(target=flush_files, daemon=True)
    try:
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
    except RuntimeError:  # From Python 3.12 on, no thread starts while it ends.
        flush_files()
    os._exit(code)


def flush_files() -> list[_FileRef]:
    """Write out what waits in this process's buffers, also in those of C.

    Returns:
        The open files, by references that keep none of them.
    """
    files = _files_among([*_frozen, *gc.get_objects()])
    _flush(files)
    return list(map(weakref.ref, files))


def find_young_files() -> list[_FileRef]:
    """Return the files among what was made since the collector has last run."""
    return list(map(weakref.ref, _files_among(gc.get_objects(generation=0))))


def _flush(files: list[io.IOBase]) -> None:
    for file in [*files, *_standard_streams()]:
        with contextlib.suppress(Exception):  # It goes on with the others.
            file.flush()
    ctypes.CDLL(None).fflush(None)


def close_files(found: list[_FileRef]) -> None:
    """Close what is open but for the standard streams, as Python does at its end.

    So compressed files get their last bytes, too.
    """
    alive = {id(each): each for ref in found if (each := ref()) is not None}
    files = _files_among([*alive.values()])
    _flush(files)
    streams = _standard_streams()
    kept = [*streams, *(getattr(each, "buffer", None) for each in streams)]
    for file in files:
        if not any(file is each for each in kept):
            with contextlib.suppress(Exception):  # Python says nothing, either.
                file.close()


def freeze_modules() -> None:
    """Leave all that there is out of every look at all objects: modules, at best.

    Each of the looks at a process's end would take 0.2 s in large ones.
    """
    _frozen.extend(_files_among(gc.get_objects()))
    gc.freeze()


def _files_among(objects: list[Any]) -> list[io.IOBase]:
    """Return what buffers, what writes into another one before that."""
    # By type: objects that stand for others answer for these, or raise. And not by
    # io.IOBase, which asks its registry for each new type: of a thousand types, that
    # would take as long as all else here.
    types = list(map(type, objects))
    kinds = {kind for kind in set(types) if issubclass(kind, _FILE)}
    files = list(compress(objects, map(kinds.__contains__, types)))
    inner = (io.BufferedWriter, io.BufferedRandom)
    texts = [each for each in files if isinstance(each, io.TextIOWrapper)]
    others = [
        each
        for each in files
        if not isinstance(each, (io.TextIOWrapper, *inner, io.FileIO))
    ]
    return [*texts, *others, *(each for each in files if isinstance(each, inner))]


def _standard_streams() -> list[Any]:
    streams = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return [each for each in streams if each is not None]


def wait_for_threads(timeout: float = 10.0) -> None:
    """Wait until gloo's threads have let go of the tensors of the last collectives.

    A collective has returned before they do, and they take the interpreter's lock for
    it. Before CPython 3.14, a thread that waits for the lock while the interpreter ends
    is made to exit, from C++ that does not bear it: the process aborts, "terminate
    called without an active exception". Nothing is known of these threads but what the
    system says: those that neither run nor have run while the lock was free for a while
    do not wait for it.

    Args:
        timeout: After so many seconds it is left to chance.
    """
    end = time.monotonic() + timeout
    before = _threads()
    while before and time.monotonic() < end:
        # A thread that waits for the lock looks at it once in each interval.
        time.sleep(2 * sys.getswitchinterval())
        now = _threads()
        if now == before and all(state.startswith("S") for state, *_ in now.values()):
            break
        before = now


def wait_for_threads_at_exit() -> None:
    """Have `wait_for_threads` called when the interpreter is about to end."""
    atexit.unregister(wait_for_threads)
    atexit.register(wait_for_threads)


def _threads() -> dict[str, tuple[str, str, str]]:
    """Return each one's state, and how often it gave up a core and was put off one."""
    threads = {}
    for task in os.listdir(_TASKS):
        try:
            text = (_TASKS / task / "status").read_text(errors="replace")
        except OSError:  # It has ended.
            continue
        fields = dict(
            line.split(":\t", 1) for line in text.splitlines() if ":\t" in line
        )
        if fields.get("Name") == _NAME:
            threads[task] = (
                fields.get("State", ""),
                fields.get("voluntary_ctxt_switches", ""),
                fields.get("nonvoluntary_ctxt_switches", ""),
            )
    return threads
