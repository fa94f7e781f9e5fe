"""Log files of what replicas print: written, kept small, and read again.

A large log is renamed to `rank-1.old.log`, and replaces the one before.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from elasticrun.checkpoint.files.durable import move_over, open_plain

MOST_BYTES = 64 << 20  # Of a file; up to twice that is kept of a rank's generation.
_FOLDER = re.compile(r"generation-([0-9]{4,})")
_FILE = re.compile(r"rank-([0-9]+)\.log")


class Log:
    """Appends to a file, and does without it when that fails.

    A full disk must not end a job, which may end well before it prints much more.
    """

    def __init__(self, path: Path, on_failure: Callable[[OSError], None]) -> None:
        self._path = path
        self._on_failure: Callable[[OSError], None] | None = on_failure
        self._file: BinaryIO | None = None
        self._size = 0
        with self._failing_softly():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def write(self, line: bytes) -> None:
        """Keep a line if that can be done, also after another one was lost."""
        with self._failing_softly():
            if self._size > MOST_BYTES:
                self._rotate()
            if self._file is None:
                return
            self._size += self._file.write(line)

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()

    def _open(self) -> None:
        # The logs of a job may lie where others can plant a link or a pipe.
        file = open(self._path, "ab", buffering=0, opener=open_plain)  # noqa: SIM115
        self._file, self._size = file, os.fstat(file.fileno()).st_size

    def _rotate(self) -> None:
        self.close()
        self._file = None
        self._size = 0
        move_over(self._path, _older(self._path))
        self._open()

    @contextlib.contextmanager
    def _failing_softly(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            if not isinstance(error, OSError):
                error = OSError(str(error))
            on_failure, self._on_failure = self._on_failure, None
            if on_failure is not None:
                on_failure(error)


class LogReader:
    """Reads a log: the older part first, and later what has come since."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._open_at(_older(path) if _older(path).exists() else path)

    def read(self) -> Iterator[bytes]:
        """Yield the whole lines that have come since the last time."""
        while True:
            yield from self._rest()
            try:
                newest = os.stat(self._path)
                if os.path.samestat(newest, os.fstat(self._file.fileno())):
                    return
            except OSError:
                return
            yield from self._rest()  # It was moved away after the first look at it.
            self.close()
            self._open_at(self._path)

    def close(self) -> None:
        self._file.close()

    def _open_at(self, path: Path) -> None:
        self._file = open(path, "rb", opener=open_plain)  # noqa: SIM115

    def _rest(self) -> Iterator[bytes]:
        start, end = self._file.tell(), os.fstat(self._file.fileno()).st_size
        while start < end and (text := self._file.readline()).endswith(b"\n"):
            start += len(text)
            yield text
        self._file.seek(start)


def _older(path: Path) -> Path:
    return path.with_suffix(".old.log")


def log_path(log_dir: Path, *, generation: int, rank: int) -> Path:
    """Return the file that keeps what a replica prints."""
    return log_dir / f"generation-{generation:04d}" / f"rank-{rank}.log"


def find_logs(log_dir: Path) -> dict[int, dict[int, Path]]:
    """Return the logs by generation and rank, both in their order."""
    found: dict[int, dict[int, Path]] = {}
    for folder in log_dir.glob("generation-*"):
        if match := _FOLDER.fullmatch(folder.name):
            ranks = {
                int(file[1]): path
                for path in folder.iterdir()
                if (file := _FILE.fullmatch(path.name))
                and path.is_file()
                and not path.is_symlink()
            }
            found[int(match[1])] = dict(sorted(ranks.items()))
    return dict(sorted(found.items()))
