"""Writing one checkpoint with all ranks: everybody's files, then rank 0's commit."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.distributed import TCPStore

from elasticrun.capturing import Capture
from elasticrun.channel import Channel
from elasticrun.checkpoint.draft import Checkpoint, Draft
from elasticrun.checkpoint.manifest import Manifest, decode
from elasticrun.checkpoint.recorded import FileRecord
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.control.store import JobStore
from elasticrun.errors import AgreementError, CheckpointError, ElasticRunError, text_of
from elasticrun.position import Position
from elasticrun.version import version

_LOOK_SECONDS = 0.002


class Writer(Protocol):
    """One rank's part in a save, in whatever thread; one save at a time."""

    def write(
        self, capture: Capture, newest: Checkpoint | None, channel: Channel
    ) -> Checkpoint | str:
        """Write and commit a checkpoint. Collective.

        Args:
            newest: Where the files come from that are carried over.

        Returns:
            The checkpoint, or why it could not be written, though training can go on.

        Raises:
            Exception: What a state's `save` raised, other than OSError.
            CheckpointError: A state of another rank could not be saved.
            AgreementError: Rank 0 never came to the same point, or is gone.
        """
        ...

    def tell_mistake(self, number: int, error: Exception, channel: Channel) -> None:
        """Let the others know that this rank cannot save, for a mistake in a state."""
        ...


class Contributor:
    """Any rank but 0: writes its own files, and hears what became of the save."""

    def __init__(self, directory: CheckpointStore, rank: int) -> None:
        self._directory = directory
        self._rank = rank

    def write(
        self, capture: Capture, newest: Checkpoint | None, channel: Channel
    ) -> Checkpoint | str:
        del newest  # Rank 0 carries files over.
        number, timeout = capture.number, 2 * channel.timeout
        try:
            deadline = time.monotonic() + timeout
            begun = channel.take(f"save/{number}/begun", deadline=deadline)
            if begun["error"] is None:
                self._report(capture, channel)
            deadline = time.monotonic() + timeout
            end = channel.take(f"save/{number}/end", deadline=deadline)
            with contextlib.suppress(ConnectionError):  # Rank 0 had waited for long.
                channel.put(_heard(number, self._rank), True)
        except TimeoutError as error:
            raise AgreementError(
                f"rank 0 did not come to the boundary where all agreed to save within "
                f"{timeout:g} s. Look at its log: it may hang, or its program "
                "may take another path."
            ) from error
        except ConnectionError as error:
            raise AgreementError(
                f"rank 0 was gone before the checkpoint was committed ({error}). Look "
                "at its log; start the job again, it resumes at the last checkpoint."
            ) from error
        if end["is_bug"]:
            raise CheckpointError(end["error"])
        if end["error"] is not None:
            return str(end["error"])
        # Not read again: this rank may be cut off from the store just now.
        return self._directory.committed(decode(end["manifest"].encode()))

    def tell_mistake(self, number: int, error: Exception, channel: Channel) -> None:
        report = {"files": [], "error": text_of(error), "is_bug": True}
        channel.put(f"save/{number}/{self._rank}", report)

    def _report(self, capture: Capture, channel: Channel) -> None:
        number = capture.number
        try:
            records = self._write_own(capture)
        except (OSError, CheckpointError, _SaveFailed) as error:
            report = {"files": [], "error": text_of(error), "is_bug": False}
        except Exception as error:
            self.tell_mistake(number, error, channel)
            raise
        else:
            report = {"files": records, "error": None, "position": capture.position}
        channel.put(f"save/{number}/{self._rank}", report)

    def _write_own(self, capture: Capture) -> list[FileRecord]:
        if capture.problem is not None:
            raise _SaveFailed(capture.problem)
        draft = self._directory.join(capture.number)
        return [part.write(draft) for part in capture.parts]


