"""What a replica alone has, its part of sums and its random generators, for others.

entry            each boundary: what it has there
add_part, look   behind the last one: as it comes
Told             what another one's journal tells, also of the next boundary
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from elasticrun.checkpoint.states.generators import Generators, bytes_of
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.replicas.records import Records

_UNKNOWN = -1


class Entry(NamedTuple):
    """What a replica alone has at a boundary.

    Attributes:
        parts: Of sums, by the states' names, as JSON has them.
        cell: Of its record, with its random generators; -1 if these are not known.
        is_complete: Whether all replicas have taken part in the step before it, as is
            known where their gradients were averaged.
        since: The number of the boundary before it.
        history: A checksum of what this replica has drawn and added up, and when, in
            all steps up to there. That of another one is the same if it does alike.
    """

    parts: dict[str, Any]
    cell: int
    is_complete: bool
    since: int
    history: int

    def is_like(self, other: Entry) -> bool:
        """Whether both replicas have drawn and added up alike, in the same steps."""
        return (self.since, self.history) == (other.since, other.history)


_BEGUN = Entry({}, _UNKNOWN, is_complete=False, since=-1, history=0)


class Journal:
    """Writes this replica's record."""

    def __init__(self, records: Records, generators: Generators) -> None:
        self._records = records
        self._generators = generators
        generators.watch_anchors(records.put_anchors)
        self._drawn: bytes | None = b""  # The generators at the last look,
        self._cell = _UNKNOWN  # and where they are recorded.
        self._needed: set[int] = set()  # The cells of boundaries in the record.
        self._last = -1  # Of these.
        self._history = 0  # As of that one, and what has come since.
        self._turn = 0

    def entry(
        self, states: Iterable[BaseState], *, is_complete: bool
    ) -> tuple[str, int]:
        """Return what `write` takes, for a boundary whose states were remembered."""
        self._record_draws(self._generators.seen)
        parts = {
            state.name: part
            for state in states
            if (part := state.own_part()) is not None
        }
        if is_complete:  # In others replicas may have different numbers of batches.
            self._history = _later(self._history, self._turn)
        # Not all by `json.dumps`, which takes longer than all else here.
        text = json.dumps(parts) if parts else "{}"
        rest = f"{is_complete:d},{self._last},{self._history}"
        return f"[{text},{self._cell},{rest}]", self._cell

    def write(self, entries: Mapping[int, tuple[str, int]]) -> None:
        """Record boundaries, by their numbers, in place of what was recorded before.

        Raises:
            RecordTooLargeError: They take more than 1 MiB.
        """
        texts = [f'"{number}":{text}' for number, (text, _) in entries.items()]
        self._records.write(f"{{{','.join(texts)}}}")
        self._needed = {cell for _, cell in entries.values()}
        self._last = max(entries, default=-1)
        self._turn = 0

    def add_part(self, name: str, key: str | int | None, change: Any) -> None:
        """Record that this replica adds to its part of a sum, or gives it away."""
        self._add("part", name, key, value=change)

    def look(self) -> None:
        """Record the generators if they were drawn from since the last look."""
        self._record_draws(self._generators.look())

    def _record_draws(self, drawn: bytes | None) -> None:
        if drawn is not self._drawn:
            self._drawn = drawn
            needed = self._needed | {self._cell}
            self._cell = _UNKNOWN
            if drawn is not None:
                self._cell = self._records.fill_cell(drawn, but=needed)
            self._add("drawn", value=self._cell)

    def _add(self, *what: Any, value: Any) -> None:
        shape = json.dumps(what).encode()
        self._turn = zlib.crc32(shape, self._turn)
        self._records.add(shape + b"\t" + json.dumps(value).encode())


class Told:
    """What the record of a replica tells, which may be dead.

    Attributes:
        entries: Of boundaries, by their numbers. None at all if it cannot know its part
            of sums.
        next: Of the boundary behind them, if it had nothing more to do in front of it;
            None if that is not known.
        offer: The boundaries to which it can put its states back, each with its random
            generators as they are saved.
        has_offered: Whether it has said so; who is dead has not.
    """

    def __init__(self, records: Records, rank: int) -> None:
        self._records = records
        self._rank = rank
        values, lines = records.read(rank)
        self.entries = {int(n): Entry(*each) for n, each in (values or {}).items()}
        last = max(self.entries, default=-1)
        # Before the first boundary it has no part of anything.
        begun = _BEGUN if values is None else self.entries.get(last)
        self.next: Entry | None = None
        if begun is not None and lines is not None:
            self.next = _after(begun, last, lines)
        offer = records.read_offer(rank)
        self.has_offered = offer != b""
        texts = json.loads(offer or b"{}").items()
        self.offer = {int(n): base64.b64decode(each) for n, each in texts}

    def at(self, number: int) -> Entry | None:
        """Return what is recorded of a boundary, else what the next one would be."""
        return self.entries.get(number, self.next)

    def generators_at(self, number: int) -> bytes:
        """Return its random generators at a boundary, as they are saved."""
        if number in self.offer:
            return self.offer[number]
        entry = self.at(number)
        assert entry is not None
        return bytes_of(
            self._records.read_cell(self._rank, entry.cell),
            self._records.read_anchors(self._rank),
        )


def encode_offer(generators: Mapping[int, bytes]) -> bytes:
    """Return what `Told` reads as an offer."""
    texts = {n: base64.b64encode(each).decode() for n, each in generators.items()}
    return json.dumps(texts).encode()


def _after(entry: Entry, number: int, lines: Iterable[bytes]) -> Entry:
    """Return what a replica has after a boundary and what it has done since."""
    parts, cell, turn = dict(entry.parts), entry.cell, 0
    for line in lines:
        shape, _, value = line.partition(b"\t")
        turn = zlib.crc32(shape, turn)
        kind, *what = json.loads(shape)
        if kind == "drawn":
            cell = json.loads(value)
            continue
        name, key = what
        if key is None:  # It has given it away.
            parts[name] = []
        else:
            parts[name] = [*parts.get(name, ()), [key, json.loads(value)]]
    return Entry(parts, cell, True, number, _later(entry.history, turn))


def _later(history: int, turn: int) -> int:
    return zlib.crc32(turn.to_bytes(4, "little"), history)
