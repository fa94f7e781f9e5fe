"""Any program, stopped or killed anywhere, delivers what it does when left alone."""

from __future__ import annotations

import contextlib
import io
import runpy
import shutil
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.nn.modules.module import register_module_forward_pre_hook

from elasticrun import JobStopped, request_stop
from tests.support.any_program import (
    Batch,
    ByHand,
    Delivered,
    Epochs,
    Loop,
    Place,
    Program,
    Run,
    Steps,
    programs,
    stops,
)
from tests.support.generations import Crash, run_once


def uninterrupted(program: Program, *, trains: bool = False) -> Run:
    run = Run(program, trains=trains)
    run_once(run)
    assert run.is_finished
    return run


def interrupted(
    program: Program,
    stops: list[int],
    *,
    kind: str,
    save_interval: float | str,
    trains: bool = False,
) -> Iterator[Run]:
    """Yield what ran in each generation, until the program comes to its end."""
    with tempfile.TemporaryDirectory() as directory:
        for stop_in in [*stops, -1]:
            run = Run(program, stop_in=stop_in, kind=kind, trains=trains)
            run_once(run, directory, save_interval=save_interval)
            yield run
            if run.is_finished:
                return


@pytest.mark.slow(45)
@given(program=programs, stops=stops)
@settings(max_examples=40)
@example([Epochs(2, (Loop(0), Loop(0), Loop(2)))], [4, 1, 1, 1, 6])
@example([Loop(2), Epochs(1, (Loop(0),)), Loop(2), Epochs(1, (Loop(0),))], [2, 3, 3])
@example([Epochs(3, (Loop(0), Loop(2)), break_in=1), Loop(2)], [13])
@example([Epochs(3, (Loop(0),), break_in=0), Epochs(2, (Loop(2), Loop(0)))], [6])
@example([Loop(0, num_batches=5), Loop(0, num_batches=5)], [2, 2, 2])
@example([Loop(1, num_batches=4, inside=(Loop(3, num_batches=2),) * 2)], [4, 6])
@example([Steps(3, (Loop(2),)), Loop(0), Steps(3)], [1, 6, 3, 2])
@example([Epochs(2, (Steps(4, break_in=1), Loop(2)))], [2, 3])
@example([Loop(2), ByHand(0, 12)], [3, 4, 4])
@example([Epochs(3, (Loop(4), Loop(5)))], [3, 1, 5, 1, 7])
@example([Loop(4, num_batches=9), Loop(5, num_batches=4)], [3, 4, 4])
@example([Loop(6, inside=(Loop(8),)), Loop(7, num_batches=5)], [4, 6, 4, 2])
@example([Loop(0, rate=2), Loop(0, rate=3)], [1, 2])
def test_stops_do_not_show(program: Program, stops: list[int]) -> None:
    check_stops(program, stops)


@pytest.mark.soak
@given(program=programs, stops=stops)
@settings(max_examples=2000)
def test_nor_in_thousands_of_programs(program: Program, stops: list[int]) -> None:
    check_stops(program, stops)


def check_stops(program: Program, stops: list[int]) -> None:
    """Compare what is delivered, and each bit of what is trained."""
    whole = uninterrupted(program, trains=True)
    runs = [*interrupted(program, stops, kind="stop", save_interval="off", trains=True)]
    assert [batch for run in runs for batch in run.delivered] == whole.delivered
    for trained, expected in zip(runs[-1].parameters, whole.parameters, strict=True):
        assert torch.equal(trained, expected)


@pytest.mark.slow
@given(program=programs, stops=stops)
@settings(max_examples=20)
@example([Epochs(2, (Loop(0), Loop(0), Loop(2)))], [4, 1, 1, 1, 6])
def test_after_crashes_only_what_followed_the_last_save_is_delivered_again(
    program: Program, stops: list[int]
) -> None:
    whole = uninterrupted(program).delivered
    seen: dict[Batch, dict[str, list[float]]] = {}
    for run in interrupted(program, stops, kind="crash", save_interval=0):
        for number, (key, samples) in enumerate(run.delivered):
            assert seen.setdefault(key, samples) == samples
            if number > 0:
                assert key not in [key for key, _ in run.delivered[:number]]
    assert list(seen.items()) == whole


generations = st.lists(
    st.tuples(
        st.integers(1, 5),  # The world size.
        st.none() | st.integers(1, 2),  # What fits.
        st.integers(1, 12),
        st.sampled_from(["stop", "crash"]),
    ),
    max_size=4,
)


