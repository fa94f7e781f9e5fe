"""Checkpoints in an object store; one exists as soon as its manifest does."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import socket
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import BinaryIO, cast

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import (
    TEMPORARY_SUFFIX,
    DamagedFileError,
    FileRecord,
    StoreUnreachableError,
    check_small,
    compare,
    missing_error,
)
from elasticrun.checkpoint.states.state import state_of_file
from elasticrun.checkpoint.storage.claim import (
    OF_CHECKPOINTS,
    ClaimTiming,
    StoreClaim,
    find_claimant,
)
from elasticrun.checkpoint.storage.local import LocalStorage
from elasticrun.checkpoint.storage.objects import Objects, open_objects
from elasticrun.checkpoint.storage.place import (
    DRAFT_NAME,
    MANIFEST_NAME,
    OwnerProcess,
    RemotePath,
    parse_place,
)
from elasticrun.checkpoint.storage.storage import Storage, not_ours_error
from elasticrun.errors import CheckpointError

_LIST_SECONDS = 10.0
_LOOK_SECONDS = 0.2


class RemoteStorage(Storage):
    """Objects below a URL, each put whole; the manifest of a checkpoint last."""

    def __init__(
        self,
        objects: Objects,
        *,
        timing: ClaimTiming = OF_CHECKPOINTS,
        is_of_replica: bool = False,
    ) -> None:
        self._objects = objects
        self._claim = StoreClaim(objects, timing=timing)
        self._downloads = Downloads(objects.place) if is_of_replica else None

    @property
    def place(self) -> RemotePath:
        return self._objects.place

    def locate(self, *names: str) -> RemotePath:
        return RemotePath("/".join([self.place.url, *names]))

    def acquire(self, *, timeout: float) -> None:
        try:
            self._claim.acquire(timeout=timeout)
        except OSError as error:
            raise CheckpointError(
                f"{self.place} cannot hold this job's checkpoints: {error}. Nothing "
                "could be saved, so the job would lose its work when it is stopped. "
                "Make sure that the store can be reached and written to, or give the "
                "job another place (ELASTICRUN_CHECKPOINT_DIR)."
            ) from error

    def release(self) -> None:
        self._forget_downloads()
        self._claim.release()

    def find_owner(self) -> OwnerProcess | None:
        return find_claimant(self._objects)

    def folder_of_lost_owner(self) -> str | None:
        return self._claim.folder_of_lost_owner

    def list_names(self) -> list[str]:
        """Return what is there, and not before that shows this process's own claim.

        A job that took an empty or an old list for the truth would begin anew.
        """
        deadline = time.monotonic() + _LIST_SECONDS
        while True:
            names = list(self._objects.list())
            own = self._claim.name
            if own is None or own in names:
                return names
            if time.monotonic() > deadline:
                raise StoreUnreachableError(
                    f"{self.place}: a list of it does not show {own}, which is there."
                )
            time.sleep(_LOOK_SECONDS)

    def read(self, *names: str) -> bytes:
        name = "/".join(names)
        check_small(self.locate(*names), self._objects.find_size(name) or 0)
        return self._objects.get(name)

    def replace(self, name: str, data: bytes) -> None:
        self._objects.put(name, data)

    def begin(self, folder: str) -> None:
        self._forget_downloads()
        self._claim.begin(folder)
        if self._objects.list(folder):
            if not self.is_draft(folder):
                raise not_ours_error(self.locate(folder))
            self.remove(folder)
        self._objects.put(f"{folder}/{DRAFT_NAME}", b"")

    def is_draft(self, folder: str) -> bool:
        return self._objects.find_size(f"{folder}/{DRAFT_NAME}") is not None

    def join(self, folder: str) -> bool:
        del folder
        self._forget_downloads()
        return True  # There are no folders. The commit looks for each file.

    def commit(self, folder: str, manifest: bytes) -> None:
        self._claim.check()
        self._objects.put(f"{folder}/{MANIFEST_NAME}", manifest)
        with suppress(OSError):
            self._objects.remove_object(f"{folder}/{DRAFT_NAME}")

    def remove(self, folder: str) -> None:
        self._objects.put(f"{folder}/{DRAFT_NAME}", b"")
        self._objects.remove_object(f"{folder}/{MANIFEST_NAME}")
        self._objects.remove(folder, last=DRAFT_NAME)

    def measure_folder(self, folder: str) -> int:
        try:
            return sum(self._objects.list(folder).values())
        except OSError:
            return 0

    def write(
        self, folder: str, name: str, write: Callable[[BinaryIO], object]
    ) -> FileRecord:
        return FileRecord(name, *self._objects.put_stream(f"{folder}/{name}", write))

    def copy(self, source: str, folder: str, record: FileRecord) -> FileRecord:
        blocks = self._checked_blocks(source, record)
        return self.write(folder, record.name, lambda file: file.writelines(blocks))

    def verify(self, folder: str, record: FileRecord) -> None:
        # What all replicas load this one will load, too; not the shards of others.
        if self._downloads is not None and state_of_file(record.name) == record.name:
            blocks = partial(self._checked_blocks, folder, record)
            file = self._downloads.open(folder, record, blocks, is_anew=True)
            if file is not None:
                file.close()
                return
        for _ in self._checked_blocks(folder, record):
            pass

    def open_checked(self, folder: str, record: FileRecord) -> BinaryIO:
        blocks = partial(self._checked_blocks, folder, record)
        if self._downloads is not None:
            shared = self._downloads.open(folder, record, blocks)
            if shared is not None:
                return shared
        try:
            with ExitStack() as closed_on_error:
                file = closed_on_error.enter_context(tempfile.TemporaryFile())
                file.writelines(blocks())
                file.seek(0)
                closed_on_error.pop_all()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                error.filename = tempfile.gettempdir()  # Not the store is full.
            raise
        return cast(BinaryIO, file)

    def _forget_downloads(self) -> None:
        """Remove them at a save: by then each replica has loaded what it needs."""
        if self._downloads is not None:
            self._downloads.clear()

    def find_sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        listed = self._objects.list(folder)
        # A list may lag behind; of a single object each store knows the truth.
        return {
            name: listed[name]
            if name in listed
            else self._objects.find_size(f"{folder}/{name}")
            for name in names
        }

    def _checked_blocks(self, folder: str, record: FileRecord) -> Iterator[bytes]:
        """Yield a file's content, and raise at its end if that was not right."""
        place = self.locate(folder, record.name)
        size = crc32 = 0
        try:
            for block in self._objects.blocks(f"{folder}/{record.name}"):
                size += len(block)
                crc32 = zlib.crc32(block, crc32)
                yield block
        except FileNotFoundError as error:
            raise missing_error(place, record) from error
        compare(place, record, size=size, crc32=crc32)


