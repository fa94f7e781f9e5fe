"""Where checkpoints are kept, a path or an object store's URL, and who uses it."""

from __future__ import annotations

import os
import re
import socket
import time
from dataclasses import dataclass
from pathlib import Path

MANIFEST_NAME = "manifest.json"
DRAFT_NAME = "manifest.json.draft"  # In its place while a folder is no checkpoint.
UNFORCED_NAME = "manifest.json.unforced"  # Beside it while a power cut may take files.
_SHORTENED = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")
_LOCAL = ("file", "local")


@dataclass(frozen=True)
class RemotePath(os.PathLike[str]):
    """A URL like `s3://bucket/job`, with what checkpoints need of `pathlib.Path`.

    `str` gives the URL, and so does `os.fspath`, for libraries that open URLs: nothing
    else can open it.
    """

    url: str

    @property
    def name(self) -> str:
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url


Place = Path | RemotePath


@dataclass(frozen=True)
class OwnerProcess:
    """The process that holds a lock."""

    host: str
    pid: int
    process_started: float
    since: str

    @staticmethod
    def this_process() -> OwnerProcess:
        import psutil  # Not before it is needed: the command line starts without.

        return OwnerProcess(
            host=socket.gethostname(),
            pid=os.getpid(),
            process_started=psutil.Process().create_time(),
            since=time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime()),
        )

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}"


def parse_place(path: str | os.PathLike[str]) -> Place:
    """Return the absolute path, or the URL, that is meant.

    `file://` and `local://` mean paths; `~` is the home directory, as in a shell.
    """
    if isinstance(path, RemotePath):
        return path
    text = os.fspath(path)
    if _SHORTENED.match(text):
        raise ValueError(
            f"{text!r} looks like a URL that lacks a slash (pathlib removes one), so "
            "it would become a directory here. Give the URL as a string, as in "
            "s3://bucket/job; or, if a directory is meant, its absolute path."
        )
    protocol, is_url, rest = text.partition("://")
    if not is_url:
        return Path(os.path.abspath(os.path.expanduser(text)))
    if protocol not in _LOCAL:
        if not rest.strip("/"):
            raise ValueError(
                f"{text!r} names no place for a job's checkpoints. Add a bucket and a "
                "prefix, as in s3://bucket/job."
            )
        return RemotePath(text.rstrip("/"))
    if not rest.startswith("/"):
        raise ValueError(
            f"{text!r} names a host where {protocol}:// has none. Give three slashes "
            f"and an absolute path, as in {protocol}:///data/job, or the path alone."
        )
    return Path(os.path.abspath(rest))


def local_path(path: str | os.PathLike[str], *, what: str) -> Path:
    """Return a path as it is, also from a `file://`; refuse what is in a store."""
    place = parse_place(path)
    if isinstance(place, RemotePath):
        raise ValueError(
            f"{what} was given {str(path)!r}. It writes durable files and returns "
            "their paths, which an object store does not have. Give it the path of a "
            "directory or file on this machine."
        )
    return place if "://" in os.fspath(path) else Path(path)
