"""Where checkpoints are kept: a directory's path, or the URL of an object store."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_SHORTENED = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+:/[^/]")


@dataclass(frozen=True)
class RemotePath(os.PathLike[str]):
    """A URL like `s3://bucket/job`, with what checkpoints need of `pathlib.Path`.

    `str` gives the URL, and so does `os.fspath`, for libraries that open URLs: nothing
    else can open it.
    """

    url: str

    @property
    def name(self) -> str:
        """What follows the last slash."""
        return self.url.rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        """What precedes it."""
        return RemotePath(self.url.rpartition("/")[0])

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    def __fspath__(self) -> str:
        return self.url

    def __str__(self) -> str:
        return self.url


Place = Path | RemotePath


def is_url(path: str | os.PathLike[str]) -> bool:
    """Return whether this means an object store, as far as its form tells."""
    return isinstance(path, RemotePath) or (isinstance(path, str) and "://" in path)


def parse_place(path: str | os.PathLike[str]) -> Place:
    """Return the absolute path, or the URL, that is meant.

    `file://` and `local://` mean paths.

    Raises:
        ValueError: It is a URL without a path, or one that pathlib has spoilt.
    """
    if isinstance(path, RemotePath):
        return path
    if isinstance(path, str) and "://" in path:
        protocol, _, rest = path.partition("://")
        if protocol not in ("file", "local"):
            return RemotePath(f"{protocol}://{_check_rest(path, rest)}")
        path = rest
    elif not isinstance(path, str) and _SHORTENED.match(os.fspath(path)):
        raise ValueError(
            f"{os.fspath(path)!r} is a URL of which pathlib has removed a slash, so it "
            "would become a directory here. Give the URL as a string."
        )
    return Path(os.path.abspath(path))


def check_is_local(path: str | os.PathLike[str], *, what: str) -> None:
    """Refuse a URL where only a path can be used.

    Raises:
        ValueError: It is a URL.
    """
    if is_url(path):
        raise ValueError(
            f"{what} was given {str(path)!r}. It makes files durable and gives out "
            "their paths, and an object store has neither. Give it the path of a "
            "directory or file on this machine."
        )


def _check_rest(url: str, rest: str) -> str:
    rest = rest.rstrip("/")
    if not rest:
        raise ValueError(
            f"{url!r} names no place for a job's checkpoints. Add a bucket and a "
            "prefix, as in s3://bucket/job."
        )
    return rest
