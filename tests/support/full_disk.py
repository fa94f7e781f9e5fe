"""A disk that takes no more."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn


def no_space() -> OSError:
    """Return what a call raises on a disk that is full."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_for_space(*_: object) -> NoReturn:
    """Do what a call does on a disk that is full."""
    raise no_space()


@contextmanager
def limited_files(size: int) -> Iterator[None]:
    """Let no file grow beyond a size, as a full disk would not."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
