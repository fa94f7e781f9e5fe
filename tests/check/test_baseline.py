"""Which samples a run has had."""

from __future__ import annotations

import json
from pathlib import Path

from elasticrun.check.checked_run import CheckedRun
from elasticrun.check.checker import samples_of
from elasticrun.check.scenarios import Scenario


def test_samples_of_loops_in_a_body_are_told_apart(tmp_path: Path) -> None:
    def line(generation: int, indices: list[int], *inside: int) -> str:
        return json.dumps(
            {"generation": generation, "rank": 0, "epoch": 0, "loop": 1, "batch": 0,
             "micro": 0, "indices": indices, "num_valid": len(indices)}
            | ({"inside": inside} if inside else {})
        ) + "\n"  # fmt: skip

    run = CheckedRun(Scenario((1,)), tmp_path)
    run.trace.mkdir()
    (run.trace / "0-0.jsonl").write_text(line(0, [3, 4]) + line(0, [7], 0, 0))
    # The outer batch comes again after a kill, and with it the loop in its body.
    again = line(1, [3, 4]) + line(1, [7], 0, 0) + line(1, [8], 0, 1)
    (run.trace / "1-0.jsonl").write_text(again)
    assert samples_of(run) == {
        (0, "1", 0): [3, 4], (0, "1.0.0", 0): [7], (0, "1.0.1", 0): [8],
    }  # fmt: skip
