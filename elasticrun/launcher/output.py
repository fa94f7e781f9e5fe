"""What replicas print: cut into lines, marked with the rank, and kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

_MAX_LINE = 1 << 16
_READ_BYTES = 1 << 16
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
        """Return the descriptor to wait on."""
        return self._descriptor

    def read(self) -> bool:
        """Take what is there; return whether there was anything."""
        try:
            data = os.read(self._descriptor, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:
            self.is_open = False
            return False
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._on_line(line + b"\n")
        if len(self._rest) > _MAX_LINE:
            self._on_line(self._rest)
            self._rest = b""
        return True

    def close(self) -> None:
        """Take what is left, and close the pipe."""
        while self.read():
            pass
        if self._rest:
            self._on_line(self._rest + b"\n")
        os.close(self._descriptor)


def log_path(directory: Path, *, generation: int, rank: int) -> Path:
    """Return the file that keeps what a replica prints."""
    return directory / f"generation-{generation:04d}" / f"rank-{rank}.log"


def open_log(directory: Path, *, generation: int, rank: int) -> BinaryIO:
    """Open a replica's log to append to; nothing that is in it is lost."""
    path = log_path(directory, generation=generation, rank=rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path, "ab", buffering=0)


def find_logs(directory: Path) -> dict[int, dict[int, Path]]:
    """Return the logs by generation and rank, both in their order."""
    found: dict[int, dict[int, Path]] = {}
    for folder in directory.glob("generation-*"):
        if match := _FOLDER.fullmatch(folder.name):
            ranks = {
                int(file[1]): path
                for path in folder.iterdir()
                if (file := _FILE.fullmatch(path.name))
            }
            found[int(match[1])] = dict(sorted(ranks.items()))
    return dict(sorted(found.items()))


def marked(rank: int, line: bytes) -> str:
    """Return a line as a terminal shows it: with its rank, and what was drawn last.

    A progress bar returns to the start of its line and draws over it.
    """
    text = line.decode("utf-8", "replace").rstrip("\r\n")
    return f"[{rank}] {text.rpartition(chr(13))[2]}"
