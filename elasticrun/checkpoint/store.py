"""The checkpoints in one directory: begun, committed, found again and removed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from elasticrun.checkpoint.draft import (
    MUST_BE_SHARED,
    Checkpoint,
    Draft,
    checkpoint_name,
    find_manifest,
    is_own,
    is_uncommitted,
    list_numbers,
    number_of,
    read_checkpoint,
    read_counter,
    write_counter,
)
from elasticrun.checkpoint.files.durable import DamagedFileError, StoreUnreachableError
from elasticrun.checkpoint.manifest import Manifest, check_job
from elasticrun.checkpoint.retention import newest_to_keep
from elasticrun.checkpoint.storage.place import Place
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.errors import CheckpointError, CheckpointWarning, warn_at_program
from elasticrun.logger import Logger

logger = Logger(__name__)

T = TypeVar("T")

LAG_SECONDS = 5.0
_LOOK_SECONDS = 0.1
_COUNTER = "generation"
_LOST_POWER = "The machine went down before it was on the disk."


class CheckpointStore:
    """The checkpoints of one job in one directory, or at one URL.

    Rank 0 acquires the directory, finds, begins, commits and prunes; the other ranks
    only `open` what it found and `join` what it has begun. Who tells whom is the
    caller's matter.

    Args:
        job: The name that keeps another job's checkpoints apart.
        keep: How many good checkpoints `prune` leaves, at least 1.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, job: str, keep: int = 3
    ) -> None:
        self.storage = storage_at(directory, is_of_replica=True)
        self.job = job
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint must be kept")
        self.keep = keep
        self._bad_numbers: set[int] = set()  # Of those that were found damaged.

    @property
    def place(self) -> Place:
        return self.storage.place

    def acquire(self, *, timeout: float = 5.0) -> None:
        """Keep a second live job out, as `Storage.acquire` does; rank 0 only."""
        self.storage.acquire(timeout=timeout)

    def release(self) -> None:
        """Let another job have the directory; it may be free already."""
        self.storage.release()

    def next_generation(self) -> int:
        """Return a number that no earlier generation got, 0 first; durable."""
        counted = read_counter(self.storage, _COUNTER)
        generation = 1 + max([counted, *self._committed_generations()])
        write_counter(self.storage, _COUNTER, generation)
        return generation

    def remove_uncommitted(self) -> None:
        """Remove what a killed job had begun and never committed.

        What is only named like a checkpoint is left alone, with a CheckpointWarning.
        """
        left_behind = number_of(self.storage.folder_of_lost_owner() or "")
        others = []
        for number in list_numbers(self.storage):
            path = self._path(number)
            if number == left_behind or not is_uncommitted(self.storage, number):
                continue
            if self.storage.is_draft(path.name):
                logger.warning("removing %s, which was never committed", path)
                self._remove_or_warn(number, _warn)
            else:
                others.append(str(path))
        if others:
            _warn(
                f"{', '.join(sorted(others))}: named like a checkpoint, but elasticrun "
                "did not make it, or its manifest was removed. It is left alone. "
                "Rename or move it."
            )

    def find_newest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose every byte is right, None without any.

        A damaged one is skipped with a CheckpointWarning, and stays on the disk until
        it is older than those that are kept.
        """
        damaged: dict[str, str] = {}
        for number in list_numbers(self.storage):
            name = checkpoint_name(number)
            try:
                checkpoint = read_checkpoint(self.storage, number)
                check_job(checkpoint.manifest, self.job, source=str(checkpoint.path))
                for record in checkpoint.manifest.files:
                    self.storage.verify(name, record)
            except FileNotFoundError:  # no manifest: it does not exist
                continue
            except StoreUnreachableError:  # To take an older one would lose work.
                raise
            except DamagedFileError as error:
                if is_uncommitted(
                    self.storage, number
                ):  # It was removed while it was read.
                    continue
                self._bad_numbers.add(number)
                is_unforced = self.storage.is_unforced(name)
                damaged[name] = f"{error} {_LOST_POWER}" if is_unforced else str(error)
            else:
                _warn_damaged(damaged, found=name)
                return checkpoint
        if damaged:
            raise self._none_is_whole(damaged)
        return None

    def open(self, number: int, digest: str) -> Checkpoint:
        """Open the checkpoint that rank 0 found or made, without reading its files."""
        path = self._path(number)
        try:
            checkpoint = read_checkpoint(self.storage, number)
            found = f"has the digest {checkpoint.manifest.digest}"
        except OSError as error:
            checkpoint, found = None, f"cannot be read ({error})"
        if checkpoint is None or checkpoint.manifest.digest != digest:
            raise CheckpointError(
                f"{path} {found} on host {socket.gethostname()}, but rank 0 has one "
                f"with the digest {digest}. {MUST_BE_SHARED}"
            )
        return checkpoint

    def committed(self, number: int, *, digest: str, time: float) -> Checkpoint:
        """Return the checkpoint that rank 0 has just committed.

        Its manifest, which grows with the number of replicas, is read when something
        asks for it: most replicas never do, and this one may be cut off from the
        storage just now.
        """

        def read() -> Manifest:
            return wait_until_seen(lambda: self.open(number, digest)).manifest

        return Checkpoint(self._path(number), number, time, read, self.storage)

    def check_shared(self, generation: int) -> None:
        """Check that this replica sees the directory in which rank 0 has just begun."""
        try:
            found = read_counter(self.storage, _COUNTER)
        except StoreUnreachableError as error:
            raise CheckpointError(
                f"{error}, on host {socket.gethostname()}, though rank 0 could read it."
            ) from error
        if found != generation:
            raise CheckpointError(
                f"{self.place} does not show generation {generation} on host "
                f"{socket.gethostname()}, which rank 0 has just begun there (it shows "
                f"{found}). {MUST_BE_SHARED}"
            )

    def next_number(self) -> int:
        """Return a number above all that is named like a checkpoint; first 1.

        Also above that of a checkpoint which may still be being written: by a job whose
        claim on an object store was taken over.
        """
        left = number_of(self.storage.folder_of_lost_owner() or "")
        return 1 + max([left or 0, *list_numbers(self.storage)])

    def newest_number(self) -> int:
        """Return the highest number of a checkpoint, whatever its condition, or 0."""
        numbers = list_numbers(self.storage)
        return next((n for n in numbers if is_own(self.storage, n)), 0)

    def begin(self, number: int, *, is_forced: bool = True) -> Draft:
        """Create the draft that all ranks write into; rank 0 only.

        Args:
            is_forced: Whether the checkpoint is to survive a power cut as soon as it is
                committed; else as soon as `force` has returned.
        """
        name = checkpoint_name(number)
        if find_manifest(self.storage, number) is not None:
            raise ValueError(
                f"{self._path(number)} is committed; begin(next_number()) instead"
            )
        storage = self.storage if is_forced else self.storage.unforced()
        storage.begin(name)
        return Draft(storage, name, number)

    def join(self, number: int, *, is_forced: bool = True) -> Draft:
        """Return the draft that rank 0 has begun."""
        name = checkpoint_name(number)
        if not self.storage.join(name):
            raise CheckpointError(
                f"{self._path(number)} is not there on host {socket.gethostname()}, "
                f"but rank 0 has begun it. {MUST_BE_SHARED}"
            )
        storage = self.storage if is_forced else self.storage.unforced()
        return Draft(storage, name, number)

    def is_unforced(self, checkpoint: Checkpoint) -> bool:
        """Return whether it was committed, and not yet forced to the disk."""
        return self.storage.is_unforced(checkpoint.path.name)

    def force(self, checkpoint: Checkpoint) -> None:
        """Force a checkpoint to the disk: no power cut takes it any more."""
        self.storage.force(checkpoint.path.name, checkpoint.names())

    def prune(self, *, warn: Callable[[str], object] | None = None) -> None:
        """Remove what is older than the newest good ones.

        Good is here: not found damaged by `find_newest`, and each file has its size.
        To read every byte of the older ones after each save would cost too much.

        Args:
            warn: Told what could not be removed, in place of a CheckpointWarning.
        """
        warn = warn or _warn
        try:
            numbers = list_numbers(self.storage)
        except StoreUnreachableError as error:
            warn(f"old checkpoints stay until the next save: {error}.")
            return
        stay = newest_to_keep(numbers, self.keep, is_good=self._is_good)
        for number in numbers:
            if number not in stay and is_own(self.storage, number):
                self._remove_or_warn(number, warn)

    def _path(self, number: int) -> Place:
        return self.storage.locate(checkpoint_name(number))

    def _remove_or_warn(self, number: int, warn: Callable[[str], object]) -> None:
        try:
            self.storage.remove(checkpoint_name(number))
        except OSError as error:
            warn(
                f"{self._path(number)} could not be removed: {error}. It takes space "
                "until it can be."
            )

    def _none_is_whole(self, damaged: dict[str, str]) -> CheckpointError:
        reasons = "".join(f"  {name}: {text}\n" for name, text in damaged.items())
        return CheckpointError(
            f"no checkpoint in {self.place} is good:\n{reasons}Starting at the "
            "beginning would lose their training. Restore one of them from a copy, or "
            "start anew: remove them, or give the job another directory "
            "(ELASTICRUN_CHECKPOINT_DIR)."
        )

    def _is_good(self, number: int) -> bool:
        if number in self._bad_numbers:
            return False
        try:
            read_checkpoint(self.storage, number).check_sizes()
        except (CheckpointError, OSError):
            return False
        return True

    def _committed_generations(self) -> Iterator[int]:
        for number in list_numbers(self.storage):
            try:
                yield read_checkpoint(self.storage, number).manifest.generation
            except StoreUnreachableError:  # A number could come twice.
                raise
            except (CheckpointError, OSError):
                continue


def wait_until_seen(look: Callable[[], T]) -> T:
    """Return what `look` returns of something that rank 0 has just written.

    A file system may show late what another machine has written there, so it is given
    some seconds.
    """
    deadline = time.monotonic() + LAG_SECONDS
    while True:
        is_last = time.monotonic() >= deadline
        try:
            return look()
        except CheckpointError:
            if is_last:
                raise
        time.sleep(_LOOK_SECONDS)


def _warn_damaged(damaged: dict[str, str], *, found: str) -> None:
    for name, reason in damaged.items():
        _warn(f"{name} is skipped: {reason} The job resumes from {found}.")


def _warn(text: str) -> None:
    warn_at_program(text, CheckpointWarning)
