"""The claim on an object store, which keeps a second live job out.

A store has no locks. Each start puts a claim with the next number, and who has the
highest owns the place; nobody ever writes over another's. The owner's thread puts its
own again every few seconds, so that others see whether it lives; and before each commit
the owner looks whether it still owns the place.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil

from elasticrun.checkpoint.lock import Owner
from elasticrun.checkpoint.objects import Objects
from elasticrun.errors import CheckpointError, CheckpointWarning

logger = logging.getLogger(__name__)

_NAME = re.compile("claim-([0-9]{8,})")
_PATIENCE = 10.0  # Seconds for the last renewal, of a store that may be gone.
_LONG_AGO = 3600.0  # Clocks that differ by so much cannot even log in to most stores.


@dataclass(frozen=True)
class Rhythm:
    """How often a claim is renewed, and when it counts as given up; in seconds.

    Attributes:
        silence: How long a claim must stay as it is, before the eyes of who wants the
            place. Nobody's clock is compared with another's.
    """

    renewal: float = 10.0
    look: float = 0.5
    silence: float = 60.0


@dataclass(frozen=True)
class Claim:
    """Who owns the place.

    Attributes:
        token: Tells it from every other.
        machine: Of the owner: where its process number means something.
        renewals: Counts up while the owner lives.
        time: Of the last one, by the owner's clock.
        folder: The checkpoint that it has begun last.
        is_released: Whether the owner has given the place back.
    """

    token: str
    machine: str
    owner: Owner
    renewals: int = 0
    time: float = 0.0
    folder: str | None = None
    is_released: bool = False

    @classmethod
    def decode(cls, data: bytes) -> Claim:
        """Return what `encode` wrote.

        Raises:
            ValueError: It is something else.
        """
        try:
            fields = json.loads(data)
            return cls(**{**fields, "owner": Owner(**fields["owner"])})
        except (KeyError, TypeError) as error:
            raise ValueError(f"no claim: {error!r}") from error

    def encode(self) -> bytes:
        """Return it as JSON."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @property
    def is_over(self) -> bool:
        """Whether its owner is known to write no more."""
        return self.is_released or (
            self.machine == _this_machine() and not _lives(self.owner)
        )

    @property
    def is_old(self) -> bool:
        """Whether nothing was heard of its owner for so long that clocks can tell."""
        return abs(time.time() - self.time) > _LONG_AGO


class StoreClaim:
    """This process's claim on the place of some objects."""

    def __init__(self, objects: Objects, *, rhythm: Rhythm | None = None) -> None:
        self._objects = objects
        self._rhythm = rhythm or Rhythm()
        self._number = 0
        self._own: Claim | None = None
        self._guard = threading.Lock()
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.left_behind: str | None = None

    @property
    def name(self) -> str | None:
        """The name of the object, None without a claim."""
        return None if self._own is None else _name(self._number)

    def acquire(self, *, timeout: float) -> None:
        """Claim the place, once its owner has released it, or is dead, or silent.

        Args:
            timeout: Seconds that an owner is given that lives, but may be about to
                exit.

        Raises:
            CheckpointError: A live job owns it.
            OSError: The store cannot be read or written.
        """
        if self._own is not None:
            raise _in_use(self._objects, self._own)
        watch = _Watch(self._rhythm.silence, time.monotonic() + timeout)
        while True:
            number, claim = newest_claim(self._objects)
            if claim is None or claim.is_over:
                may_take = True
            elif watch.has_seen_life(number, claim):
                raise _in_use(self._objects, claim)
            else:
                may_take = claim.is_old or watch.is_silent
            if may_take and self._take(number + 1):
                break
            if not may_take:
                time.sleep(self._rhythm.look)
        if claim is not None and not claim.is_over:
            self.left_behind = claim.folder
            warnings.warn(
                f"{self._objects.place} is taken over from {claim.owner}, of which "
                "nothing was heard for a while. If that job still lives, it stops at "
                "its next save.",
                CheckpointWarning,
                stacklevel=4,
            )
        self._forget_older()
        self._start_renewing()

    def check(self) -> None:
        """Refuse to go on if another job has claimed the place.

        Raises:
            CheckpointError: It has.
            OSError: The store cannot be read.
        """
        if self._own is None:
            raise ValueError(f"{self._objects.place} was not acquired")
        own, next_one = (
            _read(self._objects, self._number),
            _read(self._objects, self._number + 1),
        )
        if own is None or own.token != self._own.token or next_one is not None:
            _, newest = newest_claim(self._objects)
            by = f" ({newest.owner})" if newest is not None else ""
            raise CheckpointError(
                f"another job has taken over {self._objects.place}{by}, because it "
                "heard nothing of this one, which had it since "
                f"{self._own.owner.since}. Two jobs would mix their checkpoints, so "
                "this one stops without saving. Let one of them run; give the other a "
                "checkpoint directory of its own (ELASTICRUN_CHECKPOINT_DIR)."
            )

    def begin(self, folder: str) -> None:
        """Say which checkpoint is written, for whoever may take over meanwhile.

        Raises:
            CheckpointError: Another job has claimed the place.
            OSError: The store cannot be read or written.
        """
        self.check()
        self._renew(folder=folder)

    def release(self) -> None:
        """Give the place back; it may be free already."""
        if self._own is None:
            return
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE)
        try:
            self.check()
            self._renew(is_released=True)
        except (OSError, CheckpointError) as error:
            logger.warning("%s was not given back: %s", self._objects.place, error)
        self._own, self._thread = None, None

    def _take(self, number: int) -> bool:
        """Put a claim of this number; return whether this process has it."""
        own = Claim(
            token=secrets.token_hex(16),
            machine=_this_machine(),
            owner=Owner.this_process(),
            time=time.time(),
        )
        self._objects.put_new(_name(number), own.encode())
        # Read back: a store may know no other way to tell who came first.
        found = _read(self._objects, number)
        if found is None or found.token != own.token:
            return False
        self._number, self._own = number, own
        return True

    def _forget_older(self) -> None:
        """Remove claims that nobody needs: all but this one and the one before."""
        with contextlib.suppress(OSError):  # The next start will do it.
            for number in _numbers(self._objects):
                if number < self._number - 1:
                    self._objects.remove_object(_name(number))

    def _renew(self, *, folder: str | None = None, is_released: bool = False) -> None:
        with self._guard:
            assert self._own is not None
            own = replace(
                self._own,
                renewals=self._own.renewals + 1,
                time=time.time(),
                folder=folder or self._own.folder,
                is_released=is_released,
            )
            self._objects.put(_name(self._number), own.encode())
            self._own = own

    def _start_renewing(self) -> None:
        self._has_ended.clear()
        self._thread = threading.Thread(
            target=self._keep_renewing, name="elasticrun-claim", daemon=True
        )
        self._thread.start()

    def _keep_renewing(self) -> None:
        while not self._has_ended.wait(self._rhythm.renewal):
            try:
                self.check()
                self._renew()
            except CheckpointError as error:
                logger.error("%s", error)
                return
            except OSError as error:  # It may come back.
                logger.info("the claim was not renewed: %s", error)


