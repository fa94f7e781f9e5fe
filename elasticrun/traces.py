"""Reading what `ELASTICRUN_TRACE` recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


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
    last.
    """
    own = [line for line in lines if line["epoch"] == epoch and line["loop"] == loop]
    newest: dict[int, int] = {}
    for line in own:
        batch = line["batch"]
        newest[batch] = max(newest.get(batch, 0), line["generation"])
    batches: dict[int, list[int]] = {batch: [] for batch in sorted(newest)}
    for line in sorted(own, key=lambda line: (line["rank"], line["micro"])):
        if line["generation"] == newest[line["batch"]]:
            batches[line["batch"]] += line["indices"][: line["num_valid"]]
    return batches