@pytest.mark.slow
@given(program=programs, generations=generations)
@settings(max_examples=12)
@example([Epochs(2, (Loop(0, inside=(Loop(2),)), Loop(5)))], [(3, 1, 4, "stop")] * 3)
@example([Loop(6), Loop(7, num_batches=6), Loop(8)], [(3, 2, 3, "crash")] * 4)
@example(
    [Loop(8, ending="break"), ByHand(1, 9)], [(2, None, 3, "stop"), (5, 1, 4, "stop")]
)
def test_neither_world_sizes_nor_what_fits_shows(
    program: Program, generations: list[tuple[int, int | None, int, str]]
) -> None:
    check_world_sizes(program, generations)


@pytest.mark.soak
@given(program=programs, generations=generations)
@settings(max_examples=2000)
def test_in_thousands_of_programs(
    program: Program, generations: list[tuple[int, int | None, int, str]]
) -> None:
    check_world_sizes(program, generations)


def check_world_sizes(
    program: Program, generations: list[tuple[int, int | None, int, str]]
) -> None:
    calm = Run(program, draws=False)
    run_once(calm)
    seen: dict[Batch, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        for number, (world_size, most, stop_in, kind) in enumerate(
            [*generations, (1, None, -1, "stop")]
        ):
            delivered, is_finished = at_world_size(
                program, place, number, world_size, most, stop_in=stop_in, kind=kind
            )
            for key, samples in delivered:
                assert seen.setdefault(key, samples) == samples
            if is_finished:
                break
    assert list(seen.items()) == calm.delivered


def at_world_size(
    program: Program,
    place: Path,
    number: int,
    world_size: int,
    most: int | None,
    *,
    stop_in: int,
    kind: str,
) -> tuple[Delivered, bool]:
    """Run each replica of a generation alone, from what the one before has left.

    Nothing that they deliver depends on what another one computes, so that each comes
    to the same boundaries; what rank 0 has saved is gone on with.
    """
    before, after = place / f"{number}", place / f"{number + 1}"
    before.mkdir(exist_ok=True)
    runs = []
    for rank in range(world_size):
        own = Place((rank, world_size), most)
        run = Run(program, stop_in=stop_in, kind=kind, place=own, draws=False)
        directory = after if rank == 0 else place / "other"
        shutil.copytree(before, directory)
        run_once(run, directory, save_every=2)
        if rank > 0:
            shutil.rmtree(directory)
        runs.append(run)
    assert len({run.is_finished for run in runs}) == 1
    delivered: Delivered = []
    for parts in zip(*(run.delivered for run in runs), strict=True):
        assert len({key for key, _ in parts}) == 1
        joined: dict[str, list[float]] = {}
        for _, samples in parts:
            for of, own_part in samples.items():
                joined.setdefault(of, []).extend(own_part)
        delivered.append((parts[0][0], joined))
    return delivered, runs[0].is_finished


CLASSIFIER = Path(__file__).parents[1] / "support" / "scripts" / "classifier"


def classify(output: Path, leave_in: int = -1, kind: str = "stop") -> list[str]:
    """Run a whole script with modules of its own, and return what it prints.

    Args:
        leave_in: The pass through one of the network's modules in which it is left.
    """
    num_passes = 0

    def leave(*_: Any) -> None:
        nonlocal num_passes
        num_passes += 1
        if num_passes == leave_in and kind == "kill":
            raise Crash
        if num_passes == leave_in:
            request_stop()

    hook = register_module_forward_pre_hook(leave)
    try:
        with (
            mock.patch.object(sys, "argv", ["train.py", str(output)]),
            mock.patch.object(sys, "path", [str(CLASSIFIER), *sys.path]),
            contextlib.redirect_stdout(io.StringIO()) as printed,
            contextlib.suppress(JobStopped, Crash),
        ):
            runpy.run_path(str(CLASSIFIER / "train.py"), run_name="__main__")
    finally:
        hook.remove()
    return printed.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@given(
    ends=st.lists(
        st.tuples(st.integers(1, 150), st.sampled_from(["stop", "kill"])), max_size=4
    )
)
@settings(max_examples=12)
@example([(45, "stop"), (5, "kill"), (70, "kill")])
def test_a_whole_script_prints_and_trains_the_same(ends: list[tuple[int, str]]) -> None:
    calm, model = classified([])
    assert len(calm) == len(set(calm)) == 7
    printed, trained = classified(ends)
    assert list(dict.fromkeys(printed)) == calm
    assert trained.keys() == model.keys()
    assert all(torch.equal(trained[key], model[key]) for key in model)


def classified(ends: list[tuple[int, str]]) -> tuple[list[str], dict[str, Any]]:
    """Return what it prints from start to start, and the model in the end."""
    with tempfile.TemporaryDirectory() as folder:
        output, printed = Path(folder), list[str]()
        for end in [*ends, (-1, "")]:
            script = partial(classify, output, *end)
            printed += run_once(script, output / "job", save_every=3)
        return printed, torch.load(output / "model.pt")
