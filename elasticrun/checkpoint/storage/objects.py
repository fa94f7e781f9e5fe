"""Objects below one URL, read and written whole through fsspec.

Every error of the libraries behind fsspec becomes an OSError: FileNotFoundError if the
object does not exist, else StoreUnreachableError.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from elasticrun.checkpoint.files.durable import (
    BLOCK_SIZE,
    ChecksumWriter,
    StoreUnreachableError,
    write_through,
)
from elasticrun.checkpoint.storage.place import RemotePath
from elasticrun.errors import CheckpointError


class Objects:
    """The objects below a URL, by names like `checkpoint-00000012/model`."""

    def __init__(self, place: RemotePath, system: Any, root: str) -> None:
        self.place = place
        self._system = system
        self._root = root.rstrip("/")

    def get(self, name: str) -> bytes:
        with self._raising_oserrors(name):
            return bytes(self._system.cat_file(self._path(name)))

    def put(self, name: str, data: bytes) -> None:
        """Put an object whole, in the place of the one that is there."""
        with self._raising_oserrors(name):
            self._in_folder(
                name, lambda: self._system.pipe_file(self._path(name), data)
            )

    def put_new(self, name: str, data: bytes) -> bool:
        """Put an object unless there is one; return whether that was so.

        Where a store cannot do that in one step, of two at once both may believe it.
        """
        path = self._path(name)
        try:
            self._in_folder(
                name, lambda: self._system.pipe_file(path, data, mode="create")
            )
        except FileExistsError:
            return False
        except Exception:  # It knows no such mode; or it fails, as this then will, too.
            if self.find_size(name) is not None:
                return False
            self.put(name, data)
        return True

    def put_stream(
        self, name: str, write: Callable[[BinaryIO], object]
    ) -> tuple[int, int]:
        """Put an object with what `write` puts into a stream; return size and CRC-32.

        Errors of `write` itself stay what they are, and leave no object.
        """

        def put(data: memoryview) -> None:
            with self._raising_oserrors(name):
                file.write(data)

        path = self._path(name)
        with self._raising_oserrors(name):
            file = self._in_folder(name, lambda: self._system.open(path, "wb"))
        try:
            writer = write_through(ChecksumWriter(put), write)
            with self._raising_oserrors(name):
                file.close()
        except BaseException:
            _discard(file)
            raise
        return writer.size, writer.crc32

    def blocks(self, name: str) -> Iterator[bytes]:
        """Yield an object's content piece by piece."""
        with self._raising_oserrors(name):
            file = self._system.open(self._path(name), "rb")
        with contextlib.closing(file):
            while True:
                with self._raising_oserrors(name):
                    block = file.read(8 * BLOCK_SIZE)
                if not block:
                    return
                yield block

    def find_size(self, name: str) -> int | None:
        """Return an object's size, or None if it is not there; nothing is cached."""
        try:
            with self._raising_oserrors(name):
                self._system.invalidate_cache()
                found = self._system.info(self._path(name))
        except (FileNotFoundError, NotADirectoryError):
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def list(self, name: str = "") -> dict[str, int]:
        """Return what is directly below a name, with sizes; nothing is cached."""
        path = self._path(name)
        try:
            with self._raising_oserrors(name):
                self._system.invalidate_cache()
                found = self._system.ls(path, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return {}
        sizes = {each["name"].rstrip("/"): int(each["size"] or 0) for each in found}
        sizes.pop(path, None)  # Some stores keep an empty object for the folder.
        return {each.rpartition("/")[2]: size for each, size in sizes.items()}

    def remove(self, name: str, *, last: str) -> None:
        """Remove all below a name, the object `last` after the others."""
        others = [f"{name}/{each}" for each in self.list(name) if each != last]
        with contextlib.suppress(FileNotFoundError), self._raising_oserrors(name):
            if others:  # All at once, for which many stores have a call.
                self._system.rm([self._path(each) for each in others], recursive=True)
        with contextlib.suppress(FileNotFoundError), self._raising_oserrors(name):
            self._system.invalidate_cache()
            self._system.rm(self._path(name), recursive=True)

    def remove_object(self, name: str) -> None:
        """Remove one object; it may be gone already."""
        with contextlib.suppress(FileNotFoundError), self._raising_oserrors(name):
            self._system.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _in_folder(self, name: str, act: Callable[[], Any]) -> Any:
        """Call `act`; if the folder is missing, make it, as SFTP needs, and repeat."""
        try:
            return act()
        except FileNotFoundError:
            parent = self._path(name).rpartition("/")[0]
            with contextlib.suppress(FileExistsError):
                # Never with parents: that would make a bucket of a mistyped name.
                self._system.mkdir(parent, create_parents=False)
            return act()

    @contextmanager
    def _raising_oserrors(self, name: str) -> Iterator[None]:
        """Turn whatever is raised into an OSError that names the object."""
        place = self.place / name if name else self.place
        try:
            yield
        except FileNotFoundError as error:
            text = os.strerror(errno.ENOENT)
            raise FileNotFoundError(errno.ENOENT, text, str(place)) from error
        except (StoreUnreachableError, NotADirectoryError):
            raise
        except Exception as error:
            kind = type(error).__name__
            text = str(error).strip() or "no reason was given"
            raise StoreUnreachableError(f"{place}: {kind}: {text}") from error


def _discard(file: Any) -> None:
    """Let go of a half written object, which closing the file would put."""
    with contextlib.suppress(Exception):
        file.discard()
    with contextlib.suppress(Exception):
        file.closed = True  # Else the garbage collector closes it, whenever that is.


def open_objects(place: RemotePath) -> Objects:
    """Return the objects below a URL; nothing is asked of the store yet."""
    try:
        from fsspec.core import url_to_fs
    except ImportError as error:
        raise CheckpointError(
            f"{place} is in an object store, which is reached through fsspec, and that "
            "is not installed. pip install elasticrun[remote], or give the path of a "
            "directory."
        ) from error
    protocol = place.url.partition("://")[0]
    try:
        system, root = url_to_fs(place.url)
    except ImportError as error:
        raise CheckpointError(
            f"{place} cannot be opened: {error}. fsspec needs a package for each kind "
            f"of store, and the one for {protocol}:// is not installed. Install it "
            "(s3fs for s3://, gcsfs for gs://)."
        ) from error
    except Exception as error:  # Whatever its library makes of the URL.
        raise CheckpointError(
            f"{place} cannot be opened: {error}. Give a URL that fsspec knows, as "
            "s3://bucket/job, or the path of a directory."
        ) from error
    return Objects(place, system, root)
