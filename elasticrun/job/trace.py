"""The trace: one JSON line for each micro-batch, to find out what was delivered."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticrun.checkpoint.files.durable import open_append


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
        places: Sequence[int] = (),
        streams: Sequence[tuple[str, int]] = (),
        inside: tuple[int, ...] = (),
        member: str | None = None,
    ) -> None:
        """Append one line.

        Args:
            indices: The real samples first, then the padding.
            places: Where they are in the global batch, if they are no neighbours there.
            streams: The stream of each sample, and its number there, if it is of one.
            inside: Of a loop in the body of another one, what tells it from the others
                there.
            member: Which loader of a combined one delivers them.
        """
        line = {
            **self._common,
            "epoch": epoch,
            "loop": loop,
            "batch": batch,
            "micro": micro,
            "indices": indices,
            "num_valid": num_valid,
            **({"places": list(places)} if places else {}),
            **({"streams": streams} if streams else {}),
            **({"inside": inside} if inside else {}),
            **({} if member is None else {"member": member}),
        }
        with self._named():
            self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        with self._named():
            self._file.close()

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = self._file.name  # A full disk names none.
            raise


def read_trace(directory: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Return every line of a trace, in the order (generation, rank, line).

    A last line that a killed replica did not finish is left out.
    """
    paths = sorted(
        Path(directory).glob("*-*.jsonl"),
        key=lambda path: tuple(map(int, path.stem.split("-"))),
    )
    return [
        json.loads(line)
        for path in paths
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True)
        if line.endswith("\n")
    ]


def samples_of_loop(
    lines: Iterable[dict[str, Any]], *, epoch: int, loop: int
) -> dict[int, list[int]]:
    """Return the real samples of each global batch of a loop, in their order.

    A batch that was delivered again after a crash counts once, as it was delivered
    last. Loops in the body of this one are left out. Of a combined loader's batch, the
    samples of one member follow those of another.
    """
    own = [
        line
        for line in lines
        if line["epoch"] == epoch and line["loop"] == loop and "inside" not in line
    ]
    newest: dict[int, int] = {}
    for line in own:
        batch = line["batch"]
        newest[batch] = max(newest.get(batch, 0), line["generation"])
    batches: dict[int, list[int]] = {batch: [] for batch in sorted(newest)}

    def place(line: dict[str, Any]) -> tuple[str, int, int]:
        return line.get("member", ""), line["rank"], line["micro"]

    places: dict[int, list[int]] = {}
    for line in sorted(own, key=place):
        batch = line["batch"]
        if line["generation"] == newest[batch]:
            batches[batch] += line["indices"][: line["num_valid"]]
            places.setdefault(batch, []).extend(
                line.get("places", ())[: line["num_valid"]]
            )
    for batch, own_places in places.items():
        if len(own_places) == len(batches[batch]):  # Of streams, which interleave.
            found = zip(own_places, batches[batch], strict=True)
            batches[batch] = [sample for _, sample in sorted(found)]
    return batches
