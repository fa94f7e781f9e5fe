"""Durable files and directories for any program: `atomic_save`, `AtomicDirectory`.

They stand on what commits checkpoints, and need nothing else of elasticrun: no job, no
loader, no launcher.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from elasticrun.checkpoint.files.recorded import DamagedFileError
from elasticrun.checkpoint.files.replacing import replace_file
from elasticrun.checkpoint.keeping import parse_keep
from elasticrun.checkpoint.listing import (
    checkpoint_name,
    is_torn,
    list_numbers,
    read_checkpoint,
)
from elasticrun.checkpoint.manifest import VERSIONS_JOB
from elasticrun.checkpoint.storage.lock import LockedError
from elasticrun.checkpoint.storage.place import local_path
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.checkpoint.versions import Preparation, Ranks
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
            f"atomic_save was given a {type(f).__name__}. What is written into an "
            "open file cannot replace another one at once. Give it the path."
        )
    path = local_path(f, what="atomic_save")
    replace_file(path, lambda file: torch.save(obj, file, *more, **options))


class AtomicDirectory:
    """A directory of versions, each of which is whole or does not exist.

        exports = AtomicDirectory("exports", keep=3)
        with exports.prepare() as version:
            torch.save(net.state_dict(), version / "model.pt")
        newest = exports.latest()

    Close each file before the block ends: one that this process still has open for
    writing is refused.

    With a process group its methods are collective: all ranks prepare, write their
    files, and leave the block together; rank 0 commits when all have. If one of them
    fails, nothing is committed and all raise.

    Args:
        directory: Where versions are kept; all ranks must see it. It is made when the
            first one is prepared.
        keep: How many good versions stay; the newest is never removed.
        all_ranks: False for one that uses it alone, though it has a process group.

    Raises:
        ValueError: `directory` is an object store's URL, or `keep` no whole number
            from 1 up.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        all_ranks: bool = True,
    ) -> None:
        directory = local_path(directory, what="AtomicDirectory")
        keep = parse_keep(keep, setting="AtomicDirectory's keep")
        self._store = CheckpointStore(directory, job=VERSIONS_JOB, keep=keep)
        self._ranks = Ranks(all_ranks=all_ranks)
        self._prepared: Preparation | None = None

    @property
    def directory(self) -> Path:
        """Where versions are kept."""
        return Path(self._store.place)

    def prepare(self) -> Preparation:
        """Begin a version: a directory to write plain files into, then to commit.

        Raises:
            CheckpointError: One is open already, here or in another process; or the
                directory cannot be written, is a job's, or is not the same for all
                ranks.
        """
        own: dict[str, Any] = {"number": 0, "error": self._why_not_now()}
        if self._ranks.is_first and own["error"] is None:
            own = self._begin()
        first = self._ranks.gather(own)[0]  # What rank 0 has begun, or why not.
        error, draft = first["error"] or own["error"], None
        if error is None:
            try:
                draft = self._store.join(first["number"], token=first["token"])
            except CheckpointError as problem:
                error = text_of(problem)
        errors = [text for text in self._ranks.gather(error) if text is not None]
        if errors or draft is None:
            if own["error"] is None:  # Else the lock is not this call's.
                self._store.release()
            raise CheckpointError(errors[0])
        self._prepared = Preparation(self._store, draft, self._ranks)
        return self._prepared

    def _why_not_now(self) -> str | None:
        if self._prepared is None or not self._prepared.is_open:
            return None
        return (
            f"{self._prepared.path} has been prepared and is still open. Versions are "
            "committed one after another. Commit or abandon that one first."
        )

    def _begin(self) -> dict[str, Any]:
        """Take the directory and begin a version, or say why that failed."""
        try:
            self._store.acquire()
            told = self._say_of_job()
            if told is not None:
                raise CheckpointError(told)
            self._store.sweep()
            draft = self._store.begin(self._store.next_number())
            return {"number": draft.number, "token": draft.token, "error": None}
        except BaseException as error:
            self._store.release()
            if isinstance(error, (OSError, CheckpointError)):
                return {"number": 0, "error": self._say(error)}
            raise

    def _say(self, error: Exception) -> str:
        """Return what went wrong in words of versions, which no job has made."""
        cause = error.__cause__
        if isinstance(cause, LockedError):
            return (
                f"{self.directory} is in use by {cause}. Versions are prepared "
                "one after another, and none where a job runs. Wait for its end, or "
                "use another directory."
            )
        if isinstance(cause, OSError):
            return (
                f"{self.directory} cannot hold versions: {cause}. Make it writable, or "
                "use another directory."
            )
        if isinstance(cause, DamagedFileError):
            return (
                f"none of the versions in {self.directory} is whole:\n{cause}\n"
                "Bring one of them back from a copy, or remove them and make another."
            )
        return text_of(error)

    def _say_of_job(self) -> str | None:
        """Return what is wrong where a job keeps its checkpoints, None elsewhere."""
        storage = self._store.storage
        for number in list_numbers(storage):
            try:
                found = read_checkpoint(storage, number)
            except (FileNotFoundError, DamagedFileError):
                continue
            if found.manifest.job != VERSIONS_JOB:
                return (
                    f"{found.path} is a checkpoint of the job {found.manifest.job!r}. "
                    "Versions beside a job's checkpoints would push them out, and the "
                    "job could not resume. Give the versions a directory of their own."
                )
        return None

    def latest(self) -> Path | None:
        """Return the newest version whose every byte is right, None without any.

        A damaged one is named in a CheckpointWarning. What is returned may be removed
        once newer ones are committed, `keep` of them at the earliest.

        Raises:
            CheckpointError: There are versions, but none is whole; or the ranks see
                different ones.
        """
        message: list[Any] = [None, None, None]
        if self._ranks.is_first:
            message = self._find()
        number, digest, error = self._ranks.gather(message)[0]
        if error is not None:
            raise CheckpointError(error)
        if number is None:
            return None
        if self._ranks.is_first:
            return self.directory / checkpoint_name(number)
        return Path(self._store.open(number, digest).path)

    def _find(self) -> list[Any]:
        if not self.directory.is_dir():
            return [None, None, None]
        while True:
            before, error = self._list(), None
            try:
                newest = self._store.find_newest()
            except OSError as problem:  # Nobody can tell; the other ranks wait.
                return [None, None, text_of(problem)]
            except CheckpointError as problem:
                newest, error = None, self._say_of_job() or self._say(problem)
            if newest is not None:
                return [newest.number, newest.manifest.digest, None]
            # Another process may have committed a version and removed what was there.
            if self._list() == before:
                return [None, None, error]

    def _list(self) -> list[tuple[int, bool]]:
        """Return what there is and whether it is committed, the oldest first.

        A newer one is committed before an older one is removed, so in this order at
        least one of them is seen to be.
        """
        storage = self._store.storage
        numbers = reversed(list_numbers(storage))
        return [(number, not is_torn(storage, number)) for number in numbers]
