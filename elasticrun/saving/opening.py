"""Opens the checkpoint directory: all replicas load the same checkpoint, or none."""

from __future__ import annotations

import errno
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files.durable import StoreUnreachableError
from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.store import CheckpointStore, wait_until_seen
from elasticrun.errors import CheckpointError, text_of
from elasticrun.logger import Logger
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.exchange import DIRECTORY, SEEN, START, Exchange, RankZeroError
from elasticrun.replicas.membership import Membership
from elasticrun.saving.settings import Settings

logger = Logger(__name__)

HEARING_SECONDS = 5.0  # For the other ranks to hear why the job cannot begin.
_FULL_SECONDS = 3600.0  # For somebody to make room on a full disk.
_LONGEST_PAUSE = 60.0

# While this replica waits for that; the reporter tells the launcher.
is_waiting = threading.Event()


@dataclass(frozen=True)
class Start:
    """What all replicas of a generation begin with.

    Attributes:
        newest: The checkpoint to resume from, or None.
        is_unforced: Whether that is yet to be forced to the disk; as rank 0 has it.
    """

    generation: int = 0
    number: int = 1
    newest: Checkpoint | None = None
    is_unforced: bool = False

    @property
    def position(self) -> Position | None:
        """Where the program is to resume, or None."""
        if self.newest is None:
            return None
        try:
            return Position.decode(dict(self.newest.manifest.position))
        except CheckpointError as error:
            raise CheckpointError(f"{self.newest.path}: {error}") from None


def make_store(settings: Settings) -> CheckpointStore | None:
    """Return the store of the job's checkpoints; None if it has no directory."""
    if settings.checkpoint_dir is None:
        return None
    if not settings.job:
        raise CheckpointError(
            f"this job has no name: the program is {sys.argv[0]!r}, not a script. A "
            "checkpoint keeps the name, so that no other job loads it. Set "
            "ELASTICRUN_JOB to one, on all replicas, before the job starts."
        )
    return CheckpointStore(
        settings.checkpoint_dir,
        job=settings.job,
        keep=settings.keep,
    )


def open_checkpoints(checkpoints: CheckpointStore, membership: Membership) -> Start:
    """Find the checkpoint to resume from, the same on all replicas. Collective."""
    exchange = membership.exchange
    if membership.rank != 0:
        return _begin_on_other_ranks(checkpoints, exchange)
    try:
        start = _begin_on_rank_0(checkpoints, exchange)
        _check_all_see_it(exchange, None)
    except Exception:
        checkpoints.release()
        raise
    return start


def _begin_on_rank_0(checkpoints: CheckpointStore, exchange: Exchange) -> Start:
    """Acquire the directory, and tell the others what it holds, or why it failed."""
    start = Start()
    deadline = time.monotonic() + _FULL_SECONDS
    # What has been done is not done again after a pause.
    acquire, find_newest = cache(checkpoints.acquire), cache(checkpoints.find_newest)

    def begin() -> dict[str, Any] | None:
        nonlocal start
        try:
            acquire()
            newest = find_newest()
            checkpoints.remove_uncommitted()
            generation = checkpoints.next_generation()
            start = Start(
                generation,
                checkpoints.next_number(),
                newest,
                is_unforced=newest is not None and checkpoints.is_unforced(newest),
            )
            highest = checkpoints.newest_number()
        except StoreUnreachableError as error:
            raise CheckpointError(
                f"cannot read what is in {checkpoints.place}: {error}. A job that "
                "resumed from an older checkpoint, or began anew, would lose training. "
                "Start it again when this can be read. If it never can, remove that "
                "checkpoint, and the job resumes from the one before."
            ) from error
        except (OSError, CheckpointError) as error:
            cause = error.__cause__ or error
            is_full = getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT)
            if not is_full or time.monotonic() > deadline:
                raise
            logger.warning("%s: waiting for room: %s", checkpoints.place, cause)
            return None
        return {
            "generation": generation,
            "number": start.number,
            "highest": highest,
            "newest": newest and newest.number,
            "digest": newest and newest.manifest.digest,
        }

    try:
        _decide_when_there_is_room(exchange, begin)
    except Exception:
        if exchange.asked is not None:
            exchange.wait_until_heard(exchange.asked, timeout=HEARING_SECONDS)
        raise
    return start


