"""The claim on an object store, which keeps a second live job out.

An object store has no locks. So a job owns the place by a small object, its claim:

1. A start reads the claim with the highest number. It may go on if that was released,
   if its owner is dead on this machine, or once it has stayed the same for a minute
   before the start's own eyes: no clock is compared with another one.
2. It puts a claim with the next number, never over another one, and reads it back: of
   two that do so at once, one finds the other's there and begins again.
3. A thread puts the claim again every ten seconds, so that others see a living owner.
4. Before each save and each manifest the owner looks whether its claim is still there
   and none has a higher number. Else it stops, and commits nothing.

It costs two small reads a save, and a minute's wait after the loss of a machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from elasticrun.checkpoint.storage.lock import ENDS_JOB, in_use_error
from elasticrun.checkpoint.storage.objects import Objects
from elasticrun.checkpoint.storage.place import OwnerProcess
from elasticrun.errors import CheckpointError, CheckpointWarning, warn_at_program
from elasticrun.logger import Logger

logger = Logger(__name__)

_NAME = re.compile("claim-([0-9]{8,})")
_LONG_AGO = 3600.0  # Clocks that differ by so much cannot even log in to most stores.
_PATIENCE = 10.0  # Seconds for the last renewal, of a store that may be gone.


@dataclass(frozen=True)
class Claim:
    """The content of a claim: who owns the place.

    Attributes:
        machine: Of the owner: where its process number means something.
        renewals: Counts up while the owner lives.
        time: Of the last one, by the owner's clock.
        folder: The checkpoint that it has begun last.
        is_released: Whether the owner has given the place back.
    """

    token: str
    machine: str
    owner: OwnerProcess
    renewals: int = 0
    time: float = 0.0
    folder: str | None = None
    is_released: bool = False

    @classmethod
    def decode(cls, data: bytes) -> Claim:
        try:
            fields = json.loads(data)
            return cls(**{**fields, "owner": OwnerProcess(**fields["owner"])})
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no claim: {error!r}") from error

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode() + b"\n"

    @property
    def is_over(self) -> bool:
        """Whether its owner is known to write no more."""
        return self.is_released or (
            self.machine == this_machine() and not _lives(self.owner)
        )

    @property
    def is_old(self) -> bool:
        """Whether nothing was heard of its owner for so long that clocks can tell."""
        return abs(time.time() - self.time) > _LONG_AGO


@dataclass(frozen=True)
class ClaimTiming:
    """How often a claim is renewed, and when it counts as given up; in seconds.

    Attributes:
        silence: How long a claim must stay as it is, before the eyes of who wants the
            place. Nobody's clock is compared with another's.
    """

    renewal: float = 10.0
    look: float = 0.5
    silence: float = 60.0


OF_CHECKPOINTS = ClaimTiming()


class StoreClaim:
    """This process's claim on the place of some objects."""

    def __init__(
        self, objects: Objects, *, timing: ClaimTiming = OF_CHECKPOINTS
    ) -> None:
        self._objects = objects
        self._timing = timing
        self._number = 0
        self._own: Claim | None = None
        self._guard = threading.Lock()  # A save and the renewing thread put the claim.
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None
        self.folder_of_lost_owner: str | None = None

    @property
    def name(self) -> str | None:
        """The name of the object, None without a claim."""
        return None if self._own is None else claim_name(self._number)

    def acquire(self, *, timeout: float) -> None:
        """Claim the place, once its owner has released it, or is dead, or silent."""
        if self._own is not None:
            raise in_use_error(self._objects.place, self._own.owner)
        deadline = time.monotonic() + timeout
        watch = _OwnerWatch(self._objects, self._timing.silence, deadline)
        while True:
            number, claim = newest_claim(self._objects)
            if claim is None or claim.is_over or watch.is_given_up(number, claim):
                if self._take(number + 1):
                    break
            else:
                time.sleep(self._timing.look)
        if claim is not None and not claim.is_over:
            self.folder_of_lost_owner = claim.folder
            warn_at_program(
                f"{self._objects.place} is taken over from {claim.owner}, which gave "
                "no sign of life. If that job is still alive, it stops at its next "
                "save.",
                CheckpointWarning,
            )
        self._forget_older()
        self._has_ended.clear()
        self._thread = threading.Thread(
            target=self._keep_renewing, name="elasticrun-claim", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Refuse to go on if another job has claimed the place."""
        if self._own is None:
            raise ValueError(f"{self._objects.place} was not acquired")
        own = read_claim(self._objects, self._number)
        next_one = read_claim(self._objects, self._number + 1)
        if own is None or own.token != self._own.token or next_one is not None:
            _, newest = newest_claim(self._objects)
            by = f" ({newest.owner})" if newest is not None else ""
            raise CheckpointError(
                f"another job has taken over {self._objects.place}{by}, because this "
                f"job, which had it since {self._own.owner.since}, gave no sign of "
                f"life, and {ENDS_JOB}. Run only one of them, or give the other one "
                "its own checkpoint directory (ELASTICRUN_CHECKPOINT_DIR)."
            )

    def begin(self, folder: str) -> None:
        """Check, and record in the claim which checkpoint is being written."""
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
            machine=this_machine(),
            owner=OwnerProcess.this_process(),
            time=time.time(),
        )
        self._objects.put_new(claim_name(number), own.encode())
        # Read back: a store may know no other way to tell who came first.
        found = read_claim(self._objects, number)
        if found is None or found.token != own.token:
            return False
        self._number, self._own = number, own
        return True

    def _forget_older(self) -> None:
        """Remove claims that nobody needs: all but this one and the one before."""
        with contextlib.suppress(OSError):  # The next start will do it.
            for number in claim_numbers(self._objects):
                if number < self._number - 1:
                    self._objects.remove_object(claim_name(number))

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
            self._objects.put(claim_name(self._number), own.encode())
            self._own = own

    def _keep_renewing(self) -> None:
        """Renew the claim now and then, in a thread of its own."""
        while not self._has_ended.wait(self._timing.renewal):
            try:
                self.check()
                self._renew()
            except CheckpointError as error:
                logger.error("%s", error)
                return
            except OSError as error:  # It may come back.
                logger.info("the claim was not renewed: %s", error)


class _OwnerWatch:
    """Watches whether a claim is renewed."""

    def __init__(self, objects: Objects, silence: float, deadline: float) -> None:
        self._place = objects.place
        self._silence = silence
        self._deadline = deadline
        self._seen: tuple[int, str, int] | None = None
        self._since = 0.0
        self._has_changed = False
        self._is_quiet = True

    def is_given_up(self, number: int, claim: Claim) -> bool:
        """Read the claim; return whether it has not been renewed for too long."""
        now = time.monotonic()
        seen = number, claim.token, claim.renewals
        if seen != self._seen:
            self._has_changed = self._seen is not None
            self._seen, self._since = seen, now
        if self._has_changed and now >= self._deadline:
            raise in_use_error(self._place, claim.owner)
        is_given_up = claim.is_old or now - self._since >= self._silence
        if self._is_quiet and not is_given_up:
            self._is_quiet = False
            logger.info(
                "%s is claimed by %s; waiting up to %.0f s to see whether that job is "
                "alive",
                self._place,
                claim.owner,
                self._silence,
            )
        return is_given_up


def newest_claim(objects: Objects) -> tuple[int, Claim | None]:
    """Return the highest number and its claim; 0 and None if there never was any."""
    number = max(claim_numbers(objects), default=0)
    while read_claim(objects, number + 1) is not None:  # A list may lag behind.
        number += 1
    return number, read_claim(objects, number)


def find_claimant(objects: Objects) -> OwnerProcess | None:
    """Return who owns the place now, as far as its claim tells."""
    _, claim = newest_claim(objects)
    return None if claim is None or claim.is_over or claim.is_old else claim.owner


def claim_numbers(objects: Objects) -> list[int]:
    """Return the numbers of the claims that there are."""
    return [int(m[1]) for name in objects.list() if (m := _NAME.fullmatch(name))]


def read_claim(objects: Objects, number: int) -> Claim | None:
    """Return a claim, None if it is not there."""
    with contextlib.suppress(FileNotFoundError):
        data = objects.get(claim_name(number))
        try:
            return Claim.decode(data)
        except ValueError:  # Perhaps of a later version; it can still be watched.
            unknown = OwnerProcess("an unknown host", 0, 0.0, "an unknown time")
            return Claim(str(data), "", unknown, time=time.time())
    return None


def claim_name(number: int) -> str:
    """Return the name of the object that holds a claim."""
    return f"claim-{number:08d}"


def this_machine() -> str:
    """Return what is the same only where process numbers mean the same processes."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # It is not Linux: nothing can be told of any process.
        return f"{socket.gethostname()} {secrets.token_hex(8)}"


def _lives(owner: OwnerProcess) -> bool:
    import psutil  # Not before it is needed: the command line starts without.

    try:
        process = psutil.Process(owner.pid)
        is_same = abs(process.create_time() - owner.process_started) < 1.0
        return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
