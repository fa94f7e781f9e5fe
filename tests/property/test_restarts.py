"""Any program, stopped or killed anywhere, delivers what it does when left alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from elasticrun import AdaptiveDataLoader, current_epoch, remaining_epochs_until
from elasticrun.current import current_job
from tests.support.data import Numbers
from tests.support.generations import Crash, run_once
from tests.support.programs import Training


@dataclass(frozen=True)
class Loop:
    """A loop over one of the loaders, and how it ends once it has come that far."""

    loader: int
    ending: str = "end"
    after: int = 0


@dataclass(frozen=True)
class Epochs:
    """An epoch loop, perhaps left by `break` in one of its epochs."""

    num_epochs: int
    loops: tuple[Loop, ...]
    break_in: int | None = None


Program = list[Loop | Epochs]
Batch = tuple[int | None, int, int, str, int]  # Epoch, before it, loader and number.
Delivered = list[tuple[Batch, list[int]]]

loops = st.builds(
    Loop,
    loader=st.integers(0, 2),
    ending=st.sampled_from(["end", "end", "break", "exception"]),
    after=st.integers(0, 2),
)
epochs = st.builds(
    Epochs,
    num_epochs=st.integers(0, 3),
    loops=st.lists(loops, max_size=3).map(tuple),
    break_in=st.none() | st.integers(0, 2),
)
programs = st.lists(loops | epochs, min_size=1, max_size=3)
stops = st.lists(st.integers(1, 9), max_size=6)


class Run:
    """Runs a program on real loaders; asks for a stop or dies in one of the batches."""

    def __init__(self, program: Program, *, stop_in: int = -1, kind: str = "") -> None:
        self._program = program
        self._stop_in = stop_in
        self._kind = kind
        self.delivered: Delivered = []
        self.is_finished = False

    def __call__(self) -> None:
        self._loaders = [
            AdaptiveDataLoader(Numbers(7), batch_size=3, shuffle=True, name="train"),
            AdaptiveDataLoader(
                Numbers(7), batch_size=2, shuffle=True, drop_last=True, name="extra"
            ),
            AdaptiveDataLoader(Numbers(5), batch_size=2, name="valid"),
        ]
        limit = 0
        for part in self._program:
            if isinstance(part, Loop):
                self._loop(part)
                continue
            limit += part.num_epochs
            for epoch in remaining_epochs_until(limit):
                for loop in part.loops:
                    self._loop(loop)
                if epoch == part.break_in:
                    break
        self.is_finished = True

    def _loop(self, loop: Loop) -> None:
        loader = self._loaders[loop.loader]
        try:
            for batch in loader:
                self._deliver(loader, batch)
                if loader.batch_index == loop.after:
                    if loop.ending == "break":
                        break
                    if loop.ending == "exception":
                        raise LookupError
        except LookupError:
            return

    def _deliver(self, loader: AdaptiveDataLoader, batch: Any) -> None:
        position = current_job().progress.position
        key = (
            current_epoch(),
            position.finished_epochs,
            position.finished_loops,
            loader.name,
            loader.batch_index,
        )
        self.delivered.append((key, batch.tolist()))
        if len(self.delivered) == self._stop_in:
            if self._kind == "crash":
                raise Crash
            current_job().request_stop()


def uninterrupted(program: Program) -> Delivered:
    run = Run(program)
    run_once(run)
    assert run.is_finished
    return run.delivered


def interrupted(
    program: Program, stops: list[int], *, kind: str, save_interval: float | str
) -> Iterator[Delivered]:
    """Yield what each generation delivered, until the program comes to its end."""
    with tempfile.TemporaryDirectory() as directory:
        for stop_in in [*stops, -1]:
            run = Run(program, stop_in=stop_in, kind=kind)
            run_once(run, directory, save_interval=save_interval)
            yield run.delivered
            if run.is_finished:
                return


relaxed = settings(suppress_health_check=[HealthCheck.too_slow], max_examples=60)


@given(program=programs, stops=stops)
@relaxed
@example([Epochs(2, (Loop(0), Loop(0), Loop(2)))], [4, 1, 1, 1, 6])
@example([Loop(2), Epochs(1, (Loop(0),)), Loop(2), Epochs(1, (Loop(0),))], [2, 3, 3])
@example([Epochs(3, (Loop(0), Loop(2)), break_in=1), Loop(2)], [13])
@example([Epochs(3, (Loop(0),), break_in=0), Epochs(2, (Loop(2), Loop(0)))], [6])
def test_stops_do_not_show(program: Program, stops: list[int]) -> None:
    whole = uninterrupted(program)
    generations = interrupted(program, stops, kind="stop", save_interval="off")
    assert [batch for delivered in generations for batch in delivered] == whole


@pytest.mark.slow
@given(program=programs, stops=stops)
@settings(relaxed, max_examples=20)
@example([Epochs(2, (Loop(0), Loop(0), Loop(2)))], [4, 1, 1, 1, 6])
def test_after_crashes_only_what_followed_the_last_save_is_delivered_again(
    program: Program, stops: list[int]
) -> None:
    whole = uninterrupted(program)
    seen: dict[Batch, list[int]] = {}
    for delivered in interrupted(program, stops, kind="crash", save_interval=0):
        for number, (key, samples) in enumerate(delivered):
            assert seen.setdefault(key, samples) == samples
            if number > 0:
                assert key not in [key for key, _ in delivered[:number]]
    assert list(seen.items()) == whole


@pytest.mark.slow
# Torch looks for steps of the optimizer in this process only.
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@given(stops=st.sets(st.integers(1, 12), max_size=5))
@settings(relaxed, max_examples=8)
@example({4, 8, 12})  # At the end of each loop.
def test_the_model_is_bit_identical_after_any_stops(stops: set[int]) -> None:
    whole = run_once(Training(num_workers=0))
    with tempfile.TemporaryDirectory() as directory:
        for stop_in in sorted(stops):
            run_once(Training(num_workers=0, stop_in=stop_in), directory)
        end = run_once(Training(num_workers=0), directory)
    assert all(torch.equal(a, b) for a, b in zip(whole, end, strict=True))
