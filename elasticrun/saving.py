"""Writing one checkpoint with all ranks: everybody's files, then rank 0's commit."""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from typing import Any

import torch
from torch.distributed import TCPStore

from elasticrun.checkpoint.draft import Checkpoint, Draft
from elasticrun.checkpoint.files import FileRecord
from elasticrun.checkpoint.manifest import Manifest
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.control.store import JobStore
from elasticrun.errors import AgreementError, CheckpointError, CheckpointWarning
from elasticrun.joining import Membership
from elasticrun.opening import Start
from elasticrun.position import Position
from elasticrun.registry import Registry
from elasticrun.version import version

logger = logging.getLogger(__name__)


class Saver:
    """One replica's part in writing checkpoints.

    Attributes:
        newest: The newest committed checkpoint, from which states load.
    """

    def __init__(
        self,
        directory: CheckpointStore,
        registry: Registry,
        membership: Membership,
        start: Start,
    ) -> None:
        self._directory = directory
        self._registry = registry
        self._rank = membership.rank
        self._world_size = membership.world_size
        self._store = membership.store
        self._number = start.number
        self._generation = start.generation
        self.newest = start.newest
        self._gone: dict[int, str] = {}
        self._awaited: int | None = None
        self._has_warned = False
        self._lock = threading.Lock()

    def save(self, position: dict[str, Any], *, timeout: float) -> Checkpoint | None:
        """Write and commit a checkpoint. Collective, at the same point everywhere.

        Args:
            position: The job's position, encoded.
            timeout: Seconds to wait for the other ranks.

        Returns:
            The checkpoint, or None when it could not be written (a warning says why;
            the one before is untouched).

        Raises:
            Exception: What a state's `save` raised, other than OSError.
            CheckpointError: A state of another rank could not be saved.
            AgreementError: Rank 0 never came to the same point, or is gone.
        """
        number = self._number
        self._number += 1
        begun = time.perf_counter()
        for state in self._registry:
            state.sync()
        if self._rank == 0:
            outcome = self._save_as_owner(number, position, timeout)
        else:
            outcome = self._save_for_owner(number, position, timeout)
        if isinstance(outcome, Checkpoint):
            self.newest = outcome
            if self._rank == 0:
                self._directory.prune()
                logger.info(
                    "saved %s in %.2f s", outcome.path, time.perf_counter() - begun
                )
            return outcome
        warnings.warn(
            f"checkpoint {number} was not saved: {outcome} "
            + (
                f"The newest checkpoint is {self.newest.path}."
                if self.newest
                else "There is no checkpoint yet."
            ),
            CheckpointWarning,
            stacklevel=2,
        )
        return None

    def note_gone(self, rank: int, fate: str) -> None:
        """Do not wait for a rank any more: for rank 0's watcher, in its own thread."""
        assert self._store is not None
        with self._lock:
            self._gone[rank] = fate
            number = self._awaited
        if number is not None:  # The training thread may be waiting in its client.
            self._report_for(rank, number, self._store.connect())

    def _report_for(self, rank: int, number: int, client: TCPStore) -> None:
        """Report in the place of a rank that is gone, unless it still did itself."""
        report = {"files": [], "error": self._gone[rank], "is_bug": False}
        client.compare_set(f"save/{number}/{rank}", "", json.dumps(report))

    def _save_as_owner(
        self, number: int, position: dict[str, Any], timeout: float
    ) -> Checkpoint | str:
        draft: Draft | None = None
        try:
            draft = self._directory.begin(number)
            self._put(f"save/{number}/begun", "")
            records = self._write_own(draft)
            records += self._carry_over(draft)
            records += self._take_reports(number, position, timeout)
            checkpoint = draft.commit(self._manifest(number, position, records))
        except (OSError, _SaveFailed) as error:
            self._put(f"save/{number}/begun", str(error))
            self._give_up(draft, number, f"{error}")
            return f"{error}"
        except Exception as error:
            self._put(f"save/{number}/begun", f"rank 0: {error}")
            self._give_up(draft, number, f"rank 0: {error}", is_bug=True)
            raise
        self._put(
            f"save/{number}/end",
            {"digest": checkpoint.manifest.digest, "error": "", "is_bug": False},
        )
        return checkpoint

    def _write_own(self, draft: Draft) -> list[FileRecord]:
        return [
            draft.write(state.file_name(self._rank), state.save)
            for state in self._registry
            if self._rank == 0 or state.is_per_replica
        ]

    def _carry_over(self, draft: Draft) -> list[FileRecord]:
        """Copy the states that nobody has claimed yet since the restart."""
        newest = self.newest
        if newest is None:
            return []
        names = self._registry.carried_over(newest)
        try:
            return [draft.copy(newest, name) for name in names]
        except CheckpointError as error:
            raise _SaveFailed(str(error)) from error

    def _take_reports(
        self, number: int, position: dict[str, Any], timeout: float
    ) -> list[FileRecord]:
        if self._store is None:
            return []
        with self._lock:
            self._awaited = number
            gone = list(self._gone)
        for rank in gone:
            self._report_for(rank, number, self._store.client)
        try:
            return self._wait_for_reports(self._store, number, position, timeout)
        finally:
            with self._lock:
                self._awaited = None

    def _wait_for_reports(
        self, store: JobStore, number: int, position: dict[str, Any], timeout: float
    ) -> list[FileRecord]:
        records: list[FileRecord] = []
        deadline = time.monotonic() + timeout
        silent = []
        for rank in range(1, self._world_size):
            left = max(0.001, deadline - time.monotonic())
            try:
                report = store.take(f"save/{number}/{rank}", timeout=left)
            except TimeoutError:
                silent.append(rank)
                continue
            if report["error"]:
                text = f"rank {rank}: {report['error']}"
                raise CheckpointError(text) if report["is_bug"] else _SaveFailed(text)
            if report["position"] != position:
                raise CheckpointError(
                    f"rank 0 is to save at {Position.decode(position)}, but rank "
                    f"{rank} at {Position.decode(report['position'])}. Replicas must "
                    "leave their loops at the same batch: let what decides about a "
                    "`break` be the same on all of them (with even_batches=False they "
                    "see different numbers of batches)."
                )
            records += [FileRecord(*record) for record in report["files"]]
        if silent:
            raise _SaveFailed(
                f"rank {', '.join(map(str, silent))} did not come to the agreed "
                f"boundary within {timeout:g} s."
            )
        return records

    def _manifest(
        self, number: int, position: dict[str, Any], records: list[FileRecord]
    ) -> Manifest:
        return Manifest(
            job=self._directory.job,
            number=number,
            generation=self._generation,
            world_size=self._world_size,
            position=position,
            time=time.time(),
            torch_version=str(torch.__version__),
            elasticrun_version=version(),
            files=tuple(records),
            values=self._values(),
        )

    def _values(self) -> dict[str, float]:
        """Return the value by which the best checkpoint is told, if it has one now."""
        best = self._directory.keeping.best
        if best is None:
            return {}
        try:
            value = self._registry.value_of(best[0])
        except KeyError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"keep_best={best!r}: {error.args[0]}, so no checkpoint can be the "
                    "best. Make a Variables with that value before the first save.",
                    CheckpointWarning,
                    stacklevel=2,
                )
            return {}
        return {} if value is None else {best[0]: value}

    def _give_up(
        self, draft: Draft | None, number: int, reason: str, *, is_bug: bool = False
    ) -> None:
        self._put(
            f"save/{number}/end", {"digest": "", "error": reason, "is_bug": is_bug}
        )
        if draft is not None:
            draft.abandon()

    def _put(self, key: str, value: Any) -> None:
        if self._store is not None:
            self._store.put(key, value)

    def _save_for_owner(
        self, number: int, position: dict[str, Any], timeout: float
    ) -> Checkpoint | str:
        assert self._store is not None
        try:
            problem = self._store.take(f"save/{number}/begun", timeout=2 * timeout)
            if not problem:
                self._report(number, position)
            end = self._store.take(f"save/{number}/end", timeout=2 * timeout)
        except TimeoutError as error:
            raise AgreementError(
                f"rank 0 did not come to the boundary where all agreed to save within "
                f"{2 * timeout:g} s. Look at its log: it may hang, or its program "
                "may take another path."
            ) from error
        except ConnectionError as error:
            raise AgreementError(
                f"rank 0 was gone before the checkpoint was committed ({error}). Look "
                "at its log; start the job again, it resumes at the last checkpoint."
            ) from error
        if end["is_bug"]:
            raise CheckpointError(end["error"])
        if end["error"]:
            return str(end["error"])
        return self._directory.open(number, end["digest"])

    def _report(self, number: int, position: dict[str, Any]) -> None:
        try:
            records = self._write_own(self._directory.join(number))
        except (OSError, CheckpointError) as error:
            report = {"files": [], "error": str(error), "is_bug": False}
        except Exception as error:
            report = {"files": [], "error": str(error), "is_bug": True}
            self._put(f"save/{number}/{self._rank}", report)
            raise
        else:
            report = {"files": records, "error": "", "position": position}
        self._put(f"save/{number}/{self._rank}", report)


class _SaveFailed(Exception):
    """A save that cannot be committed, though training can go on."""