def _decide_when_there_is_room(
    exchange: Exchange, begin: Callable[[], dict[str, Any] | None]
) -> Any:
    """Return what rank 0 begins with, which tries again while the disk is full.

    Each restart would find it as full, and all that are left would go in seconds.
    """
    begun: dict[str, Any] | None
    attempt = 0
    while (begun := exchange.decide_on_rank_0(f"{START}/{attempt}", begin)) is None:
        is_waiting.set()
        time.sleep(min(2.0**attempt, _LONGEST_PAUSE))
        is_waiting.clear()
        attempt += 1
    return begun


def _begin_on_other_ranks(checkpoints: CheckpointStore, exchange: Exchange) -> Start:
    """Open what rank 0 has found, and report whether it is visible here."""
    try:
        begun = _decide_when_there_is_room(exchange, dict)
    except RankZeroError as error:
        raise CheckpointError(f"rank 0: {error}") from error
    newest: Checkpoint | None = None
    refusal: str | None = None
    try:
        newest = _find_what_rank_0_has(checkpoints, begun)
        _check_sees_no_more(checkpoints, begun["highest"])
    except (CheckpointError, OSError) as error:
        refusal = text_of(error)
    _check_all_see_it(exchange, refusal)
    return Start(begun["generation"], begun["number"], newest)


def _check_all_see_it(exchange: Exchange, refusal: str | None) -> None:
    """Raise on all replicas if one of them has a reason not to start."""
    verdict = exchange.agree(SEEN, refusal, _list_refusals, is_end=bool)
    if verdict:
        raise CheckpointError(f"the replicas see different checkpoints.\n{verdict}")


def _list_refusals(told: list[str | None]) -> str:
    return "\n".join(
        f"rank {rank}: {text}" for rank, text in enumerate(told) if text is not None
    )


def check_all_have_directory(membership: Membership, *, has_one: bool) -> None:
    """Refuse to start if only some replicas were given a directory. Collective."""
    without = membership.exchange.agree(
        DIRECTORY, has_one, _ranks_without_directory, is_end=bool
    )
    if without:
        raise CheckpointError(
            f"rank {', '.join(map(str, without))} of {membership.world_size} has no "
            "checkpoint directory, but others have one, so checkpoints would be "
            "incomplete. Give all replicas the same checkpoint_dir "
            "(ELASTICRUN_CHECKPOINT_DIR)."
        )


def _ranks_without_directory(told: list[bool]) -> list[int]:
    """Return the ranks without a directory, unless nobody has one."""
    without = [rank for rank, has_one in enumerate(told) if not has_one]
    return without if len(without) < len(told) else []


def log_start(start: Start, environment: Environment, *, is_saving: bool) -> None:
    """Say on rank 0 where the job begins, and whether its world size is another.

    That nothing is saved is a warning, which Python shows also without any set-up.
    """
    if environment.rank != 0:
        return
    if not is_saving:
        logger.warning(
            "nothing is saved, since there is no checkpoint directory: a restart "
            "begins anew. Give init() a checkpoint_dir, or set "
            "ELASTICRUN_CHECKPOINT_DIR."
        )
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


def _find_what_rank_0_has(
    checkpoints: CheckpointStore, begun: dict[str, Any]
) -> Checkpoint | None:
    """Return the checkpoint that rank 0 resumes from.

    To agree on an older checkpoint instead would silently lose what was committed.
    """

    def look() -> Checkpoint | None:
        checkpoints.check_shared(begun["generation"])
        if begun["newest"] is None:
            return None
        return checkpoints.open(begun["newest"], begun["digest"])

    return wait_until_seen(look)


def _check_sees_no_more(checkpoints: CheckpointStore, highest: int) -> None:
    """Refuse to start over what rank 0 does not see, whose generation may be equal."""
    number = checkpoints.newest_number()
    if number > highest:
        raise CheckpointError(
            f"{checkpoints.place} on host {socket.gethostname()} has a "
            f"checkpoint {number}, but rank 0 sees none above {highest}. The "
            "checkpoint directory must be on a file system that all replicas see."
        )
