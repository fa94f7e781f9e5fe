"""What one rank does in a save: it captures, writes its files; rank 0 commits."""

from __future__ import annotations

import gc
import io
import math
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, BinaryIO, NamedTuple

import torch

from elasticrun.checkpoint.draft import Checkpoint, Draft
from elasticrun.checkpoint.files.capture_buffers import (
    CaptureBuffers,
    NoMemoryLeftError,
)
from elasticrun.checkpoint.files.durable import FileRecord
from elasticrun.checkpoint.manifest import Manifest, version
from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.per_rank import PerRankState, write_per_rank
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.stateful import local_shard
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, ElasticRunError, text_of
from elasticrun.logger import Logger
from elasticrun.replicas.exchange import SAVE_WRITTEN, Exchange, Gathered
from elasticrun.replicas.membership import Membership

_TOLERANCE = 1e-6
_MOST_NAMED = 5

Samples = dict[str, Mapping[str, list[float]]]

logger = Logger(__name__)


class SaveFailed(ElasticRunError):
    """A save that cannot be committed, though training can go on."""


class OwnFile(NamedTuple):
    """A file that this rank writes: how, or its content if that is in memory."""

    file_name: str
    save: Callable[[BinaryIO], object]
    captured: tuple[memoryview, ...] | None = None

    def write(self, draft: Draft) -> FileRecord:
        """Write the file into a draft."""
        if self.captured is None:
            return draft.write(self.file_name, self.save)
        return draft.write_captured(self.file_name, self.captured)


def _explaining_streams(
    state: BaseState, write: Callable[[BinaryIO], object]
) -> Callable[[BinaryIO], object]:
    """Wrap `write`, to explain what its stream cannot do.

    `io.UnsupportedOperation` is an OSError, so it would be taken for a failing disk,
    and training would go on without checkpoints.
    """

    def save(fileobj: BinaryIO) -> object:
        try:
            return write(fileobj)
        except io.UnsupportedOperation as error:
            raise TypeError(
                f"the save of the state {state.name!r} ({type(state).__name__}) used "
                f"its stream in a way that it does not support: {error}. Checkpoints "
                "are written in one go, so there is no seek or tell. Write into an "
                "io.BytesIO first, then write its getvalue() to the stream."
            ) from error

    return save


@dataclass(frozen=True)
class Capture:
    """Everything of the job at a boundary that its checkpoint needs from this rank.

    Attributes:
        files: Those that this rank writes.
        gathered: This rank's own of small states, by name; rank 0 writes all of them.
        carried: Files of the newest checkpoint that no state has claimed yet; on rank
            0, which copies them.
        problem: Why this rank has nothing to write; None if it has.
        file_names: What all ranks write together, as rank 0 sees it; on that alone.
        is_in_memory: Whether training may go on while it is written.
        checksums: Of values that are to be the same on all ranks, by `state.name`.
        samples: Sums over parts of states that must not have drifted apart, by state
            and part.
    """

    number: int
    position: dict[str, Any]
    files: tuple[OwnFile, ...] = ()
    gathered: dict[str, bytes] = field(default_factory=dict)
    carried: tuple[str, ...] = ()
    problem: str | None = None
    file_names: tuple[str, ...] = ()
    is_in_memory: bool = False
    checksums: dict[str, int] = field(default_factory=dict)
    samples: Samples = field(default_factory=dict)