class Downloads:
    """Objects in files of this machine, which its replicas share: each is read once.

    1. Whoever needs an object looks for its file, and checks that.
    2. If there is none, it locks another one; the others wait for that.
    3. It downloads and checks the object in a new file, and gives that its name.

    What a killed job leaves serves the next start, or goes if that needs another
    checkpoint.
    """

    def __init__(self, place: RemotePath) -> None:
        # Hosts may share the directory, but not their locks.
        text = f"{socket.gethostname()} {place}"
        self._prefix = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}."
        self._folder: str | None = None  # Of what was opened last.

    def open(
        self,
        folder: str,
        record: FileRecord,
        blocks: Callable[[], Iterator[bytes]],
        *,
        is_anew: bool = False,
    ) -> BinaryIO | None:
        """Open an object's file for reading; None if this machine cannot keep one.

        Args:
            blocks: Downloads the object piece by piece, and checks it.
            is_anew: Whether to download it though there may be a file.
        """
        stem = f"{self._prefix}{folder}."
        if folder != self._folder:
            self._remove(but=stem)
            self._folder = folder
        wanted = None if is_anew else record
        for _ in range(2):
            try:
                path = _own_directory() / f"{stem}{record.name}"
                return _open_or_download(path, wanted, blocks)
            except StoreUnreachableError:
                raise
            except (OSError, ValueError):
                self._remove()  # There may be room for this one alone.
        return None

    def clear(self) -> None:
        """Remove the files; whoever has one open may read on."""
        if self._folder is not None:
            self._remove()
            self._folder = None

    def _remove(self, *, but: str = "/") -> None:
        with suppress(OSError):
            for path in _own_directory().glob(f"{self._prefix}*"):
                if not path.name.startswith(but):
                    path.unlink(missing_ok=True)


def _own_directory() -> Path:
    """Return a directory in which no other user can put a file or a link."""
    path = Path(tempfile.gettempdir(), f"elasticrun-{os.geteuid()}")
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()  # A link has all bits set.
    if status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} is not a directory of this user alone.")
    return path


def _open_or_download(
    path: Path, wanted: FileRecord | None, blocks: Callable[[], Iterator[bytes]]
) -> BinaryIO:
    # A file may be of another job, which had a checkpoint of this number, too.
    if wanted is not None:
        with suppress(DamagedFileError):
            return durable.open_checked(path, wanted)
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with ExitStack() as stack:
        lock = stack.enter_context(durable.open_shared(Path(f"{path}.lock")))
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Explicitly, since a worker forked meanwhile would keep the lock.
        stack.callback(fcntl.flock, lock, fcntl.LOCK_UN)
        if wanted is not None:
            with suppress(DamagedFileError):  # Another replica has been faster.
                return durable.open_checked(path, wanted)
        with ExitStack() as on_error:
            on_error.callback(temporary.unlink, missing_ok=True)
            file = on_error.enter_context(durable.open_anew(temporary))
            file.writelines(blocks())
            file.seek(0)
            with suppress(FileNotFoundError):  # A save has begun, and removed it.
                durable.move_over(temporary, path)
            on_error.pop_all()
    return file


def storage_at(
    path: str | os.PathLike[str],
    *,
    timing: ClaimTiming = OF_CHECKPOINTS,
    is_of_replica: bool = False,
) -> Storage:
    """Return the storage for a directory's path or an object store's URL.

    Nothing is made, and nothing is asked of a store.

    Args:
        timing: Of the claim on a store; a directory has a lock.
        is_of_replica: Whether others on this machine load the same from a store.
    """
    place = parse_place(path)
    if isinstance(place, Path):
        return LocalStorage(place)
    objects = open_objects(place)
    return RemoteStorage(objects, timing=timing, is_of_replica=is_of_replica)
