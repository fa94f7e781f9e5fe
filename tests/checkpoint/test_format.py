"""A checkpoint that an earlier elasticrun has committed loads as it did there."""

from __future__ import annotations

import json
import shutil
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from elasticrun.testing import run_generation
from tests.support import kept


def resumed(directory: str) -> dict[str, Any]:
    return kept.train(directory, saves=False)


@pytest.mark.parametrize(
    ("kind", "num_saved", "num_loading"),
    [("format_1", 1, 1), ("format_1", 2, 2), ("format_1", 2, 1), ("format_2", 2, 2)],
)
def test_a_kept_checkpoint_is_resumed_as_by_those_who_wrote_it(
    tmp_path: Path, kind: str, num_saved: int, num_loading: int
) -> None:
    source = kept.FOLDER / kind / f"{num_saved}_replicas"
    directory = shutil.copytree(source, tmp_path / "checkpoints")
    with open(source.with_suffix(".jsonl")) as file:
        saved = [json.loads(line) for line in file]
    found = json.loads(
        json.dumps(
            run_generation(
                resumed, num_loading, str(directory), variables=kept.VARIABLES
            )
        )
    )
    if num_saved != num_loading:
        assert samples(found) == samples(saved)
        for each in (*found, *saved):
            del each["batches"]
        saved = saved[:num_loading]
    assert found == saved


def samples(replicas: list[dict[str, Any]]) -> list[list[int]]:
    """Return the global batches that replicas have had together."""
    batches = zip_longest(*(each["batches"] for each in replicas))
    return [[x for own, _ in shares for x in own] for shares in batches]
