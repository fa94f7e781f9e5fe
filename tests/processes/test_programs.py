"""Programs of all shapes in real replicas, stopped and killed: nothing of it shows."""

from __future__ import annotations

import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from elasticrun import init
from elasticrun.testing import read_trace, start_generation
from tests.support.any_program import (
    Epochs,
    Loop,
    Place,
    Program,
    Run,
    Steps,
    programs,
)
from tests.support.generations import run_once

TIMEOUT = 300.0

Generation = tuple[int, int | None, int, str]

generations = st.lists(
    st.tuples(
        st.integers(1, 4),  # The world size.
        st.none() | st.integers(1, 2),  # What fits.
        st.integers(1, 12),
        st.sampled_from(["stop", "kill"]),
    ),
    max_size=3,
)

EVERY_SHAPE: Program = [
    Loop(2),
    Epochs(
        2,
        (
            Loop(0, inside=(Loop(8), Loop(3, num_batches=2))),
            Steps(2, (Loop(5),)),
            Loop(4, ending="break", after=1),
        ),
    ),
    Loop(5),
    Loop(7, num_batches=5),
]


@dataclass(frozen=True)
class Replica:
    """Runs a program with a model that it trains; a kill takes the last rank."""

    program: Program
    directory: str
    most: int | None = None
    stop_in: int = -1
    kind: str = "stop"

    def __call__(self) -> list[Tensor]:
        torch.set_num_threads(1)
        init(self.directory, save_interval="off", save_every=2)
        run = Run(
            self.program,
            stop_in=self.stop_in,
            kind=self.kind,
            place=Place(max_local_batch_size=self.most),
            draws=False,
            trains=True,
        )
        run()
        return run.parameters


@pytest.mark.slow
def test_a_program_of_every_shape_goes_on_at_any_number_of_replicas() -> None:
    check(EVERY_SHAPE, [(3, 1, 9, "kill"), (2, None, 8, "stop"), (1, 1, 9, "kill")])


@pytest.mark.soak
@given(program=programs, generations=generations)
@settings(max_examples=40)
@example(EVERY_SHAPE, [(2, 1, 5, "stop"), (4, None, 7, "kill"), (1, 2, 3, "stop")])
def test_so_does_any_other(program: Program, generations: list[Generation]) -> None:
    check(program, generations)


def check(program: Program, generations: list[Generation]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        calm = Run(program, draws=False, trains=True)
        run_once(calm, trace_dir=str(place / "calm"))
        trace = {"ELASTICRUN_TRACE": str(place / "trace")}
        for world_size, most, stop_in, kind in [*generations, (2, None, -1, "stop")]:
            replica = Replica(program, str(place / "job"), most, stop_in, kind)
            with start_generation(replica, world_size, variables=trace) as started:
                outcomes = started.wait(timeout=TIMEOUT)
        for outcome in outcomes:
            assert outcome.exit_code == 0, outcome.error
            torch.testing.assert_close(
                outcome.result, calm.parameters, rtol=1e-6, atol=1e-9
            )
        assert delivered(place / "trace") == delivered(place / "calm")


def delivered(trace: Path) -> dict[Any, list[int]]:
    """Return the samples of each global batch, as they were delivered last.

    What is delivered in a body, by loops in it, is delivered again with it.
    """
    by_body: dict[Any, list[dict[str, Any]]] = defaultdict(list)
    for line in read_trace(trace) if trace.exists() else []:
        outer = line.get("inside", [line["batch"]])[0]
        by_body[line["epoch"], line["loop"], outer].append(line)
    batches: dict[Any, list[int]] = defaultdict(list)
    for body, lines in by_body.items():
        newest = max(line["generation"] for line in lines)
        for line in sorted(lines, key=lambda line: (line["rank"], line["micro"])):
            if line["generation"] == newest:
                inside = tuple(line.get("inside", ()))
                key = (*body[:2], inside, line["batch"], line.get("member"))
                batches[key] += line["indices"][: line["num_valid"]]
    return dict(batches)
