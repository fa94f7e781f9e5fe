"""The checkpoints in one directory: begun, committed, found again and removed."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import stat
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from elasticrun.checkpoint import files
from elasticrun.checkpoint.counter import read_counter, write_counter
from elasticrun.checkpoint.draft import (
    MUST_BE_SHARED,
    Checkpoint,
    Draft,
    remove_checkpoint,
)
from elasticrun.checkpoint.files import DamagedFileError
from elasticrun.checkpoint.keeping import Keeping
from elasticrun.checkpoint.listing import (
    checkpoint_path,
    has_right_sizes,
    is_torn,
    list_paths,
    number_of,
    read_checkpoint,
)
from elasticrun.checkpoint.lock import DirectoryLock
from elasticrun.checkpoint.manifest import MANIFEST_NAME, check_job
from elasticrun.errors import CheckpointError, CheckpointWarning

logger = logging.getLogger(__name__)


class CheckpointStore:
    """The checkpoints of one job in one directory.

    Rank 0 acquires the directory, finds, begins, commits and prunes; the other ranks
    only `open` what it found and `join` what it has begun. Who tells whom is the
    caller's matter.

    Args:
        directory: Where they are kept; all replicas must see it.
        job: The name that keeps another job's checkpoints apart.
        keep: How many good checkpoints `prune` leaves, at least 1.
        keep_every: Checkpoints whose numbers divide by it stay for ever.
        keep_best: A value's name, and "max" or "min": the best one stays.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        job: str,
        keep: int = 3,
        keep_every: int | None = None,
        keep_best: tuple[str, str] | None = None,
    ) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.job = job
        self.keeping = Keeping(keep, keep_every, keep_best)
        self._values: dict[int, float | None] = {}
        self._counter = self.directory / "generation"
        self._lock = DirectoryLock(self.directory)
        self._bad_numbers: set[int] = set()

    def acquire(self, *, timeout: float = 5.0) -> None:
        """Make the directory and lock it against a second live job; rank 0 only.

        Args:
            timeout: Seconds to wait for an owner, which may be about to exit.

        Raises:
            CheckpointError: Another live job has it, or it cannot be written.
        """
        self._lock.acquire(timeout=timeout)
        mode = self.directory.stat().st_mode
        if mode & stat.S_IWOTH:
            warnings.warn(
                f"{self.directory} can be written to by everybody (mode "
                f"{stat.S_IMODE(mode):o}). Who can change a checkpoint decides what "
                f"the job computes. Take that right away: chmod o-w {self.directory}",
                CheckpointWarning,
                stacklevel=2,
            )

    def release(self) -> None:
        """Let another job have the directory; it may be free already."""
        self._lock.release()

    def next_generation(self) -> int:
        """Return a number that no earlier generation got, 0 first; durable.

        Raises:
            OSError: It could not be written.
        """
        known = [read_counter(self._counter), *self._committed_generations()]
        generation = 1 + max(known)
        write_counter(self._counter, generation)
        return generation

    def sweep(self) -> None:
        """Remove what a killed job had begun and never committed."""
        for path in self._paths():
            if is_torn(path):
                logger.warning("removing %s, which was never committed", path)
                _remove_or_warn(path, None)

    def find_newest(self) -> Checkpoint | None:
        """Return the newest checkpoint whose every byte is right, None without any.

        A damaged one is skipped with a CheckpointWarning, and stays on the disk until
        it is older than those that are kept.

        Raises:
            CheckpointError: There are checkpoints, but none is whole; or the newest
                is another job's or has another format.
        """
        damaged: dict[str, str] = {}
        for path in self._paths():
            try:
                checkpoint = read_checkpoint(path)
                check_job(checkpoint.manifest, self.job, source=str(path))
                for record in checkpoint.manifest.files:
                    files.open_checked(path / record.name, record).close()
            except FileNotFoundError:  # no manifest: it does not exist
                continue
            except (DamagedFileError, OSError) as error:
                if is_torn(path):  # It was removed while it was read.
                    continue
                damaged[path.name] = str(error)
                self._bad_numbers.add(number_of(path))
            else:
                _warn_damaged(damaged, found=path.name)
                return checkpoint
        if damaged:
            raise self._none_is_whole(damaged)
        return None

    def open(self, number: int, digest: str) -> Checkpoint:
        """Open the checkpoint that rank 0 found, without reading its files.

        Raises:
            CheckpointError: This replica sees no such checkpoint, or another one.
        """
        path = self._path(number)
        try:
            checkpoint = read_checkpoint(path)
            found = f"has the digest {checkpoint.manifest.digest}"
        except OSError as error:
            checkpoint, found = None, f"cannot be read ({error})"
        if checkpoint is None or checkpoint.manifest.digest != digest:
            raise CheckpointError(
                f"{path} {found} on host {socket.gethostname()}, but rank 0 resumes "
                f"from one with the digest {digest}. {MUST_BE_SHARED}"
            )
        return checkpoint

    def check_shared(self, generation: int) -> None:
        """Check that this replica sees the directory in which rank 0 has just begun.

        Raises:
            CheckpointError: It does not, so it could neither load nor save there.
        """
        found = read_counter(self._counter)
        if found != generation:
            raise CheckpointError(
                f"{self.directory} does not show generation {generation} on host "
                f"{socket.gethostname()}, which rank 0 has just begun there (it shows "
                f"{found}). {MUST_BE_SHARED}"
            )

    def next_number(self) -> int:
        """Return a number above all on the disk, whatever their condition; first 1."""
        return 1 + max(map(number_of, self._paths()), default=0)

    def begin(self, number: int) -> Draft:
        """Create the draft that all ranks write into; rank 0 only.

        Raises:
            ValueError: A committed checkpoint has the number.
            OSError: It could not be made.
        """
        path = self._path(number)
        if files.find_size(path / MANIFEST_NAME) is not None:
            raise ValueError(f"{path} is committed; begin(next_number()) instead")
        if files.find_size(path) is not None:
            remove_checkpoint(path)
        files.make_directory(path)
        return Draft(path, number)

    def join(self, number: int) -> Draft:
        """Return the draft that rank 0 has begun.

        Raises:
            CheckpointError: This replica does not see it.
        """
        path = self._path(number)
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is not there on host {socket.gethostname()}, but rank 0 has "
                f"begun it. {MUST_BE_SHARED}"
            )
        return Draft(path, number)

    def prune(self, *, warn: Callable[[str], object] | None = None) -> None:
        """Remove what is older than the newest good ones and is not to stay.

        Good is here: not found damaged by `find_newest`, and each file has its size.
        To read every byte of the older ones after each save would cost too much.

        Args:
            warn: Told what could not be removed, in place of a CheckpointWarning.
        """
        paths = self._paths()
        stay = self.keeping.choose(
            map(number_of, paths), is_good=self._is_good, value_of=self._value_of
        )
        for path in paths:
            if number_of(path) not in stay:
                _remove_or_warn(path, warn)

    def _path(self, number: int) -> Path:
        return checkpoint_path(self.directory, number)

    def _paths(self) -> list[Path]:
        return list_paths(self.directory)

    def _none_is_whole(self, damaged: dict[str, str]) -> CheckpointError:
        reasons = "".join(f"  {name}: {text}\n" for name, text in damaged.items())
        return CheckpointError(
            f"none of the checkpoints in {self.directory} is whole:\n{reasons}"
            "To start at the beginning would give up the training that they stand "
            "for. Bring one of them back from a copy, or start anew: remove them, or "
            "give the job another directory (ELASTICRUN_CHECKPOINT_DIR)."
        )

    def _is_good(self, number: int) -> bool:
        return number not in self._bad_numbers and has_right_sizes(self._path(number))

    def _value_of(self, number: int) -> float | None:
        """Return what the best one is told by; a committed manifest does not change."""
        if self.keeping.best is None:
            return None
        if number not in self._values:
            try:
                values = read_checkpoint(self._path(number)).manifest.values
            except (CheckpointError, OSError):
                values = {}
            self._values[number] = values.get(self.keeping.best[0])
        return self._values[number]

    def _committed_generations(self) -> Iterator[int]:
        for path in self._paths():
            with contextlib.suppress(CheckpointError, OSError):
                yield read_checkpoint(path).manifest.generation


def _warn_damaged(damaged: dict[str, str], *, found: str) -> None:
    for name, reason in damaged.items():
        warnings.warn(
            f"{name} is skipped: {reason} The job goes on from {found}.",
            CheckpointWarning,
            stacklevel=3,
        )


def _remove_or_warn(path: Path, warn: Callable[[str], object] | None) -> None:
    try:
        remove_checkpoint(path)
    except OSError as error:
        text = f"{path} could not be removed: {error}. It takes space until it can be."
        if warn is not None:
            warn(text)
        else:
            warnings.warn(text, CheckpointWarning, stacklevel=3)
