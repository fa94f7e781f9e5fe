"""How nodes find each other through the checkpoint directory.

The directory has a folder `rendezvous`. The node that holds its lock (in an object
store, its claim) serves the rendezvous, and writes the address there. When its process
ends, so does the lock, and another node takes it.
"""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, dataclass

from elasticrun.checkpoint.storage.claim import ClaimTiming
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.errors import CheckpointError

_FILE = "endpoint.json"
_WATCH_SECONDS = 1.0
# A job's own claim has more time: whoever takes that ends what another has trained.
_TIMING = ClaimTiming(renewal=3.0, silence=12.0)


@dataclass(frozen=True)
class Endpoint:
    """Where a node serves the rendezvous.

    Attributes:
        token: What the store there holds, so that nobody takes another one for it.
    """

    host: str
    port: int
    token: str
    name: str


class MeetingPlace:
    """The folder in which nodes look for each other.

    Args:
        place: The checkpoint directory: a path or a URL.

    Attributes:
        is_overruled: Whether another node has written that it serves, though this one
            does: where locks mean nothing, or the store was not reached for too long.
    """

    def __init__(self, place: str, name: str) -> None:
        self._storage = storage_at(f"{place}/rendezvous", timing=_TIMING)
        self._name = name
        self._has_ended = threading.Event()
        self.is_overruled = False

    def take(self) -> bool:
        """Return whether this node is to serve, since nobody does."""
        try:
            self._storage.acquire(timeout=0)
        except CheckpointError as error:
            if isinstance(error.__cause__, (OSError, ValueError)):
                raise OSError(str(error)) from error
            return False  # Another one lives.
        return True

    def announce(self, host: str, port: int, token: str) -> None:
        """Tell the others where this node serves, and watch whether that stands."""
        own = json.dumps(asdict(Endpoint(host, port, token, self._name))).encode()
        self._storage.replace(_FILE, own)
        self._has_ended.clear()
        threading.Thread(target=self._watch, args=(own,), daemon=True).start()

    def find(self) -> Endpoint:
        """Return where another node serves, or did once."""
        try:
            found = Endpoint(**json.loads(self._storage.read(_FILE)))
        except FileNotFoundError as error:
            raise OSError(
                "the node that serves it has not written its address yet"
            ) from error
        except (ValueError, TypeError, CheckpointError) as error:
            raise OSError(f"{_FILE} cannot be read: {error}") from error
        if found.name != self._name:
            raise OSError(
                f"another job, {found.name}, meets there; this one needs a "
                "--checkpoint-dir of its own"
            )
        return found

    def release(self) -> None:
        self._has_ended.set()
        self._storage.release()

    def _watch(self, own: bytes) -> None:
        """Look whether another node has written there; in a thread."""
        while not self._has_ended.wait(_WATCH_SECONDS):
            try:
                self.is_overruled = self._storage.read(_FILE) != own
            except FileNotFoundError:
                self.is_overruled = True
            except (OSError, CheckpointError):  # It may come back.
                continue
