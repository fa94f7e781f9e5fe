"""How nodes exchange notes: under keys in the rendezvous's store."""

from __future__ import annotations

import json
import time

from torch.distributed import TCPStore

from elasticrun.launcher.nodes.attempt import Note

SILENT_SECONDS = 8.0


class RoundStore:
    """Keys under a name that only the members of one round know.

    Each node has one note in each attempt, and shows that it lives. An attempt is one
    generation: its offers, stop requests and endings. Notes of earlier attempts stay,
    so that a node which is ahead takes nothing from one that is not.

    Args:
        token: A name that no other round has.
        node: This node's number, of `num_nodes`.
    """

    def __init__(
        self, store: TCPStore, *, token: str, node: int, num_nodes: int
    ) -> None:
        self._store = store
        self._prefix = f"elasticrun/{token}"
        self._node = node
        self._others = [other for other in range(num_nodes) if other != node]
        self._there: set[str] = set()
        now = time.monotonic()
        self._heard = dict.fromkeys(self._others, (b"", now))

    def put_note(self, attempt: int, note: Note) -> None:
        """Show a note to all, in place of this attempt's earlier one."""
        self._store.set(f"{self._prefix}/{attempt}/{self._node}", json.dumps(note))

    def read(self, attempt: int) -> dict[int, Note]:
        """Return the other nodes' notes of an attempt, as far as they are there."""
        found = self._read(attempt)
        return {other: json.loads(text) for other, text in found.items()}

    def beat(self) -> list[int]:
        """Show that this node lives; return those of whom nothing was heard lately."""
        self._store.add(f"{self._prefix}/pulse/{self._node}", 1)
        pulses = self._read("pulse")
        now = time.monotonic()
        for other, pulse in pulses.items():
            if pulse != self._heard[other][0]:
                self._heard[other] = pulse, now
        return [
            o for o, (_, when) in self._heard.items() if now - when > SILENT_SECONDS
        ]

    def say_goodbye(self) -> None:
        """Tell who serves the store that this node needs it no more."""
        self._store.set(f"{self._prefix}/bye/{self._node}", "")

    def staying(self, silent: list[int]) -> set[int]:
        """Return which of the others may still need the store."""
        return set(self._others) - set(silent) - set(self._read("bye"))

    def _read(self, what: int | str) -> dict[int, bytes]:
        """Return what others have put there; to ask for what is not would block."""
        keys = {other: f"{self._prefix}/{what}/{other}" for other in self._others}
        for key in set(keys.values()) - self._there:
            if self._store.check([key]):
                self._there.add(key)
        known = {other: key for other, key in keys.items() if key in self._there}
        if not known:
            return {}
        values = self._store.multi_get(list(known.values()))
        return {other: bytes(v) for other, v in zip(known, values, strict=True)}
