"""The end of a process in which gloo has run collectives."""

from __future__ import annotations

import hashlib
import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrun.replicas.process_end import wait_for_threads
from tests.support.stage import wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="no other system tells what threads do"
)


def start_named(name: bytes, run: Callable[[], object]) -> threading.Thread:
    """Start a thread that the system knows by a name, and wait until it does."""
    has_name = threading.Event()

    def take_name_and_run() -> None:
        path = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        path.write_bytes(name)
        has_name.set()
        run()

    thread = threading.Thread(target=take_name_and_run)
    thread.start()
    has_name.wait()
    return thread


def test_threads_of_gloo_that_still_run_are_waited_for() -> None:
    has_ended = threading.Event()

    def work() -> None:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # Without the lock.
        has_ended.set()

    thread = start_named(b"pt_gloo_runloop", work)
    wait_for_threads(math.inf)
    assert has_ended.is_set()
    thread.join()


@pytest.mark.parametrize("name", [b"pt_gloo_runloop", b"half a letter \xc3"])
def test_threads_that_sleep_are_not(name: bytes) -> None:
    may_end = threading.Event()
    thread = start_named(name, may_end.wait)
    waiting = threading.Thread(target=wait_for_threads, args=[math.inf])
    waiting.start()
    wait_until(lambda: not waiting.is_alive())
    may_end.set()
    thread.join()
