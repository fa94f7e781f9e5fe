"""The trace: one JSON line for each delivered micro-batch, to debug data with."""

from __future__ import annotations

import json
from pathlib import Path

from elasticrun.checkpoint.files import open_append


class Trace:
    """Appends to `<directory>/<generation>-<rank>.jsonl`; a line survives a kill -9."""

    def __init__(
        self, directory: str, *, generation: int, rank: int, world_size: int
    ) -> None:
        self._file = open_append(Path(directory) / f"{generation}-{rank}.jsonl")
        self._common = {
            "generation": generation,
            "rank": rank,
            "world_size": world_size,
        }

    def write(
        self,
        *,
        epoch: int,
        loop: int,
        batch: int,
        micro: int,
        indices: list[int],
        num_valid: int,
    ) -> None:
        """Append one line; `indices` has the real samples first, then the padding."""
        line = {
            **self._common,
            "epoch": epoch,
            "loop": loop,
            "batch": batch,
            "micro": micro,
            "indices": indices,
            "num_valid": num_valid,
        }
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
