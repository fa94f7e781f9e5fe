"""Real replicas in loops of steps, with loops in their bodies, at other world sizes."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from elasticrun import (
    AdaptiveDataLoader,
    init,
    rank,
    remaining_epochs_until,
    remaining_steps_until,
    world_size,
)
from elasticrun.testing import read_trace, run_generation
from tests.support.data import Numbers
from tests.support.programs import request_stop_and_wait

Place = tuple[int, int, tuple[int, ...], int]  # Epoch, loop, inner loop, batch.


@dataclass
class Shapes:
    """Segments of steps and an evaluation, with a probe in every second batch.

    Attributes:
        stop_in: The number of batches or steps before the last rank asks for a stop.
    """

    directory: str
    stop_in: int = -1
    options: tuple[tuple[str, Any], ...] = ()
    num_turns: int = 0

    def __call__(self) -> str:
        init(self.directory, save_interval="off")
        self.num_turns = 0
        train = AdaptiveDataLoader(
            Numbers(23), 6, shuffle=True, name="train", **dict(self.options)
        )
        valid = AdaptiveDataLoader(Numbers(7), {0: 2, 9: 3}, name="valid")
        probe = AdaptiveDataLoader(Numbers(5), 2, shuffle=True, name="probe")
        pairs = AdaptiveDataLoader(
            Numbers(8), batch_sampler=[[0, 1], [2, 3, 4], [5]], shuffle=True, name="own"
        )
        for epoch in remaining_epochs_until(2):
            for _ in train.batches(5):
                if train.is_step:
                    if train.batch_index % 2:
                        list(probe)
                    list(pairs.batches(1))
                    self._turn()
            for _ in valid:
                self._turn()
            for _ in remaining_steps_until(3 * (epoch + 1)):
                list(probe.batches(2))
                self._turn()
        return "finished"

    def _turn(self) -> None:
        if world_size() > 1:
            dist.barrier()  # As the gradients of a step do.
        if self.num_turns == self.stop_in and rank() == world_size() - 1:
            request_stop_and_wait()
        self.num_turns += 1


def delivered(directory: str) -> dict[Place, list[int]]:
    batches: dict[Place, list[int]] = defaultdict(list)
    lines = read_trace(f"{directory}-trace")
    for line in sorted(lines, key=lambda line: (line["rank"], line["micro"])):
        inside = tuple(line.get("inside", ()))
        place = (line["epoch"], line["loop"], inside, line["batch"])
        batches[place] += line["indices"][: line["num_valid"]]
    return dict(batches)


def run(shapes: Shapes, world_size: int) -> list[Any]:
    variables = {"ELASTICRUN_TRACE": f"{shapes.directory}-trace"}
    return run_generation(shapes, world_size, timeout=300, variables=variables)


@pytest.mark.slow
def test_all_shapes_at_changing_world_sizes(tmp_path: Path) -> None:
    whole = Shapes(str(tmp_path / "whole"))
    assert run(whole, 1) == ["finished"]
    cut = Shapes(str(tmp_path / "cut"), options=(("max_local_batch_size", 2),))
    for num_replicas, stop_in in ((2, 2), (3, 3), (1, 2), (2, 4)):
        stopped = run(replace(cut, stop_in=stop_in), num_replicas)
        assert stopped == [None] * num_replicas
    assert run(cut, 3) == ["finished"] * 3
    assert delivered(cut.directory) == delivered(whole.directory)