class Owner:
    """Rank 0: begins the checkpoint, waits for the others' reports, and commits.

    Args:
        generation: The number of the running one.
        warn: Told what went wrong once the checkpoint is committed.
    """

    def __init__(
        self,
        directory: CheckpointStore,
        *,
        world_size: int,
        generation: int,
        warn: Callable[[str], object],
    ) -> None:
        self._directory = directory
        self._world_size = world_size
        self._generation = generation
        self._warn = warn
        self._gone: dict[int, str] = {}
        self._awaited: int | None = None
        self._told: int | None = None
        self._unheard: list[int] = []
        self._lock = threading.Lock()

    def write(
        self, capture: Capture, newest: Checkpoint | None, channel: Channel
    ) -> Checkpoint | str:
        draft: Draft | None = None
        number = capture.number
        self._empty_store(channel)
        try:
            if capture.problem is not None:
                raise _SaveFailed(capture.problem)
            draft = self._directory.begin(number)
            channel.put(f"save/{number}/begun", {"error": None})
            records = [part.write(draft) for part in capture.parts]
            records += _carry_over(capture, newest, draft)
            records += self._take_reports(capture, channel)
            _check_complete(capture, records)
            checkpoint = draft.commit(self._manifest(capture, records))
        except (OSError, _SaveFailed) as error:
            reason = text_of(error)
            self._call_off(channel, number, reason, is_bug=False)
            if draft is not None:
                draft.abandon()
            return reason
        except Exception as error:
            self.tell_mistake(number, error, channel)
            if draft is not None:
                draft.abandon()
            raise
        manifest = checkpoint.manifest.encode().decode()
        end = {"manifest": manifest, "error": None, "is_bug": False}
        self._tell_end(channel, number, end)
        return checkpoint

    def wait_until_heard(self, store: JobStore, *, timeout: float) -> None:
        """Wait until all who live have heard how the last save ended.

        They need the store for that, and it goes with this process.
        """
        if self._told is None:
            return
        deadline = time.monotonic() + timeout
        silent = set(range(1, self._world_size))
        while silent and time.monotonic() < deadline:
            with self._lock:
                silent -= set(self._gone)
            silent = {r for r in silent if store.find(_heard(self._told, r)) is None}
            if silent:
                time.sleep(_LOOK_SECONDS)

    def prune(self) -> None:
        """Remove old checkpoints, after a commit."""
        try:
            self._directory.prune(warn=self._warn)
        except OSError as error:  # The new one is there all the same.
            self._warn(f"old checkpoints could not be removed: {error}")

    def tell_mistake(self, number: int, error: Exception, channel: Channel) -> None:
        self._call_off(channel, number, f"rank 0: {text_of(error)}", is_bug=True)

    def note_gone(self, rank: int, fate: str, store: JobStore) -> None:
        """Do not wait for a rank any more: for the watcher, in its own thread."""
        with self._lock:
            self._gone[rank] = fate
            number = self._awaited
        if number is not None:  # Who waits for it does so in its client.
            self._report_for(rank, number, store.connect())

    def _report_for(self, rank: int, number: int, client: TCPStore) -> None:
        """Report in the place of a rank that is gone, unless it still did itself."""
        report = {"files": [], "error": self._gone[rank], "is_bug": False}
        client.compare_set(f"save/{number}/{rank}", "", json.dumps(report))

    def _call_off(
        self, channel: Channel, number: int, reason: str, *, is_bug: bool
    ) -> None:
        channel.put(f"save/{number}/begun", {"error": reason})
        self._tell_end(channel, number, {"error": reason, "is_bug": is_bug})

    def _tell_end(self, channel: Channel, number: int, end: dict[str, Any]) -> None:
        channel.put(f"save/{number}/end", end)
        self._told = number
        self._unheard.append(number)

    def _empty_store(self, channel: Channel) -> None:
        """Remove what was told of saves whose end everybody has heard."""
        if channel.store is None:
            return
        ranks = range(1, self._world_size)
        for number in list(self._unheard):
            heard = [_heard(number, rank) for rank in ranks]
            told = [f"save/{number}/{each}" for each in ("begun", "end", *ranks)]
            if channel.store.discard([*told, *heard], once=heard):
                self._unheard.remove(number)
                self._told = None if self._told == number else self._told

    def _take_reports(self, capture: Capture, channel: Channel) -> list[FileRecord]:
        if channel.store is None:
            return []
        with self._lock:
            self._awaited = capture.number
            gone = list(self._gone)
        for rank in gone:
            self._report_for(rank, capture.number, channel.store.client)
        try:
            return self._wait_for_reports(capture, channel)
        finally:
            with self._lock:
                self._awaited = None

    def _wait_for_reports(self, capture: Capture, channel: Channel) -> list[FileRecord]:
        records: list[FileRecord] = []
        deadline = time.monotonic() + channel.timeout
        silent = []
        for rank in range(1, self._world_size):
            key = f"save/{capture.number}/{rank}"
            try:
                report = channel.take(key, deadline=deadline)
            except TimeoutError:
                silent.append(rank)
                continue
            if report["error"] is not None:
                text = f"rank {rank}: {report['error']}"
                raise CheckpointError(text) if report["is_bug"] else _SaveFailed(text)
            if report["position"] != capture.position:
                raise CheckpointError(
                    f"rank 0 is to save at {Position.decode(capture.position)}, but "
                    f"rank {rank} at {Position.decode(report['position'])}. "
                    + _what_to_do(capture.position, report["position"])
                )
            records += [FileRecord(*record) for record in report["files"]]
        if silent:
            raise _SaveFailed(
                f"rank {', '.join(map(str, silent))} did not come to the agreed "
                f"boundary within {channel.timeout:g} s."
            )
        return records

    def _manifest(self, capture: Capture, records: list[FileRecord]) -> Manifest:
        return Manifest(
            job=self._directory.job,
            number=capture.number,
            generation=self._generation,
            world_size=self._world_size,
            position=capture.position,
            time=time.time(),
            torch_version=str(torch.__version__),
            elasticrun_version=version(),
            files=tuple(records),
            values=capture.values,
        )


