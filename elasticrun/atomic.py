"""Durable files and directories for any program: `atomic_save`, `AtomicDirectory`.

They stand on what commits checkpoints, and need nothing else of elasticrun: no job, no
loader, no launcher.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from elasticrun.checkpoint import files
from elasticrun.checkpoint.draft import Draft
from elasticrun.checkpoint.files import FileRecord
from elasticrun.checkpoint.listing import checkpoint_name, is_torn, list_numbers
from elasticrun.checkpoint.manifest import Manifest
from elasticrun.checkpoint.place import check_is_local
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.control.gathering import gather
from elasticrun.errors import CheckpointError
from elasticrun.version import version

_JOB = "AtomicDirectory"


def atomic_save(obj: object, path: str | os.PathLike[str], **options: Any) -> None:
    """Save like `torch.save`, so that a crash leaves the old file or the new, whole.

    The file is on the disk, with its name, when this returns. Saving needs space for
    both. Several processes may save to one path; the last one wins.

    Args:
        path: Not an open file: only a name can be replaced at once.
        options: Those of `torch.save`.

    Raises:
        TypeError: `path` is an open file.
        ValueError: `path` is a directory, a device or a URL.
        OSError: It could not be written; the old file is as it was.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise TypeError(
            f"atomic_save was given a {type(path).__name__}. What is written into an "
            "open file cannot replace another one at once. Give it the path."
        )
    check_is_local(path, what="atomic_save")
    files.replace_file(Path(path), lambda file: torch.save(obj, file, **options))


