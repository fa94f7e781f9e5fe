"""Places that keep checkpoints, and what is in them as somebody else would see it."""

from __future__ import annotations

import os
import secrets
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

KINDS = ["local", "memory", "folders"]


class Folders(LocalFileSystem):
    """A file system that knows folders, and is reached through fsspec only."""

    protocol = "folders"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("folders://"))


class CountedFolders(Folders):
    """Appends the path of each file that is read to a file; each read takes a while."""

    protocol = "counted"
    VARIABLE = "COUNTED_READS"

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("counted://"))

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "rb":
            time.sleep(0.02)
            with open(os.environ[self.VARIABLE], "a", buffering=1) as log:
                log.write(f"{path}\n")
        return super()._open(path, mode, **options)


for kind in (Folders, CountedFolders):
    fsspec.register_implementation(kind.protocol, kind, clobber=True)


def make_place(kind: str, root: Path) -> str:
    """Return a path or a URL where nothing is yet."""
    if kind == "local":
        return str(root / "runs" / "digits")
    if kind == "memory":
        return f"memory://{secrets.token_hex(8)}/digits"
    folder = root / "runs" / "digits"
    folder.mkdir(parents=True)
    return f"folders://{folder}"


class Content:
    """Files below a path or a URL, to be looked at and damaged."""

    def __init__(self, place: object) -> None:
        text = str(place)
        self._system, self._root = url_to_fs(
            text if "://" in text else f"file://{text}"
        )

    def read(self, name: str) -> bytes:
        self._system.invalidate_cache()
        return bytes(self._system.cat_file(f"{self._root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        path = f"{self._root}/{name}"
        self._system.makedirs(os.path.dirname(path), exist_ok=True)
        self._system.pipe_file(path, data)

    def flip(self, name: str, position: int = 0, bits: int = 1) -> None:
        data = bytearray(self.read(name))
        data[position] ^= bits
        self.write(name, bytes(data))

    def truncate(self, name: str, size: int = -1) -> None:
        self.write(name, self.read(name)[:size])

    def remove(self, name: str) -> None:
        self._system.rm(f"{self._root}/{name}", recursive=True)

    def rename(self, old: str, new: str) -> None:
        for each in self.names(old):
            self.write(f"{new}/{each}", self.read(f"{old}/{each}"))
        self.remove(old)

    def names(self, name: str = "") -> list[str]:
        """Return what is directly below a name; nothing if it is not there."""
        self._system.invalidate_cache()
        path = os.path.join(self._root, name).rstrip("/")
        try:
            found = self._system.ls(path, detail=False)
        except FileNotFoundError:
            return []
        return sorted(each.rstrip("/").rpartition("/")[2] for each in found)

    def checkpoints(self) -> list[str]:
        return [each for each in self.names() if each.startswith("checkpoint-")]
