"""What replicas print: cut into lines, kept in log files, and read again.

A large log is renamed to `rank-1.old.log`, and replaces the one before.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from elasticrun.checkpoint.files.durable import move_over, open_plain

_MAX_LINE = 1 << 16
_READ_BYTES = 1 << 16
# Messages of torch's C++ part, and the stacks that follow them.
_MESSAGE = re.compile(rb"\[[WEF]\d{4} [\d:.]+ (\S+\.cpp:\d+)\]")
_STACK = re.compile(rb"\s*(frame #\d+: |Exception raised from )")
_NUM_SHOWN = 3  # Of each, before the others are hidden.
MOST_BYTES = 64 << 20  # Of a file; up to twice that is kept of a rank's generation.
_FOLDER = re.compile(r"generation-([0-9]{4,})")
_FILE = re.compile(r"rank-([0-9]+)\.log")


class LineReader:
    """Reads a pipe without waiting, and hands each line on with its line end.

    A line without an end waits for it, unless it is very long or the last.
    """

    def __init__(self, descriptor: int, on_line: Callable[[bytes], None]) -> None:
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor
        self._on_line = on_line
        self._rest = b""
        self.is_open = True

    def fileno(self) -> int:
        return self._descriptor

    def read(self) -> int:
        """Take what is there; return how many bytes that was."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return 0
        if not data:
            self.is_open = False
            return 0
        self.take(data)
        return len(data)

    def take(self, data: bytes) -> None:
        """Process data that was read from the pipe before."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line + b"\n")
        if len(self._rest) > _MAX_LINE:
            self._on_line(self._rest)
            self._rest = b""

    def close(self) -> None:
        """Take what is left, and close the pipe.

        More than the pipe holds is not waited for: a process that the replica has left
        behind may go on to print into it.
        """
        most = fcntl.fcntl(self._descriptor, fcntl.F_GETPIPE_SZ)
        while most > 0 and (num_bytes := self.read()):
            most -= num_bytes
        if self._rest:
            self._on_line(self._rest + b"\n")
        os.close(self._descriptor)


class Repeats:
    """Knows which lines of one replica the console need not show; its log has all.

    NCCL's threads and its store's clients warn every second, each time with another
    time and often with a stack, which would bury why the replica died.
    """

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}
        self._is_hiding = False

    def filtered(self, line: bytes) -> bytes:
        """Return the line as it is to be shown; empty if it is not."""
        message = _MESSAGE.search(line)
        if message is None:
            self._is_hiding = self._is_hiding and _STACK.match(line) is not None
            return b"" if self._is_hiding else line
        count = self._counts[message[1]] = self._counts.get(message[1], 0) + 1
        self._is_hiding = count > _NUM_SHOWN
        if count == _NUM_SHOWN:
            return line.rstrip(b"\n") + b" (again; more of these only in its log)\n"
        return b"" if self._is_hiding else line


def marked(rank: int, line: bytes) -> str:
    """Return a line as a terminal shows it: with its rank, and what was drawn last.

    A progress bar returns to the start of its line and draws over it.
    """
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    return f"[{rank}] {text.rpartition(chr(13))[2]}"


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