class AtomicDirectory:
    """A directory of versions, each of which is whole or does not exist.

        exports = AtomicDirectory("exports", keep=3)
        with exports.prepare() as version:
            torch.save(net.state_dict(), version / "model.pt")
        newest = exports.latest()

    With a process group its methods are collective: all ranks prepare, write their
    files, and leave the block together; rank 0 commits when all have. If one of them
    fails, nothing is committed and all raise.

    Args:
        directory: Where versions are kept; all ranks must see it. It is made when the
            first one is prepared.
        keep: How many good versions stay; the newest is never removed.
        all_ranks: False for one that uses it alone, though it has a process group.

    Raises:
        ValueError: `directory` is a URL.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        keep: int = 3,
        all_ranks: bool = True,
    ) -> None:
        check_is_local(directory, what="AtomicDirectory")
        self._store = CheckpointStore(directory, job=_JOB, keep=keep)
        self._ranks = _Ranks(all_ranks=all_ranks)

    @property
    def directory(self) -> Path:
        """Where versions are kept."""
        return Path(self._store.directory)

    def prepare(self) -> Preparation:
        """Begin a version: a directory to write plain files into, then to commit.

        Raises:
            CheckpointError: Another process prepares one here; or the directory cannot
                be written, or is not the same for all ranks.
        """
        message: dict[str, Any] = {"number": 0, "error": ""}
        if self._ranks.is_first:
            message = self._begin()
        message = self._ranks.gather(message)[0]
        error, draft = message["error"], None
        if not error:
            try:
                draft = self._store.join(message["number"])
            except CheckpointError as problem:
                error = str(problem)
        errors = [text for text in self._ranks.gather(error) if text]
        if errors or draft is None:
            self._store.release()
            raise CheckpointError(errors[0])
        return Preparation(self._store, draft, self._ranks)

    def _begin(self) -> dict[str, Any]:
        try:
            self._store.acquire()
            self._store.sweep()
            draft = self._store.begin(self._store.next_number())
            return {"number": draft.number, "error": ""}
        except (OSError, CheckpointError) as error:
            return {"number": 0, "error": str(error)}

    def latest(self) -> Path | None:
        """Return the newest version whose every byte is right, None without any.

        A damaged one is named in a CheckpointWarning. What is returned may be removed
        once newer ones are committed, `keep` of them at the earliest.

        Raises:
            CheckpointError: There are versions, but none is whole; or the ranks see
                different ones.
        """
        message: list[Any] = [None, "", ""]
        if self._ranks.is_first:
            message = self._find()
        number, digest, error = self._ranks.gather(message)[0]
        if error:
            raise CheckpointError(error)
        if number is None:
            return None
        if self._ranks.is_first:
            return self.directory / checkpoint_name(number)
        return Path(self._store.open(number, digest).path)

    def _find(self) -> list[Any]:
        if not self.directory.is_dir():
            return [None, "", ""]
        while True:
            before, error = self._list(), ""
            try:
                newest = self._store.find_newest()
            except CheckpointError as problem:
                newest, error = None, str(problem)
            if newest is not None:
                return [newest.number, newest.manifest.digest, ""]
            # Another process may have committed a version and removed what was there.
            if self._list() == before:
                return [None, "", error]

    def _list(self) -> list[tuple[int, bool]]:
        """Return what there is and whether it is committed, the oldest first.

        A newer one is committed before an older one is removed, so in this order at
        least one of them is seen to be.
        """
        storage = self._store.storage
        numbers = reversed(list_numbers(storage))
        return [(number, not is_torn(storage, number)) for number in numbers]


class Preparation:
    """A version that does not exist yet; a context manager that commits or abandons it.

    `preparation / "name"` is the path of a file in it, `path` that of the directory.
    """

    def __init__(self, store: CheckpointStore, draft: Draft, ranks: _Ranks) -> None:
        self._store = store
        self._draft = draft
        self._ranks = ranks
        self._is_open = True

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
        if not self._is_open:
            return
        if error is None:
            self.commit()
        else:
            self._end(f"{type(error).__name__}: {error}")

    def commit(self) -> Path:
        """Make the version exist, durably, and remove those that are too old.

        Every file is read once for its checksum.

        Returns:
            Its directory.

        Raises:
            CheckpointError: Another rank failed, or has files that rank 0 does not see.
            ValueError: It holds something else than plain files.
            OSError: It could not be written.
        """
        try:
            names = self._force_to_disk()
        except BaseException as error:
            self._end(str(error))
            raise
        problem = self._end("", names)
        if problem:
            raise CheckpointError(f"{self.path} was not committed: {problem}")
        return self.path

    def abandon(self) -> None:
        """Remove what was written; the other ranks' commits raise."""
        self._end("abandoned")

    def _force_to_disk(self) -> list[str]:
        self._check_open()
        names = sorted(os.listdir(self.path))
        for name in names:
            files.fsync_file(self.path / name)
        return names

    def _check_open(self) -> None:
        if not self._is_open:
            raise ValueError(f"{self.path} has been committed or abandoned already")

    def _end(self, error: str, names: list[str] | None = None) -> str:
        """Commit if no rank has an error; return the first error."""
        self._check_open()
        self._is_open = False
        try:
            reports = self._ranks.gather([error, names or []])
            errors = [
                f"rank {rank}: {text}" for rank, (text, _) in enumerate(reports) if text
            ]
            outcome = errors[0] if errors else ""
            if self._ranks.is_first:
                if not outcome:
                    outcome = self._try_to_commit(
                        sorted({name for _, found in reports for name in found}),
                        num_ranks=len(reports),
                    )
                if outcome:
                    self._draft.abandon()
            return str(self._ranks.gather(outcome)[0])
        finally:
            self._store.release()

    def _try_to_commit(self, names: list[str], *, num_ranks: int) -> str:
        try:
            records = [self._draft.adopt(name) for name in names]
            self._draft.commit(_manifest(self._draft.number, num_ranks, records))
        except (OSError, ValueError, CheckpointError) as error:
            return str(error)
        self._store.prune()
        return ""


class _Ranks:
    """Those who use a directory together: all of the process group, or one alone."""

    def __init__(self, *, all_ranks: bool) -> None:
        self._all_ranks = all_ranks

    @property
    def is_first(self) -> bool:
        group = torch.distributed
        is_alone = not self._all_ranks or not (
            group.is_available() and group.is_initialized()
        )
        return is_alone or group.get_rank() == 0

    def gather(self, value: Any) -> list[Any]:
        """Return everybody's value, by rank."""
        return gather(value) if self._all_ranks else [value]


def _manifest(number: int, num_ranks: int, records: list[FileRecord]) -> Manifest:
    return Manifest(
        job=_JOB,
        number=number,
        generation=0,
        world_size=num_ranks,
        position={},
        time=time.time(),
        torch_version=str(torch.__version__),
        elasticrun_version=version(),
        files=tuple(records),
    )