class _Watch:
    """Looks whether a claim is renewed."""

    def __init__(self, silence: float, deadline: float) -> None:
        self._silence = silence
        self._deadline = deadline
        self._seen: tuple[int, str, int] | None = None
        self._since = 0.0
        self._has_changed = False

    def has_seen_life(self, number: int, claim: Claim) -> bool:
        """Take a look; return whether the owner lives and has had its time."""
        now = time.monotonic()
        seen = number, claim.token, claim.renewals
        if seen != self._seen:
            self._has_changed = self._seen is not None
            self._seen, self._since = seen, now
        return self._has_changed and now >= self._deadline

    @property
    def is_silent(self) -> bool:
        """Whether nothing has changed for long."""
        return time.monotonic() - self._since >= self._silence


def newest_claim(objects: Objects) -> tuple[int, Claim | None]:
    """Return the highest number and its claim; 0 and None if there never was any.

    Raises:
        OSError: It cannot be told.
    """
    number = max(_numbers(objects), default=0)
    while _read(objects, number + 1) is not None:  # A list may lag behind.
        number += 1
    return number, _read(objects, number)


def find_claimant(objects: Objects) -> Owner | None:
    """Return who owns the place now, as far as its claim tells.

    Raises:
        OSError: It cannot be told.
    """
    _, claim = newest_claim(objects)
    return None if claim is None or claim.is_over or claim.is_old else claim.owner


def _numbers(objects: Objects) -> list[int]:
    return [int(m[1]) for name in objects.list() if (m := _NAME.fullmatch(name))]


def _read(objects: Objects, number: int) -> Claim | None:
    with contextlib.suppress(FileNotFoundError):
        data = objects.get(_name(number))
        try:
            return Claim.decode(data)
        except ValueError:  # Whoever wrote it does not live by our rules.
            unknown = Owner("an unknown host", 0, 0.0, "an unknown time")
            return Claim(token=str(data), machine="", owner=unknown)
    return None


def _name(number: int) -> str:
    return f"claim-{number:08d}"


def _in_use(objects: Objects, claim: Claim) -> CheckpointError:
    return CheckpointError(
        f"{objects.place} is in use by a live job ({claim.owner}). Two jobs in one "
        "directory would remove each other's checkpoints. Stop that job or wait for "
        "its end, or give this one a directory of its own (ELASTICRUN_CHECKPOINT_DIR)."
    )


def _this_machine() -> str:
    """Return what is the same only where process numbers mean the same processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # It is not Linux: nothing can be told of any process.
        return f"{socket.gethostname()} {secrets.token_hex(8)}"


def _lives(owner: Owner) -> bool:
    try:
        process = psutil.Process(owner.pid)
        is_same = abs(process.create_time() - owner.process_started) < 1.0
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
