"""The end of a process in which gloo has run collectives."""

from __future__ import annotations

import hashlib
import math
import sys
import threading
from pathlib import Path

import pytest

from elasticrun.control.gloo import wait_for_threads
from tests.support.stage import wait_until

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="no other system tells what threads do"
)


def test_threads_of_gloo_that_still_run_are_waited_for() -> None:
    has_begun, has_ended = threading.Event(), threading.Event()

    def run_like_gloo() -> None:
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        name.write_text("pt_gloo_runloop")
        has_begun.set()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # Without the lock.
        has_ended.set()

    thread = threading.Thread(target=run_like_gloo)
    thread.start()
    has_begun.wait()
    wait_for_threads(math.inf)
    assert has_ended.is_set()
    thread.join()


def test_other_threads_may_have_any_name() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def sleep_with_half_a_letter() -> None:
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        name.write_bytes(b"half a letter \xc3")
        has_begun.set()
        may_end.wait()

    thread = threading.Thread(target=sleep_with_half_a_letter)
    thread.start()
    has_begun.wait()
    try:
        wait_for_threads(math.inf)
    finally:
        may_end.set()
        thread.join()


def test_threads_of_gloo_that_sleep_are_not() -> None:
    has_begun, may_end = threading.Event(), threading.Event()

    def sleep_like_gloo() -> None:
        name = Path(f"/proc/self/task/{threading.get_native_id()}/comm")
        name.write_text("pt_gloo_runloop")
        has_begun.set()
        may_end.wait()

    thread = threading.Thread(target=sleep_like_gloo)
    thread.start()
    has_begun.wait()
    waiting = threading.Thread(target=wait_for_threads, args=[math.inf])
    waiting.start()
    wait_until(lambda: not waiting.is_alive())
    may_end.set()
    thread.join()
