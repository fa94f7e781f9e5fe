"""The threads in which gloo runs collectives, at the end of a process; without torch.

The launcher's part of a replica imports it, and the program may do without torch.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from pathlib import Path

_TASKS = Path("/proc/self/task")
_NAME = "pt_gloo_runloop"


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