@contextmanager
def _no_garbage_collected() -> Iterator[None]:
    """Disable the garbage collector in the block, which makes many containers.

    After each 700 new containers it looks for garbage among them, and now and then
    among all that the program has: with 1,000 states, training waited longer for that
    than for the copies.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Capturer:
    """Captures this rank's states.

    Args:
        rank: Of what to capture a rank's part; 0 in a rescue, on whatever rank.
        is_async: Whether to keep memory for all that this rank writes; else states
            write their files themselves, while training waits.
    """

    def __init__(
        self, registry: Registry, *, rank: int, world_size: int, is_async: bool
    ) -> None:
        self._registry = registry
        self._rank = rank
        self._world_size = world_size
        self._memory = CaptureBuffers() if is_async else None

    def prepare(self) -> None:
        """Get memory ready for the first save, in the background: training goes on."""
        if self._memory is not None:
            self._memory.prepare(sum(_num_bytes(state) for state in self._own_states()))

    @_no_garbage_collected()
    def capture(
        self,
        number: int,
        position: dict[str, Any],
        newest: Checkpoint | None,
        *,
        is_awaited: bool = True,
    ) -> Capture:
        """Return everything that is to be saved of this boundary.

        Args:
            is_awaited: Whether training waits until it is written anyway: then states
                write their files themselves, without a copy.
        """
        _wait_for_gpus()
        is_first = self._rank == 0
        memory = None if is_awaited else self._memory
        files, problem = self._capture_files(memory)
        return Capture(
            number,
            position,
            files,
            gathered={
                state.name: state.capture()
                for state in self._registry
                if isinstance(state, PerRankState)
            },
            carried=tuple(self._registry.carried_over(newest)) if is_first else (),
            problem=problem,
            # With as many names as there are ranks, so that only rank 0 makes them.
            file_names=tuple(self._registry.file_names(self._world_size))
            if is_first
            else (),
            is_in_memory=memory is not None
            and self._memory is not None
            and problem is None,
            checksums={
                f"{state.name}.{key}": checksum
                for state in self._registry
                for key, checksum in state.checksums().items()
            },
            samples=self._samples(),
        )

    def _capture_files(
        self, memory: CaptureBuffers | None
    ) -> tuple[tuple[OwnFile, ...], str | None]:
        """Return this rank's files, in memory if that can be; or why there are none."""
        own = self._own_states()
        if memory is not None:
            try:
                return self._into_memory(own, memory), None
            except NoMemoryLeftError as error:
                self._memory = None
                logger.warning(
                    "too little memory for a copy of all states (%s), so training "
                    "waits while they are written, as with async_save=False",
                    error,
                )
            except OSError as error:
                return (), text_of(error)
        files = [
            OwnFile(s.file_name(self._rank), _explaining_streams(s, s.save))
            for s in own
        ]
        return tuple(files), None

    def _own_states(self) -> list[BaseState]:
        """Return the states that this rank writes."""
        return [
            state
            for state in self._registry
            if (self._rank == 0 or state.is_per_replica)
            and not isinstance(state, PerRankState)
        ]

    def forget(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._memory = CaptureBuffers()

    def _into_memory(
        self, states: list[BaseState], memory: CaptureBuffers
    ) -> tuple[OwnFile, ...]:
        """Copy states: the files that they make, or what these can be made of later."""
        memory.clear()  # Of the last save, whose writer has ended: `save` waits for it.
        memory.num_threads = torch.get_num_threads()
        files: list[OwnFile] = []
        for state in states:
            write, may_be_later = state.begin_save()
            content = (
                None
                if may_be_later
                else memory.capture(_explaining_streams(state, write))
            )
            files.append(OwnFile(state.file_name(self._rank), write, content))
        return tuple(files)

    def _samples(self) -> Samples:
        if self._world_size == 1:
            return {}
        samples = {state.name: state.samples() for state in self._registry}
        return {name: parts for name, parts in samples.items() if parts}


def _num_bytes(state: BaseState) -> int:
    """Return how much this rank has of a module or an optimizer, where most is."""
    target: Any = state.target
    tensors: list[Any] = []
    if isinstance(target, torch.nn.Module):
        tensors = [*target.parameters(), *target.buffers()]
    elif isinstance(target, torch.optim.Optimizer):
        # Anything may be there: an optimizer of one's own counts its calls.
        entries = [each for each in target.state.values() if isinstance(each, dict)]
        tensors = [each for of in entries for each in of.values()]
    shards = [local_shard(each) for each in tensors if isinstance(each, torch.Tensor)]
    return sum(each.nbytes for each in shards if each.layout == torch.strided)


def _wait_for_gpus() -> None:
    """Synchronize with all GPUs, on every stream.

    States are read on the current stream, or in host memory that a copy may still be on
    its way to; what a program does on streams of its own they would miss.
    """
    if not torch.cuda.is_initialized():
        return
    for number in range(torch.cuda.device_count()):
        if torch.cuda.memory_reserved(number):  # Or it would be given a context.
            torch.cuda.synchronize(number)


@dataclass(frozen=True)
class WriteReport:
    """What a rank has written of what it has captured."""

    capture: Capture
    files: tuple[FileRecord, ...] = ()
    error: Exception | None = None

    @property
    def is_mistake(self) -> bool:
        """Whether a state's `save` has failed, which it will do again."""
        return self.error is not None and not isinstance(self.error, SaveFailed)

    def encode(self) -> dict[str, Any]:
        """Return what rank 0 hears of it."""
        return {
            "position": self.capture.position,
            "files": self.files,
            "checksums": self.capture.checksums,
            "samples": {
                name: list(parts.values())
                for name, parts in self.capture.samples.items()
            },
            "error": None if self.error is None else text_of(self.error),
            "is_mistake": self.is_mistake,
        }

    def encode_gathered(self) -> dict[str, str]:
        """Return the small states as what rank 0 fetches when it writes them."""
        if self.error is not None:
            return {}
        gathered = self.capture.gathered
        return {name: b64encode(each).decode() for name, each in gathered.items()}


class CheckpointWriter:
    """What one rank does in a save: it writes its files, and rank 0 commits.

    One save at a time; in the writer's thread if the save is in flight, else in the
    training thread.

    Attributes:
        warnings: What has gone wrong though the checkpoint is committed.
    """

    def __init__(
        self, checkpoints: CheckpointStore, membership: Membership, *, generation: int
    ) -> None:
        self._checkpoints = checkpoints
        self._rank = membership.rank
        self._world_size = membership.world_size
        self._generation = generation
        self.warnings: list[str] = []
        self._draft: Draft | None = None
        self._made: Checkpoint | None = None
        self._differing: set[str] = set()

    def begin(self, capture: Capture, *, is_forced: bool) -> bool:
        """Make the directory; rank 0 only. Return whether it is forced to the disk."""
        with _failing_softly():
            if capture.problem is not None:
                raise SaveFailed(capture.problem)
            self._draft = self._checkpoints.begin(capture.number, is_forced=is_forced)
        return is_forced

    def write_files(
        self, capture: Capture, newest: Checkpoint | None, *, is_forced: bool
    ) -> WriteReport:
        """Write this rank's files, with rank 0 also those that are carried over."""
        try:
            with _failing_softly():
                files = self._write_files(capture, newest, is_forced=is_forced)
                return WriteReport(capture, tuple(files))
        except Exception as error:
            return WriteReport(capture, error=error)

    def _write_files(
        self, capture: Capture, newest: Checkpoint | None, *, is_forced: bool
    ) -> list[FileRecord]:
        if capture.problem is not None:
            raise SaveFailed(capture.problem)
        if self._rank != 0:
            with _failing_softly(CheckpointError):
                draft = self._checkpoints.join(capture.number, is_forced=is_forced)
            return [own.write(draft) for own in capture.files]
        assert self._draft is not None
        files = [own.write(self._draft) for own in capture.files]
        if newest is not None:
            with _failing_softly(CheckpointError):
                files += [self._draft.copy(newest, name) for name in capture.carried]
        return files

    def commit(
        self, own: WriteReport, exchange: Exchange, *, timeout: float
    ) -> dict[str, Any]:
        """Commit what all ranks have written; rank 0 only.

        Args:
            exchange: Over which the others tell what they have.

        Returns:
            The digest and the time, from which the others know the checkpoint. All of
            them are told it, so it must not grow with their number.
        """
        with _failing_softly():
            if own.error is not None:
                raise own.error
            capture, topic = own.capture, SAVE_WRITTEN.format(own.capture.number)
            heard = exchange.gather(topic, None, timeout=timeout)
            others = _files_of_others(heard, capture)
            fetch = partial(exchange.fetch, topic)
            files = [*self._write_gathered(capture, fetch), *own.files, *others]
            _check_complete(capture, files)
            assert self._draft is not None
            made = self._made = self._draft.commit(self._manifest(capture, files))
        self._draft = None
        self._warn_of_differences(capture.checksums, heard)
        return {"digest": made.manifest.digest, "time": made.time}

    def _write_gathered(
        self, capture: Capture, fetch: Callable[[str, Iterable[int]], list[str]]
    ) -> Iterator[FileRecord]:
        """Write the small states of all ranks, many of them in one file."""
        assert self._draft is not None
        for name, content in capture.gathered.items():
            each = partial(_gathered, name, content, fetch)
            yield from write_per_rank(
                self._draft, name, each, world_size=self._world_size
            )

    def write_alone(
        self,
        capture: Capture,
        newest: Checkpoint | None,
        gathered: Mapping[str, Mapping[int, bytes]],
        *,
        why: str,
        is_forced: bool,
    ) -> Checkpoint:
        """Write and commit everything on this rank, in a rescue.

        Args:
            capture: As rank 0 has it.
            newest: Where files come from that are carried over.
            gathered: The small states that are known, by name and rank.
        """
        draft = self._checkpoints.begin(capture.number, is_forced=is_forced)
        try:
            files = [own.write(draft) for own in capture.files]
            if newest is not None:
                files += [draft.copy(newest, name) for name in capture.carried]
            for name, parts in gathered.items():
                known = partial(_some_of, parts)
                files += write_per_rank(draft, name, known, world_size=self._world_size)
            _check_complete(capture, files)
            return draft.commit(self._manifest(capture, files, rescue=why))
        except BaseException:
            draft.abandon()
            raise

    def force(self, checkpoint: Checkpoint) -> Checkpoint:
        """Force a checkpoint to the disk that the generation before has left to this.

        Only then older ones may go.
        """
        try:
            self._checkpoints.force(checkpoint)
        except (OSError, CheckpointError) as error:
            self.warnings.append(
                f"{checkpoint.path} may not survive a power cut, since it could not be "
                f"forced to the disk: {text_of(error)}. The next one will."
            )
        else:
            self.prune()
        return checkpoint

    def committed(self, number: int, told: dict[str, Any]) -> Checkpoint:
        """Return the checkpoint that rank 0 has committed, of which it has told this.

        Rank 0 knows the manifest; the others read it when something asks for it.
        """
        made, self._made = self._made, None
        return made or self._checkpoints.committed(number, **told)

    def abandon(self) -> None:
        """Remove what was written of a save that has failed; rank 0 only."""
        draft, self._draft = self._draft, None
        if draft is not None:
            draft.abandon()

    def prune(self) -> None:
        """Remove old checkpoints, after a commit; rank 0 only."""
        try:
            self._checkpoints.prune(warn=self.warnings.append)
        except OSError as error:  # The new one is there all the same.
            self.warnings.append(f"old checkpoints could not be removed: {error}")

    def _warn_of_differences(self, own: dict[str, int], heard: Gathered) -> None:
        """Warn of values that are saved once for all ranks, and differ between these.

        Each name is warned of once in a generation.
        """
        own = {name: own[name] for name in own if name not in self._differing}
        found: dict[str, list[int]] = {}
        for rank, report in heard.by_rank.items() if own else ():
            if rank == 0:
                continue
            for name, checksum in own.items():
                if report["checksums"].get(name, checksum) != checksum:
                    found.setdefault(name, []).append(rank)
        differing = [
            f"{name} (rank {', '.join(map(str, found[name]))})"
            for name in own
            if name in found
        ]
        self._differing.update(found)
        if differing:
            self.warnings.append(
                "other replicas have other values than rank 0 of "
                f"{'; '.join(differing)}. Rank 0's are saved, and all replicas load "
                "them. A value that came from a replica's own part of the batches is "
                "wrong: add the replicas up in an Accumulator first."
            )

    def _manifest(
        self, capture: Capture, files: list[FileRecord], *, rescue: str = ""
    ) -> Manifest:
        return Manifest(
            rescue=rescue,
            job=self._checkpoints.job,
            number=capture.number,
            generation=self._generation,
            world_size=self._world_size,
            position=capture.position,
            time=time.time(),
            torch_version=str(torch.__version__),
            elasticrun_version=version(),
            files=tuple(files),
        )


@contextmanager
def _failing_softly(kind: type[Exception] = OSError) -> Iterator[None]:
    """Turn an error into SaveFailed: a failing disk or network ends no training."""
    try:
        yield
    except kind as error:
        raise SaveFailed(text_of(error)) from error


def _files_of_others(heard: Gathered, own: Capture) -> list[FileRecord]:
    """Return what the other ranks have written."""
    position = own.position
    files: list[FileRecord] = []
    for rank, report in heard.by_rank.items():
        if rank == 0:
            continue
        if report["error"] is not None:
            text = f"rank {rank}: {report['error']}"
            raise CheckpointError(text) if report["is_mistake"] else SaveFailed(text)
        if report["position"] != position:
            raise CheckpointError(
                f"rank 0 is to save at {Position.decode(position)}, but "
                f"rank {rank} at {Position.decode(report['position'])}. "
                + _what_to_do(position, report["position"])
            )
        _check_same_parameters(rank, own.samples, report["samples"])
        files += [FileRecord(*record) for record in report["files"]]
    for rank, fate in heard.gone.items():
        raise SaveFailed(f"rank {rank}: {fate}")
    if heard.silent:
        raise SaveFailed(
            f"rank {', '.join(map(str, heard.silent))} did not come to the agreed "
            f"boundary within {heard.seconds:g} s."
        )
    return files


def _gathered(
    name: str,
    own: bytes,
    fetch: Callable[[str, Iterable[int]], list[str]],
    ranks: range,
) -> dict[int, bytes]:
    """Return what each of these ranks has told of its own small state."""
    others = [rank for rank in ranks if rank != 0]
    found = {0: own} if 0 in ranks else {}
    found.update(zip(others, map(b64decode, fetch(name, others)), strict=True))
    return found


def _some_of(parts: Mapping[int, bytes], ranks: range) -> dict[int, bytes]:
    return {rank: parts[rank] for rank in ranks if rank in parts}


def _check_same_parameters(
    rank: int, own: Samples, told: dict[str, list[list[float]]]
) -> None:
    """Refuse to save rank 0's parameters for all when another rank has others."""
    for name, parts in own.items():
        others = told.get(name, [])
        if len(others) != len(parts):  # Of another module: it shows elsewhere.
            continue
        pairs = zip(parts.items(), others, strict=True)
        differing = [part for (part, sums), other in pairs if _differ(sums, other)]
        if differing:
            more = len(differing) - _MOST_NAMED
            raise CheckpointError(
                f"the replicas have drifted apart: {', '.join(differing[:_MOST_NAMED])}"
                f"{f' and {more} more' if more > 0 else ''} of {name!r} on rank "
                f"{rank} differ from those of rank 0. The gradients with which they "
                "were stepped were not averaged, or a copy (an EMA) is updated on some "
                "replicas alone. This was not saved; the checkpoint before it is "
                "untouched. Compute all losses by forward passes of an "
                "AdaptiveDataParallel, and change parameters in the same way on every "
                "replica."
            )


def _differ(own: list[float], other: list[float]) -> bool:
    """Return whether sums differ by more than other hardware would round otherwise."""
    if any(map(math.isnan, own)) or any(map(math.isnan, other)):
        return False  # What has become of a loss is another matter.
    scale = max(map(abs, [*own, *other]), default=0.0)
    pairs = zip(own, other, strict=True)
    return any(abs(a - b) > _TOLERANCE * scale for a, b in pairs)


def _check_complete(capture: Capture, files: list[FileRecord]) -> None:
    """Refuse to commit what would resume without a state that is registered here."""
    written = {record.name for record in files}
    lacking = [name for name in capture.file_names if name not in written]
    if lacking:
        raise CheckpointError(
            f"checkpoint {capture.number} would lack {', '.join(lacking)}: rank 0 has "
            "registered that state, but no replica has written it. The job would "
            "resume without it. Register the same states on every replica, in the same "
            "order."
        )


def _what_to_do(own: dict[str, Any], other: dict[str, Any]) -> str:
    """Return advice for replicas that are at different positions."""
    place = ("finished_epochs", "in_epoch", "finished_loops", "loader")
    if any(own[key] != other[key] for key in place):
        return (
            "Replicas must run the same epochs and loops: run no loop on one rank only "
            "(a validation on rank 0, for example), and decide about `break` alike on "
            "all of them."
        )
    return (
        "Replicas must leave their loops at the same batch: decide about `break` alike "
        "on all of them (with even_batches=False they see different numbers of "
        "batches)."
    )
