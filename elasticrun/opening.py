"""Opening the checkpoint directory: all replicas begin with the same, or none does."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from dataclasses import dataclass
from typing import Any

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.storage import StoreUnreachableError
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.control.store import JobStore
from elasticrun.env import Environment
from elasticrun.errors import CheckpointError, text_of
from elasticrun.joining import Membership
from elasticrun.position import Position

logger = logging.getLogger(__name__)

LAG_SECONDS = 5.0
_HEARING_SECONDS = 5.0
_LOOK_SECONDS = 0.1


@dataclass(frozen=True)
class Start:
    """What all replicas of a generation begin with.

    Attributes:
        generation: Its number.
        number: The number of the next checkpoint.
        newest: The checkpoint to resume from, or None.
    """

    generation: int
    number: int
    newest: Checkpoint | None

    @classmethod
    def afresh(cls) -> Start:
        """Return what a job without a checkpoint directory begins with."""
        return cls(generation=0, number=1, newest=None)

    @property
    def position(self) -> Position | None:
        """Where the program is to resume, or None."""
        if self.newest is None:
            return None
        return Position.decode(dict(self.newest.manifest.position))


def make_store(
    path: str | os.PathLike[str] | None, environment: Environment
) -> CheckpointStore | None:
    """Return the store of the job's checkpoints; None if it has no directory.

    Args:
        path: The directory; None for the environment's.
    """
    path = path or environment.checkpoint_dir
    if path is None:
        return None
    return CheckpointStore(
        path,
        job=environment.job,
        keep=environment.keep,
        keep_every=environment.keep_every,
        keep_best=environment.keep_best,
    )


def open_directory(directory: CheckpointStore, membership: Membership) -> Start:
    """Find the checkpoint to resume from, the same on all replicas. Collective.

    Raises:
        CheckpointError: The directory is in use, unfit, or not the same on all
            replicas; every replica raises, so that none starts at the beginning.
    """
    opener = _Opener(
        directory, membership.rank, membership.world_size, membership.store
    )
    is_owner = membership.rank == 0
    return opener.open_as_owner() if is_owner else opener.open_like_owner()


def check_all_have_directory(membership: Membership, *, has_one: bool) -> None:
    """Refuse to start if only some replicas were given a directory. Collective.

    Raises:
        CheckpointError: Some have none; every replica raises.
    """
    store = membership.store
    if store is None:
        return
    others = range(1, membership.world_size)
    if membership.rank == 0:
        have = [has_one, *(store.take(f"directory/{rank}") for rank in others)]
        without = [rank for rank, has in enumerate(have) if not has]
        verdict = without if len(without) < len(have) else []
        store.put("directory/verdict", verdict)
        for rank in others if verdict else ():
            with contextlib.suppress(TimeoutError):
                store.take(f"directory/{rank}/heard", timeout=_HEARING_SECONDS)
    else:
        store.put(f"directory/{membership.rank}", has_one)
        verdict = store.take("directory/verdict")
        store.put(f"directory/{membership.rank}/heard", True)
    if verdict:
        raise CheckpointError(
            f"rank {', '.join(map(str, verdict))} of {membership.world_size} has no "
            "checkpoint directory, but others have, so no checkpoint could be whole. "
            "Give all replicas the same checkpoint_dir (ELASTICRUN_CHECKPOINT_DIR)."
        )


def log_start(start: Start, environment: Environment) -> None:
    """Say on rank 0 where the job begins, and whether its world size is another."""
    if environment.rank != 0:
        return
    size = f"generation {start.generation} with world size {environment.world_size}"
    if start.newest is None:
        logger.info("started %s", size)
        return
    logger.info("resumed %s at %s from %s", size, start.position, start.newest.path)
    if start.newest.manifest.world_size != environment.world_size:
        logger.info(
            "world size changed from %d to %d",
            start.newest.manifest.world_size,
            environment.world_size,
        )


@dataclass(frozen=True)
class _Opener:
    """One replica's part in it."""

    _directory: CheckpointStore
    _rank: int
    _world_size: int
    _store: JobStore | None

    def open_as_owner(self) -> Start:
        try:
            start, highest = self._begin()
        except Exception as error:
            self._tell_start({"error": f"rank 0: {text_of(error)}"})
            self._wait_until_heard()
            self._directory.release()
            raise
        try:
            self._tell_start(
                {
                    "generation": start.generation,
                    "number": start.number,
                    "highest": highest,
                    "newest": start.newest and start.newest.number,
                    "digest": start.newest and start.newest.manifest.digest,
                }
            )
            self._hear_whether_all_see_it()
        except Exception:
            self._directory.release()
            raise
        return start

    def _begin(self) -> tuple[Start, int]:
        """Return what to begin with, and the highest number of a checkpoint there."""
        self._directory.acquire()
        try:
            newest = self._directory.find_newest()
            self._directory.sweep()
            start = Start(
                self._directory.next_generation(),
                self._directory.next_number(),
                newest,
            )
            return start, self._directory.newest_number()
        except StoreUnreachableError as error:
            raise CheckpointError(
                f"what is in {self._directory.directory} cannot be told: {error}. A "
                "job that went on from something older, or from the beginning, would "
                "lose what was trained. Start it again when the store can be reached."
            ) from error

    def _tell_start(self, message: dict[str, Any]) -> None:
        if self._store is not None:
            self._store.put("start", message)

    def _hear_whether_all_see_it(self) -> None:
        if self._store is None:
            return
        answers = {
            rank: self._store.take(f"start/{rank}")
            for rank in range(1, self._world_size)
        }
        refusals = [
            f"rank {r}: {text}" for r, text in answers.items() if text is not None
        ]
        verdict = "\n".join(refusals)
        self._store.put("start/verdict", verdict)
        if verdict:
            self._wait_until_heard()
            raise CheckpointError(f"the replicas see different checkpoints.\n{verdict}")

    def _wait_until_heard(self) -> None:
        """Serve the store until all know why the job does not start."""
        if self._store is None:
            return
        for rank in range(1, self._world_size):
            with contextlib.suppress(TimeoutError):
                self._store.take(f"start/{rank}/heard", timeout=_HEARING_SECONDS)

    def open_like_owner(self) -> Start:
        assert self._store is not None
        message = self._store.take("start")
        if "error" in message:
            self._store.put(f"start/{self._rank}/heard", True)
            raise CheckpointError(message["error"])
        newest: Checkpoint | None = None
        refusal: str | None = None
        try:
            newest = self._find_what_owner_has(message)
            self._check_sees_no_more(message["highest"])
        except (CheckpointError, OSError) as error:
            refusal = text_of(error)
        self._store.put(f"start/{self._rank}", refusal)
        verdict = self._store.take("start/verdict")
        if verdict:
            self._store.put(f"start/{self._rank}/heard", True)
            raise CheckpointError(f"the replicas see different checkpoints.\n{verdict}")
        return Start(message["generation"], message["number"], newest)

    def _find_what_owner_has(self, message: dict[str, Any]) -> Checkpoint | None:
        """Return the checkpoint that rank 0 resumes from.

        A file system may show late what another machine has written there, so it is
        given some seconds. To agree on an older checkpoint instead would silently lose
        what was committed.

        Raises:
            CheckpointError: This replica does not see what rank 0 sees.
        """
        deadline = time.monotonic() + LAG_SECONDS
        while True:
            is_last = time.monotonic() >= deadline
            try:
                self._directory.check_shared(message["generation"])
                if message["newest"] is None:
                    return None
                return self._directory.open(message["newest"], message["digest"])
            except CheckpointError:
                if is_last:
                    raise
            time.sleep(_LOOK_SECONDS)

    def _check_sees_no_more(self, highest: int) -> None:
        """Refuse to start over what rank 0 does not see, whose generation may be equal.

        Raises:
            CheckpointError: There are checkpoints here that rank 0 does not have.
        """
        number = self._directory.newest_number()
        if number > highest:
            raise CheckpointError(
                f"{self._directory.directory} on host {socket.gethostname()} has a "
                f"checkpoint {number}, but rank 0 sees none above {highest}. The "
                "checkpoint directory must be on a file system that all replicas see."
            )
