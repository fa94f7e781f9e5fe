"""Durable files and directories for any program: `atomic_save`, `AtomicDirectory`.

They work without a job, a loader or a launcher. A file is written under another name,
forced to the disk, and renamed. A version is a checkpoint of a job of its own
(`VERSIONS_JOB`): a draft, in which the program writes its files, until its manifest,
with their sizes and checksums, is committed.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from elasticrun.checkpoint.draft import (
    Draft,
    is_uncommitted,
    list_numbers,
    read_checkpoint,
)
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import (
    DamagedFileError,
    measure_file,
)
from elasticrun.checkpoint.files.replacing import replace_file
from elasticrun.checkpoint.manifest import (
    VERSIONS_JOB,
    Manifest,
    check_job,
    version,
)
from elasticrun.checkpoint.retention import parse_keep
from elasticrun.checkpoint.storage.place import DRAFT_NAME, local_path
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, text_of


def atomic_save(
    obj: object, f: str | os.PathLike[str], *more: Any, **options: Any
) -> None:
    """Save like `torch.save`, so that a crash leaves the old file or the new, whole.

    The file is on the disk, with its name, when this returns. Saving needs space for
    both. Several processes may save to one path; the last one wins.

    Args:
        f: A path, not an open file: only a name can be replaced at once.
        more: With `options`, those of `torch.save`.

    Raises:
        TypeError: `f` is an open file.
        ValueError: `f` is a directory, a device or an object store's URL.
        OSError: It could not be written; the old file is as it was.
    """
    if not isinstance(f, (str, os.PathLike)):
        raise TypeError(
            f"atomic_save was given a {type(f).__name__}. An open file cannot replace "
            "another one at once. Give the path."
        )
    path = local_path(f, what="atomic_save")
    replace_file(path, lambda file: torch.save(obj, file, *more, **options))


class NewVersion:
    """A version that does not exist yet; a context manager that commits or abandons it.

    `preparation / "name"` is the path of a file in it, `path` that of the directory.

    Attributes:
        is_open: Whether it is neither committed nor abandoned.
    """

    def __init__(self, store: CheckpointStore, draft: Draft) -> None:
        self._store = store
        self._draft = draft
        self.is_open = True

    @property
    def path(self) -> Path:
        """The directory to write into."""
        return Path(self._draft.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __fspath__(self) -> str:
        return str(self.path)

    def __enter__(self) -> NewVersion:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if not self.is_open:
            return
        if error is None:
            self.commit()
        else:
            self.abandon()

    def commit(self) -> Path:
        """Make the version exist, durably, and remove those that are too old.

        Every file is read once for its checksum, so all must be closed.

        Returns:
            Its directory.
        """
        self._check_open()
        try:
            names = sorted(set(os.listdir(self.path)) - {DRAFT_NAME})
            for name in names:
                durable.fsync_file(self.path / name)
            self._draft.commit(
                Manifest(
                    job=VERSIONS_JOB,
                    number=self._draft.number,
                    generation=0,
                    world_size=1,
                    position={},
                    time=time.time(),
                    torch_version=str(torch.__version__),
                    elasticrun_version=version(),
                    files=tuple(measure_file(self.path / name) for name in names),
                )
            )
        except BaseException:
            self.abandon()
            raise
        try:
            self._store.prune()
        finally:
            self._close()
        return self.path

    def abandon(self) -> None:
        """Remove what was written."""
        self._check_open()
        try:
            self._draft.abandon()
        finally:
            self._close()

    def _close(self) -> None:
        self.is_open = False
        self._store.release()

    def _check_open(self) -> None:
        if not self.is_open:
            raise ValueError(f"{self.path} has been committed or abandoned already")


class AtomicDirectory:
    """A directory of versions, each of which is whole or does not exist.

        exports = AtomicDirectory("exports", keep=3)
        with exports.prepare() as version:
            torch.save(net.state_dict(), version / "model.pt")
        newest = exports.latest()

    Close each file before the block ends: what is written later damages the version.
    One process prepares and commits; others may write files into the version meanwhile,
    on a file system that all see.

    Args:
        directory: Where versions are kept. It is made when the first one is prepared.
        keep: How many good versions stay; the newest is never removed.

    Raises:
        ValueError: `directory` is an object store's URL, or `keep` no whole number
            from 1 up.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int = 3) -> None:
        directory = local_path(directory, what="AtomicDirectory")
        keep = parse_keep(keep, setting="AtomicDirectory's keep")
        self._store = CheckpointStore(directory, job=VERSIONS_JOB, keep=keep)
        self._prepared: NewVersion | None = None

    @property
    def directory(self) -> Path:
        """Where versions are kept."""
        return Path(self._store.place)

    def prepare(self) -> NewVersion:
        """Begin a version: a directory to write plain files into, then to commit.

        Raises:
            CheckpointError: One is open already, here or in another process; or the
                directory cannot be written, or is a job's.
        """
        if self._prepared is not None and self._prepared.is_open:
            raise CheckpointError(
                f"{self._prepared.path} has been prepared and is still open. Versions "
                "are committed one after another. Commit or abandon that one first."
            )
        try:
            self._store.acquire()
            self._refuse_job()
            self._store.remove_uncommitted()
            draft = self._store.begin(self._store.next_number())
        except BaseException as error:
            self._store.release()
            if isinstance(error, OSError):
                raise CheckpointError(text_of(error)) from error
            raise
        self._prepared = NewVersion(self._store, draft)
        return self._prepared

    def _refuse_job(self) -> None:
        storage = self._store.storage
        for number in list_numbers(storage):
            with contextlib.suppress(FileNotFoundError, DamagedFileError):
                found = read_checkpoint(storage, number)
                check_job(found.manifest, VERSIONS_JOB, source=str(found.path))

    def latest(self) -> Path | None:
        """Return the newest version whose every byte is right, None without any.

        A damaged one is named in a CheckpointWarning. What is returned may be removed
        once newer ones are committed, `keep` of them at the earliest.

        Raises:
            CheckpointError: There are versions, but none is whole.
            OSError: It cannot be told.
        """
        if not self.directory.is_dir():
            return None
        while True:
            before, problem = self._list(), None
            try:
                newest = self._store.find_newest()
            except CheckpointError as error:
                newest, problem = None, error
            if newest is not None:
                return self.directory / newest.path.name
            # Another process may have committed a version and removed what was there.
            if self._list() != before:
                continue
            if problem is not None:
                raise problem
            return None

    def _list(self) -> list[tuple[int, bool]]:
        """Return what there is and whether it is committed, the oldest first.

        A newer one is committed before an older one is removed, so in this order at
        least one of them is seen to be.
        """
        storage = self._store.storage
        numbers = reversed(list_numbers(storage))
        return [(number, not is_uncommitted(storage, number)) for number in numbers]
