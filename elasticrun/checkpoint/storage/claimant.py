"""What a claim on an object store says, and whether its owner still lives."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from elasticrun.checkpoint.storage.lock import OwnerProcess
from elasticrun.checkpoint.storage.objects import Objects

_NAME = re.compile("claim-([0-9]{8,})")
_LONG_AGO = 3600.0  # Clocks that differ by so much cannot even log in to most stores.


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
    owner: OwnerProcess
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
            return cls(**{**fields, "owner": OwnerProcess(**fields["owner"])})
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"no claim: {error!r}") from error

    def encode(self) -> bytes:
        """Return it as JSON."""
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


def newest_claim(objects: Objects) -> tuple[int, Claim | None]:
    """Return the highest number and its claim; 0 and None if there never was any.

    Raises:
        OSError: It cannot be told.
    """
    number = max(claim_numbers(objects), default=0)
    while read_claim(objects, number + 1) is not None:  # A list may lag behind.
        number += 1
    return number, read_claim(objects, number)


def find_claimant(objects: Objects) -> OwnerProcess | None:
    """Return who owns the place now, as far as its claim tells.

    Raises:
        OSError: It cannot be told.
    """
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
