"""A disk that takes no more."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import pytest


def no_space() -> OSError:
    """Return what a call raises on a disk that is full."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def fail_for_space(*_: object, **__: object) -> NoReturn:
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


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """Mount a disk of 4 MiB, which only root may."""
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    path.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(path)]
    mounted = subprocess.run(mounting, capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"a small disk cannot be mounted: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def fill(path: Path) -> None:
    """Let a file take all that a disk has left."""
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 12))