def _carry_over(
    capture: Capture, newest: Checkpoint | None, draft: Draft
) -> list[FileRecord]:
    """Copy the states that nobody has claimed yet since the restart."""
    if newest is None:
        return []
    try:
        return [draft.copy(newest, name) for name in capture.carried]
    except CheckpointError as error:
        raise _SaveFailed(str(error)) from error


def _check_complete(capture: Capture, records: list[FileRecord]) -> None:
    """Refuse to commit what would resume without a state that is registered here.

    Raises:
        CheckpointError: A file of one is not among those that were written.
    """
    written = {record.name for record in records}
    lacking = [name for name in capture.file_names if name not in written]
    if lacking:
        raise CheckpointError(
            f"checkpoint {capture.number} would lack {', '.join(lacking)}: nobody "
            "wrote that, though rank 0 has the state registered. The job would resume "
            "without it. Register the same states on every replica, in the same order."
        )


def _what_to_do(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Say how replicas come to the same position, which they are not at."""
    place = ("finished_epochs", "in_epoch", "finished_loops", "loader")
    if any(own[key] != other[key] for key in place):
        return (
            "Replicas must walk the same epochs and loops: let no loader or loop be "
            "one rank's alone (as a validation on rank 0), and what decides about a "
            "`break` be the same on all of them."
        )
    return (
        "Replicas must leave their loops at the same batch: let what decides about a "
        "`break` be the same on all of them (with even_batches=False they see "
        "different numbers of batches)."
    )


def _heard(number: int, rank: int) -> str:
    return f"save/{number}/heard/{rank}"


class _SaveFailed(ElasticRunError):
    """A save that cannot be committed, though training can go on."""
