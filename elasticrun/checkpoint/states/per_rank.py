"""Small states that differ from rank to rank; rank 0 writes those of all ranks.

One file for each rank would mean thousands of small files in the checkpoints of a large
job. In one single file, each rank would have to read what all ranks have saved.
"""

from __future__ import annotations

import io
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from elasticrun.checkpoint.draft import Draft
from elasticrun.checkpoint.files.durable import DamagedFileError, FileRecord
from elasticrun.checkpoint.states.state import (
    RANKS_A_FILE,
    BaseState,
    SavedFiles,
    per_rank_file_name,
    replica_file_name,
)
from elasticrun.checkpoint.states.values import load_values, save_values


class PerRankState(BaseState):
    """A state of which each rank has its own, of some kilobytes."""

    is_per_replica = True

    @abstractmethod
    def derive(self, parts: Sequence[bytes], rank: int) -> None:
        """Begin on a rank of which nothing was saved, from what others have."""

    def capture(self) -> bytes:
        """Return this rank's state as bytes, which rank 0 fetches and writes."""
        buffer = io.BytesIO()
        self.save(buffer)
        return buffer.getvalue()

    def file_name(self, rank: int) -> str:
        return per_rank_file_name(self.name, rank)

    def load_from(self, checkpoint: SavedFiles, rank: int) -> bool:
        """Load what the rank has saved, or derive it; return whether one was done."""
        saved = self._saved(checkpoint, rank)
        if rank in saved:
            self.load(io.BytesIO(saved[rank]))
            return True
        first = self._saved(checkpoint, 0)
        if first:
            self.derive([first[each] for each in sorted(first)], rank)
        return bool(first)

    def _saved(self, checkpoint: SavedFiles, rank: int) -> dict[int, bytes]:
        """Return what those ranks have saved whose file is this one's."""
        name = self.file_name(rank)
        if not checkpoint.has(name):
            name = replica_file_name(self.name, rank)  # As format 1 has it.
            if not checkpoint.has(name):
                return {}
            with checkpoint.open(name) as file:
                return {rank: file.read()}
        with checkpoint.open(name) as file:
            return parts_of(load_values(file))


def write_per_rank(
    draft: Draft,
    name: str,
    fetch: Callable[[range], Mapping[int, bytes]],
    *,
    world_size: int,
) -> list[FileRecord]:
    """Write what all ranks have told of a state."""
    records = []
    for first in range(0, world_size, RANKS_A_FILE):
        ranks = range(first, min(first + RANKS_A_FILE, world_size))
        save = partial(save_values, dict(fetch(ranks)))
        records.append(draft.write(per_rank_file_name(name, first), save))
    return records


def parts_of(values: object) -> dict[int, bytes]:
    """Return what a file holds of each rank, given its values."""
    if isinstance(values, dict) and all(
        isinstance(rank, int) and isinstance(part, bytes)
        for rank, part in values.items()
    ):
        return values
    raise DamagedFileError("it does not hold one state a rank")
