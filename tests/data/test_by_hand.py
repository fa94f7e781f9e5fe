"""Iterators that the program asks by `next`, pass after pass."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    Variables,
    request_stop,
    save_all_states,
)
from tests.support.data import Numbers
from tests.support.generations import Crash, run_once


class ByHand:
    """minGPT's loop: `next`, and another iterator when that says the pass is over."""

    def __init__(self, *, evaluates: bool = False) -> None:
        self.taken: list[int] = []
        self._evaluates = evaluates

    def __call__(self, stop_in: int, *, ending: str = "") -> None:
        train = AdaptiveDataLoader(Numbers(3), 1, shuffle=True, name="train")
        valid = AdaptiveDataLoader(Numbers(4), 2, name="valid")
        done = Variables(steps=0)
        batches = iter(train)
        while done.steps < 14:
            try:
                batch = next(batches)
            except StopIteration:
                if ending == "save":
                    save_all_states()
                if self._evaluates:
                    for _ in valid:
                        pass
                batches = iter(train)
                batch = next(batches)
            self.taken.append(int(batch))
            if done.steps == stop_in:
                if ending == "crash":
                    raise Crash
                request_stop()
            done.steps += 1


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("stop_in", range(13))
def test_it_goes_on_in_any_pass(stop_in: int, evaluates: bool, tmp_path: Path) -> None:
    whole, stopped = ByHand(evaluates=evaluates), ByHand(evaluates=evaluates)
    run_once(lambda: whole(-1))
    run_once(lambda: stopped(stop_in), tmp_path)
    assert len(stopped.taken) == stop_in + 1
    run_once(lambda: stopped(-1), tmp_path)
    assert stopped.taken == whole.taken
    for start in range(0, 12, 3):
        assert sorted(whole.taken[start : start + 3]) == [0, 1, 2]


def test_a_save_between_two_passes_goes_on_in_the_next(tmp_path: Path) -> None:
    whole, killed = ByHand(), ByHand()
    run_once(lambda: whole(-1))
    run_once(lambda: killed(10, ending="crash"), tmp_path)
    killed.taken.clear()
    run_once(lambda: killed(-1, ending="save"), tmp_path)
    assert killed.taken == whole.taken


def test_a_save_in_the_handler(tmp_path: Path) -> None:
    whole, killed = ByHand(), ByHand()
    run_once(lambda: whole(-1))
    run_once(lambda: killed(10, ending="save"), tmp_path)
    run_once(lambda: killed(-1, ending="save"), tmp_path)
    assert killed.taken == whole.taken


def test_a_generator_around_it(tmp_path: Path) -> None:
    def cycle(loader: Any) -> Iterator[Any]:
        while True:
            yield from loader

    taken: list[int] = []

    def script(*stop_in: int) -> None:
        train = AdaptiveDataLoader(Numbers(3), 1, shuffle=True, name="train")
        done = Variables(steps=0)
        batches = cycle(train)
        while done.steps < 14:
            taken.append(int(next(batches)))
            if done.steps in stop_in:
                request_stop()
            done.steps += 1

    run_once(script)
    whole = taken.copy()
    taken.clear()
    for _ in range(3):
        run_once(lambda: script(4, 8), tmp_path)
    assert taken == whole


def test_a_look_at_the_first_batch_is_none_of_the_passes(tmp_path: Path) -> None:
    taken: list[int] = []

    def script(*stop_in: int) -> None:
        train = AdaptiveDataLoader(Numbers(3), 1, shuffle=True, name="train")
        done = Variables(steps=0)
        next(iter(train), None)
        batches = iter(train)
        while done.steps < 8:
            try:
                batch = next(batches)
            except StopIteration:
                batches = iter(train)
                batch = next(batches)
            taken.append(int(batch))
            if done.steps in stop_in:
                request_stop()
            done.steps += 1

    run_once(script)
    whole = taken.copy()
    taken.clear()
    for _ in range(4):
        run_once(lambda: script(1, 3, 5), tmp_path)
    assert taken == whole
