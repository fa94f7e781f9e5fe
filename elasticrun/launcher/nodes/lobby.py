"""What those who train tell nodes that wait for a seat, and hear from them."""

from __future__ import annotations

from torch.distributed import TCPStore


class Lobby:
    """Keys in the rendezvous's store that all nodes of a job know.

    There is one call at a time: the name of the turn that is to end once the replicas
    of those who wait are prepared.

    Args:
        name: Of the job.
    """

    def __init__(self, store: TCPStore, name: str) -> None:
        self._store = store
        self._prefix = f"elasticrun/lobby/{name}"

    def call(self, turn: str) -> None:
        """Have those who wait prepare; with an empty name, no more."""
        self._store.set(f"{self._prefix}/call", turn)

    @property
    def called(self) -> str:
        """The call, if there is one."""
        return self._read(f"{self._prefix}/call")

    def note_called(self, turn: str) -> None:
        """Tell that this node has heard such a call, and will prepare."""
        self._store.add(f"{self._prefix}/called/{turn}", 1)

    def num_called(self, turn: str) -> int:
        """Return how many nodes have; the rendezvous may not count them yet."""
        return int(self._read(f"{self._prefix}/called/{turn}") or 0)

    def note_prepared(self, turn: str) -> None:
        """Tell that this node's replicas are prepared, for such a call."""
        self._store.add(f"{self._prefix}/prepared/{turn}", 1)

    def num_prepared(self, turn: str) -> int:
        """Return how many nodes have told so."""
        return int(self._read(f"{self._prefix}/prepared/{turn}") or 0)

    def _read(self, key: str) -> str:
        """Return a value if it is there; to ask for another one would block."""
        return self._store.get(key).decode() if self._store.check([key]) else ""
