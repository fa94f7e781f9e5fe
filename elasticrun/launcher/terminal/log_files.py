"""Log files of what replicas print: written, kept small, and read again.

Beside `rank-1.log`, the file `rank-1.marks` says when each part of it was printed, and
whether to stderr. A large log is renamed to `rank-1.old.log`, and replaces the one
before.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from elasticrun.checkpoint.files.durable import move_over
from elasticrun.checkpoint.files.recorded import open_plain

MOST_BYTES = 64 << 20  # Of a file; up to twice that is kept of a rank's generation.
_FOLDER = re.compile(r"generation-([0-9]{4,})")
_MARK = re.compile(rb"([0-9]{1,18}) ([0-9]{1,12}) ([01])\n")
_MOST_MARK = 100  # Bytes.
_FILE = re.compile(r"rank-([0-9]+)\.log")


class Line(NamedTuple):
    """A line that was printed, with the second in which it was; 0 if not known."""

    text: bytes
    second: int
    is_error: bool


class Log:
    """Appends to a file, and does without it when that fails.

    A full disk must not end a job, which may end well before it prints much more.

    Args:
        on_failure: Called the first time.
    """

    def __init__(self, path: Path, on_failure: Callable[[OSError], None]) -> None:
        self._path = path
        self._on_failure: Callable[[OSError], None] | None = on_failure
        self._file: BinaryIO | None = None
        self._marks: BinaryIO | None = None
        self._size = 0
        self._mark = (0, False)
        with self._failing_softly():
            path.parent.mkdir(parents=True, exist_ok=True)
            self._open()

    def write(self, line: bytes, *, is_error: bool = False) -> None:
        """Keep a line if that can be done, also after another one was lost."""
        with self._failing_softly():
            if self._size > MOST_BYTES:
                self._rotate()
            if self._file is None:
                return
            mark = int(time.time()), is_error
            if mark != self._mark and self._marks is not None:
                self._mark = mark
                self._marks.write(b"%d %d %d\n" % (self._size, *mark))
            self._size += self._file.write(line)

    def close(self) -> None:
        for file in (self._file, self._marks):
            if file is not None:
                with contextlib.suppress(OSError):
                    file.close()

    def _open(self) -> None:
        # The logs of a job may lie where others can plant a link or a pipe.
        self._file = _open_to_append(self._path)
        self._size = os.fstat(self._file.fileno()).st_size
        self._mark = (0, False)
        self._marks = _open_to_append(_marks_of(self._path))

    def _rotate(self) -> None:
        self.close()
        self._file = self._marks = None
        self._size = 0
        move_over(_marks_of(self._path), _marks_of(_older(self._path)))
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

    def read(self) -> Iterator[Line]:
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
        self._marks_path = _marks_of(path)
        self._marks_read = 0
        self._marks: deque[tuple[int, ...]] = deque()
        self._mark: tuple[int, ...] = (0, 0, 0)

    def _rest(self) -> Iterator[Line]:
        start, end = self._file.tell(), os.fstat(self._file.fileno()).st_size
        if start < end:
            self._read_marks()  # Each was written before what it is of.
        while start < end and (text := self._file.readline()).endswith(b"\n"):
            while self._marks and self._marks[0][0] <= start:
                self._mark = self._marks.popleft()
            start += len(text)
            yield Line(text, self._mark[1], bool(self._mark[2]))
        self._file.seek(start)

    def _read_marks(self) -> None:
        """Read the marks that have come since the last time."""
        with (
            contextlib.suppress(OSError, ValueError),
            open(self._marks_path, "rb", opener=open_plain) as file,
        ):
            file.seek(self._marks_read)
            while (line := file.readline(_MOST_MARK)).endswith(b"\n"):
                self._marks_read += len(line)
                if match := _MARK.fullmatch(line):
                    self._marks.append(tuple(map(int, match.groups())))


def _open_to_append(path: Path) -> BinaryIO:
    return open(path, "ab", buffering=0, opener=open_plain)


def _marks_of(path: Path) -> Path:
    return path.with_suffix(".marks")


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
