"""What a program does to the files of its working directory."""

from __future__ import annotations

import builtins
import hashlib
import io
import os
import weakref
from pathlib import Path
from typing import IO, Any

FILE_PREFIX = "file:"  # Of the name of a field that stands for a file.
_SKIPPED = {"__pycache__"}
_Stamp = tuple[int, int, int]
_OPENED: weakref.WeakSet[IO[Any]] = weakref.WeakSet()


def know_opened_files() -> None:
    """Know the files that the program opens from now on."""
    really_open: Any = open

    def opened(*arguments: Any, **options: Any) -> IO[Any]:
        file: IO[Any] = really_open(*arguments, **options)
        _OPENED.add(file)
        return file

    replaced: Any = opened
    builtins.open = io.open = replaced


def flush_opened_files() -> None:
    """Write out what files hold back, so that each run does it at the same moments."""
    for file in list(_OPENED):
        if not file.closed:
            file.flush()


class FileWatch:
    """Knows each file's content by a hash, and reads again only what has changed."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._known: dict[str, tuple[_Stamp, dict[str, Any]]] = {}

    def look(self) -> dict[str, dict[str, Any]]:
        """Return size, hash and, of text, the number of lines of each file."""
        found: dict[str, dict[str, Any]] = {}
        for folder, folders, names in os.walk(self._root):
            folders[:] = sorted(name for name in folders if name not in _SKIPPED)
            for name in sorted(names):
                path = os.path.join(folder, name)
                entry = self._entry(path)
                if entry is not None:
                    found[os.path.relpath(path, self._root)] = entry
        return found

    def _entry(self, path: str) -> dict[str, Any] | None:
        try:
            status = os.lstat(path)
            stamp = (status.st_mtime_ns, status.st_size, status.st_ino)
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                known = self._known[path] = (stamp, _read(path))
        except OSError:  # It went away meanwhile, or is a broken link.
            return None
        return known[1]


def _read(path: str) -> dict[str, Any]:
    if os.path.islink(path):
        return {"link": os.readlink(path)}
    digest, lines, size = hashlib.blake2b(digest_size=12), 0, 0
    is_text = True
    with open(path, "rb") as file:
        while data := file.read(1 << 20):
            is_text = is_text and b"\0" not in data
            digest.update(data)
            lines += data.count(b"\n")
            size += len(data)
    shape = {"lines": lines, "size": size} if is_text else {"size": size}
    return {**shape, "hash": digest.hexdigest()}


def changes(
    before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any] | None]:
    """Return what is new or different, and None for what is gone."""
    found: dict[str, dict[str, Any] | None] = {
        path: entry for path, entry in after.items() if before.get(path) != entry
    }
    return found | dict.fromkeys(before.keys() - after.keys())
