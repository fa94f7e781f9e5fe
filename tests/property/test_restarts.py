"""Any program, stopped or killed anywhere, delivers what it does when left alone."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elasticrun import (
    AdaptiveDataLoader,
    Variables,
    current_epoch,
    remaining_epochs_until,
    remaining_steps_until,
    request_stop,
)
from elasticrun.checkpoint.states.generators import seed_all
from elasticrun.job.current import current_job
from tests.support.data import Numbers
from tests.support.generations import Crash, draw_from_each, run_once
from tests.support.programs import Training


@dataclass(frozen=True)
class Loop:
    """A loop over one of the loaders, and how it ends once it has come that far.

    Attributes:
        num_batches: Of endless passes; None for a loop over one.
        inside: Loops in the body of each batch.
    """

    loader: int
    ending: str = "end"
    after: int = 0
    num_batches: int | None = None
    inside: tuple[Loop, ...] = ()


@dataclass(frozen=True)
class Steps:
    """More steps, perhaps left by `break` in one of them."""

    num_steps: int
    inside: tuple[Loop, ...] = ()
    break_in: int | None = None


@dataclass(frozen=True)
class Epochs:
    """An epoch loop, perhaps left by `break` in one of its epochs."""

    num_epochs: int
    loops: tuple[Loop | Steps, ...]
    break_in: int | None = None


@dataclass(frozen=True)
class ByHand:
    """Batches of a loader by `next`, pass after pass; the last part of a program."""

    loader: int
    num_batches: int


Program = list[Loop | Steps | Epochs | ByHand]
Batch = tuple[Any, ...]  # The place, the loader and the batch's number.
Delivered = list[tuple[Batch, list[float]]]

endings = st.sampled_from(["end", "end", "break", "exception"])
inner_loops = st.builds(
    Loop,
    loader=st.sampled_from([2, 3, 5]),
    ending=endings,
    num_batches=st.none() | st.integers(0, 3),
)
loops = st.builds(
    Loop,
    loader=st.sampled_from([0, 1, 2, 4, 5]),
    ending=endings,
    after=st.integers(0, 2),
    num_batches=st.none() | st.integers(0, 6),
) | st.builds(
    Loop,
    loader=st.integers(0, 1),
    num_batches=st.none() | st.integers(0, 4),
    inside=st.lists(inner_loops, min_size=1, max_size=2).map(tuple),
)
steps = st.builds(
    Steps,
    num_steps=st.integers(0, 4),
    inside=st.lists(inner_loops, max_size=1).map(tuple),
    break_in=st.none() | st.integers(0, 5),
)
epochs = st.builds(
    Epochs,
    num_epochs=st.integers(0, 3),
    loops=st.lists(loops | steps, max_size=3).map(tuple),
    break_in=st.none() | st.integers(0, 2),
)
programs = st.builds(
    lambda parts, last: [*parts, *last],
    st.lists(loops | steps | epochs, min_size=1, max_size=3),
    st.lists(st.builds(ByHand, st.integers(0, 2), st.integers(1, 12)), max_size=1),
)
stops = st.lists(st.integers(1, 9), max_size=6)


class Run:
    """Runs a program on real loaders; asks for a stop or dies in one of the batches."""

    def __init__(self, program: Program, *, stop_in: int = -1, kind: str = "") -> None:
        self._program = program
        self._stop_in = stop_in
        self._kind = kind
        self._num_steps = 0
        self._body: Batch = ()
        self._num_in_body = 0
        self.delivered: Delivered = []
        self.is_finished = False

    def __call__(self) -> None:
        self._loaders = [
            AdaptiveDataLoader(Numbers(7), batch_size=3, shuffle=True, name="train"),
            AdaptiveDataLoader(
                Numbers(7), batch_size=2, shuffle=True, drop_last=True, name="extra"
            ),
            AdaptiveDataLoader(Numbers(5), batch_size=2, name="valid"),
            AdaptiveDataLoader(Numbers(3), batch_size=2, shuffle=True, name="probe"),
            AdaptiveDataLoader(
                Numbers(7), {0: 2, 3: 1, 12: 4}, shuffle=True, name="planned"
            ),
            AdaptiveDataLoader(
                Numbers(7),
                batch_sampler=[[0], [1, 2, 1], [3, 4]],
                shuffle=True,
                name="listed",
            ),
        ]
        self._taken = Variables(by_hand=0)
        seed_all(0)
        self._num_epochs = 0
        for part in self._program:
            self._part(part)
        self.is_finished = True

    def _part(self, part: Loop | Steps | Epochs | ByHand) -> None:
        if isinstance(part, Loop):
            self._loop(part)
        elif isinstance(part, Steps):
            self._steps(part)
        elif isinstance(part, ByHand):
            self._by_hand(part)
        else:
            self._epochs(part)

    def _epochs(self, part: Epochs) -> None:
        first, num_steps = self._num_epochs, self._num_steps
        self._num_epochs += part.num_epochs
        most = max([0, *(p.num_steps for p in part.loops if isinstance(p, Steps))])
        for epoch in remaining_epochs_until(self._num_epochs):
            self._num_steps = num_steps + (epoch - first) * most
            for loop in part.loops:
                self._part(loop)
            if epoch == part.break_in:
                break
        self._num_steps = num_steps + part.num_epochs * most

    def _loop(self, loop: Loop) -> None:
        loader = self._loaders[loop.loader]
        source: Any = loader
        if loop.num_batches is not None:
            source = loader.batches(loop.num_batches)
        try:
            for batch in source:
                self._deliver(loader, batch)
                for inner in loop.inside:
                    self._loop(inner)
                if loader.batch_index == loop.after:
                    if loop.ending == "break":
                        break
                    if loop.ending == "exception":
                        raise LookupError
        except LookupError:
            return

    def _steps(self, part: Steps) -> None:
        self._num_steps += part.num_steps
        for step in remaining_steps_until(self._num_steps):
            self._note(("step", step), [])
            for inner in part.inside:
                self._loop(inner)
            if step == part.break_in:
                break

    def _by_hand(self, part: ByHand) -> None:
        loader = self._loaders[part.loader]
        batches = iter(loader)
        while self._taken.by_hand < part.num_batches:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(loader)
                batch = next(batches)
            self._taken.by_hand += 1
            self._deliver(loader, batch)

    def _deliver(self, loader: AdaptiveDataLoader, batch: Any) -> None:
        numbers = (loader.batch_index, loader.finished_batches, loader.index)
        self._note((loader.name, *numbers), batch.tolist())

    def _note(self, what: Batch, samples: list[float]) -> None:
        body = (current_epoch(), *current_job().progress.body)
        self._num_in_body = self._num_in_body + 1 if body == self._body else 0
        self._body = body
        key = (*body, self._num_in_body, *what)
        self.delivered.append((key, [*samples, *draw_from_each()]))
        if len(self.delivered) == self._stop_in:
            if self._kind == "crash":
                raise Crash
            request_stop()


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
def test_stops_do_not_show(program: Program, stops: list[int]) -> None:
    whole = uninterrupted(program)
    generations = interrupted(program, stops, kind="stop", save_interval="off")
    assert [batch for delivered in generations for batch in delivered] == whole


@pytest.mark.slow
@given(program=programs, stops=stops)
@settings(max_examples=20)
@example([Epochs(2, (Loop(0), Loop(0), Loop(2)))], [4, 1, 1, 1, 6])
def test_after_crashes_only_what_followed_the_last_save_is_delivered_again(
    program: Program, stops: list[int]
) -> None:
    whole = uninterrupted(program)
    seen: dict[Batch, list[float]] = {}
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
@settings(max_examples=8)
@example({4, 8, 12})  # At the end of each loop.
def test_the_model_is_bit_identical_after_any_stops(stops: set[int]) -> None:
    whole = run_once(Training(num_workers=0))
    with tempfile.TemporaryDirectory() as directory:
        for stop_in in sorted(stops):
            run_once(Training(num_workers=0, stop_in=stop_in), directory)
        end = run_once(Training(num_workers=0), directory)
    assert all(torch.equal(a, b) for a, b in zip(whole, end, strict=True))
