"""A version of an `AtomicDirectory` while its ranks write it, until all have."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from elasticrun.checkpoint.draft import Draft
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.recorded import identity_of, measure_file
from elasticrun.checkpoint.manifest import VERSIONS_JOB, Manifest, version
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, text_of
from elasticrun.replicas.gathering import gather, own_rank


class Ranks:
    """Those who use a directory together: all of the process group, or one alone."""

    def __init__(self, *, all_ranks: bool) -> None:
        self._all_ranks = all_ranks

    @property
    def is_first(self) -> bool:
        return not self._all_ranks or own_rank() == 0

    def gather(self, value: Any) -> list[Any]:
        """Return everybody's value, by rank."""
        return gather(value) if self._all_ranks else [value]


class Preparation:
    """A version that does not exist yet; a context manager that commits or abandons it.

    `preparation / "name"` is the path of a file in it, `path` that of the directory.

    Attributes:
        is_open: Whether it is neither committed nor abandoned.
    """

    def __init__(self, store: CheckpointStore, draft: Draft, ranks: Ranks) -> None:
        self._store = store
        self._draft = draft
        self._ranks = ranks
        self.is_open = True

    @property
    def path(self) -> Path:
        """The directory to write into."""
        return Path(self._draft.path)

    def __truediv__(self, name: str) -> Path:
        return self.path / name

    def __fspath__(self) -> str:
        return str(self.path)

    def __enter__(self) -> Preparation:
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
            self._end(text_of(error))

    def commit(self) -> Path:
        """Make the version exist, durably, and remove those that are too old.

        Every file is read once for its checksum, so all must be closed.

        Returns:
            Its directory.

        Raises:
            CheckpointError: Another rank failed, or has files that rank 0 does not see.
            ValueError: It holds something else than plain files, or one that this
                process still has open for writing.
            OSError: It could not be written.
        """
        try:
            names = self._force_to_disk()
        except BaseException as error:
            self._end(text_of(error))
            raise
        problem = self._end(None, names)
        if problem is not None:
            raise CheckpointError(f"{self.path} was not committed: {problem}")
        return self.path

    def abandon(self) -> None:
        """Remove what was written; the other ranks' commits raise."""
        self._end("abandoned")

    def _force_to_disk(self) -> list[str]:
        self._check_open()
        names = sorted(os.listdir(self.path))
        for name in names:
            durable.fsync_file(self.path / name)
        unfinished = _find_open_for_writing(self.path, names)
        if unfinished is not None:
            raise ValueError(
                f"{self.path / unfinished} is still open for writing in this process. "
                "What is not flushed yet would be missing, and what is written later "
                "would change the version. Close it before the version is committed."
            )
        return names

    def _check_open(self) -> None:
        if not self.is_open:
            raise ValueError(f"{self.path} has been committed or abandoned already")

    def _end(self, error: str | None, names: list[str] | None = None) -> str | None:
        """Commit if no rank has an error; return the first error, None for none."""
        self._check_open()
        self.is_open = False
        try:
            # All ranks come here, also those that have failed: nobody waits for one.
            reports = self._ranks.gather([error, names or []])
            errors = [
                f"rank {rank}: {text}"
                for rank, (text, _) in enumerate(reports)
                if text is not None
            ]
            outcome = errors[0] if errors else None
            if self._ranks.is_first:
                if outcome is None:
                    outcome = self._try_to_commit(
                        sorted({name for _, found in reports for name in found}),
                        num_ranks=len(reports),
                    )
                if outcome is not None:
                    self._draft.abandon()
            told: str | None = self._ranks.gather(outcome)[0]
            return told
        finally:
            self._store.release()

    def _try_to_commit(self, names: list[str], *, num_ranks: int) -> str | None:
        try:
            records = [measure_file(self.path / name) for name in names]
            self._draft.commit(
                Manifest(
                    job=VERSIONS_JOB,
                    number=self._draft.number,
                    generation=0,
                    world_size=num_ranks,
                    position={},
                    time=time.time(),
                    torch_version=str(torch.__version__),
                    elasticrun_version=version(),
                    files=tuple(records),
                )
            )
        except (OSError, ValueError, CheckpointError) as error:
            return text_of(error)
        self._store.prune()
        return None


def _find_open_for_writing(directory: Path, names: list[str]) -> str | None:
    """Return the first of these files that this process may still write into.

    Raises:
        OSError: A file is not there.
    """
    being_written = set()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # It has just been closed.
            if fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY:
                being_written.add(identity_of(os.fstat(descriptor)))
    for name in names:
        status = os.stat(directory / name, follow_symlinks=False)
        if identity_of(status) in being_written:
            return name
    return None
