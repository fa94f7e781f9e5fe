"""`Accumulator` and `once`: what they mean within one generation, and over restarts."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    JobStopped,
    LoopOrderError,
    once,
    remaining_epochs_until,
    request_stop,
    save_all_states,
)
from elasticrun.testing import Job
from tests.support.data import Numbers
from tests.support.generations import generation, run_once

NUM_SAMPLES, BATCH_SIZE = 10, 4  # Three batches.


class Script:
    """Two epochs of two loops, with blocks before, between and after them.

    It stops before the batches that it is told, counted over all generations; a batch
    after which it stops is not delivered again.
    """

    def __init__(self, stops: tuple[int, ...] = ()) -> None:
        self.stops = stops
        self.num_batches = 0
        self.seen: dict[Any, Any] = {}  # By block, what it saw; equal when replayed.
        self.effects: list[Any] = []

    def __call__(self) -> dict[Any, Any]:
        loaders = [
            AdaptiveDataLoader(Numbers(NUM_SAMPLES), BATCH_SIZE, name=name)
            for name in ("train", "valid")
        ]
        warm_up = AdaptiveDataLoader(Numbers(3), 2, name="warm-up")
        total = Accumulator()
        another = Accumulator()
        self.loop(warm_up, total)
        self.loop(warm_up, another)
        self.block("another", another, clears=False)
        self.block("before", total, clears=False)
        self.effect("job")
        for epoch in remaining_epochs_until(2):
            self.block((epoch, "first"), total, clears=False)
            of_epoch = Accumulator()
            for loader in loaders:
                of_loop = Accumulator()
                self.loop(loader, total, of_epoch, of_loop)
                self.block((epoch, loader.name), total, clears=loader.name == "train")
                self.block((epoch, loader.name, "loop"), of_loop, clears=True)
                self.effect((epoch, "mail"))
            self.block((epoch, "epoch"), of_epoch, clears=False)
        self.block("after", total, clears=True)
        self.loop(warm_up, total)
        self.block("end", total, clears=False)
        return self.seen

    def loop(self, loader: AdaptiveDataLoader, *totals: Accumulator) -> None:
        for batch in loader:
            for total in totals:
                total["samples"] += loader.num_valid
                total += {"sum": 0.1 * float(batch.sum()), "batches": 1}
                total -= {"less": 2}
            self.num_batches += 1
            if self.num_batches in self.stops:
                request_stop()

    def block(self, name: Any, total: Accumulator, *, clears: bool) -> None:
        with total.synchronized() as sums:
            assert sums is total
            seen = dict(total)
            assert self.seen.setdefault(name, seen) == seen, name
            if clears:
                total.clear()
            total["blocks"] += 1

    def effect(self, key: Any) -> None:
        if once(str(key)):
            self.effects.append(key)


@pytest.fixture(scope="module")
def uninterrupted() -> dict[Any, Any]:
    seen = run_once(Script())
    assert isinstance(seen, dict)
    return seen


def test_a_block_sees_what_loops_have_added(uninterrupted: dict[Any, Any]) -> None:
    assert uninterrupted["before"]["samples"] == 3
    assert uninterrupted[0, "train"]["samples"] == 3 + 10
    assert uninterrupted[0, "train"]["blocks"] == 2
    assert uninterrupted[0, "valid"] == {
        "samples": 10,
        "sum": pytest.approx(4.5),
        "batches": 3,
        "less": -6,
        "blocks": 1,
    }
    assert uninterrupted["end"]["samples"] == 3
    assert uninterrupted["another"]["samples"] == 3
    for epoch in (0, 1):
        assert uninterrupted[epoch, "valid", "loop"]["samples"] == 10
        assert uninterrupted[epoch, "epoch"]["samples"] == 20


@pytest.mark.slow
@settings(max_examples=25)
@given(stops=st.sets(st.integers(1, 18), max_size=6))
def test_restarts_do_not_show(
    tmp_path_factory: pytest.TempPathFactory,
    uninterrupted: dict[Any, Any],
    stops: set[int],
) -> None:
    directory = tmp_path_factory.mktemp("job")
    script = Script(tuple(stops))
    for _ in range(len(stops) + 1):
        if (seen := run_once(script, directory)) is not None:
            break
    assert seen == uninterrupted
    assert script.num_batches == 18  # No batch was delivered twice.
    assert script.effects == ["job", (0, "mail"), (1, "mail")]


def test_a_finished_job_shows_its_sums_again(
    tmp_path: Path, uninterrupted: dict[Any, Any]
) -> None:
    run_once(Script(), tmp_path)
    again = run_once(Script(), tmp_path)
    outside = ("another", "before", "after", "end")
    assert again == {name: uninterrupted[name] for name in outside if name in again}
    assert "before" in again


def sums_of(job: Job) -> list[str]:
    """Return the files of accumulators in the job's newest checkpoint."""
    assert job.newest_checkpoint is not None
    return [name for name in job.newest_checkpoint.names() if "accumulator" in name]


@pytest.mark.parametrize("is_made_again", [True, False])
def test_an_epoch_leaves_nothing_in_later_checkpoints(
    tmp_path: Path, is_made_again: bool
) -> None:
    """Also when the program, after a restart, has not made what it had made before."""

    def script(*, stops: bool) -> None:
        train = AdaptiveDataLoader(Numbers(4), 2)
        Accumulator()
        for epoch in remaining_epochs_until(3):
            if stops or is_made_again:
                Accumulator()
            for _ in train:
                if epoch == 1 and stops:
                    request_stop()

    with generation(tmp_path) as job, suppress(JobStopped):
        script(stops=True)
    assert sums_of(job) == ["accumulator", "accumulator.epoch-1"]
    with generation(tmp_path, save_every="epoch", keep=5) as job:
        script(stops=False)
        assert sums_of(job) == ["accumulator"]


def test_one_of_an_epoch_ends_with_it() -> None:
    with generation():
        train = AdaptiveDataLoader(Numbers(4), 2)
        for epoch in remaining_epochs_until(2):
            if epoch == 0:
                of_first = Accumulator()
            for _ in train:
                if epoch == 1:
                    with pytest.raises(LoopOrderError, match="made in epoch 0 is used"):
                        of_first["n"] += 1
                with pytest.raises(
                    LoopOrderError, match=r"inside the loop over `load.*once, and clear"
                ):
                    Accumulator()
        with (
            pytest.raises(LoopOrderError, match="Read it in its epoch"),
            of_first.synchronized(),
        ):
            pass


def test_outside_of_blocks_nothing_is_read() -> None:
    with generation():
        total = Accumulator(name="total")
        assert list(total) == []
        assert len(total) == 0
        assert "n" not in total
        assert "read it in a synchronized block" in repr(total["n"])
        assert "read it in a synchronized block" in repr(total)
        for wrong in (
            lambda: total.__setitem__("n", 1),
            lambda: total.__delitem__("n"),
            total.clear,
            lambda: total["l"] / total["n"],
            lambda: 2 * total["l"],
            lambda: total["l"] > 3,
            lambda: bool(total["n"]),
            lambda: float(total["l"]),
            lambda: f"{total['l']:.3f}",
        ):
            with pytest.raises(LoopOrderError, match="outside of a synchronized block"):
                wrong()


def test_adding_outside_of_loops_is_refused() -> None:
    with generation():
        total = Accumulator()
        with pytest.raises(LoopOrderError, match="would be counted twice"):
            total["n"] += 1
        with total.synchronized():
            total["n"] += 1
            assert total["n"] == 1


def test_blocks_do_not_nest() -> None:
    with generation():
        total = Accumulator()
        with (
            total.synchronized(),
            pytest.raises(LoopOrderError, match="open at once"),
            total.synchronized(),
        ):
            pass


def test_an_exception_in_a_block_keeps_what_it_changed() -> None:
    with generation():
        total = Accumulator()

        def fail() -> None:
            with total.synchronized():
                total["n"] = 2
                total["n"] /= total["missing"]

        with pytest.raises(ZeroDivisionError):
            fail()
        with total.synchronized():
            assert total["n"] == 2


def test_what_is_no_number_is_refused() -> None:
    with generation():
        total = Accumulator()
        for _ in AdaptiveDataLoader(Numbers(4), 4):
            with pytest.raises(TypeError, match="is not one real number"):
                total["n"] += "1"


def test_a_kill_before_the_next_checkpoint_repeats_an_effect(tmp_path: Path) -> None:
    for expected in (True, True):
        with generation(tmp_path):
            assert once("mail") is expected
            assert once("mail") is False
    with generation(tmp_path):
        once("mail")
        save_all_states()
    with generation(tmp_path):
        assert once("mail") is False
        assert once("another") is True


def test_a_block_sees_again_what_it_saw_when_an_epoch_is_tried_again() -> None:
    with generation():
        total = Accumulator()
        train = AdaptiveDataLoader(Numbers(8), 4, name="train")
        valid = AdaptiveDataLoader(Numbers(8), 4, name="valid")
        seen: list[tuple[int, int]] = []
        for fails in (True, False):
            with suppress(RuntimeError):
                for _ in remaining_epochs_until(1):
                    of_epoch = Accumulator()
                    for batch in train:
                        total["n"] += len(batch)
                        of_epoch["n"] += len(batch)
                    with total.synchronized(), of_epoch.synchronized():
                        seen.append((total["n"], of_epoch["n"]))
                        total.clear()
                    for _ in valid:
                        if fails:
                            raise RuntimeError("out of memory")
        assert seen == [(8, 8), (8, 8)]


def test_keys_are_text_or_whole_numbers() -> None:
    with generation():
        total = Accumulator()
        for batch in AdaptiveDataLoader(Numbers(4), 2):
            total[1] += len(batch)
            with pytest.raises(TypeError, match=r"the key True of an .* is a bool\."):
                total[True] += 1
            with pytest.raises(TypeError, match=r"use text, or whole numbers"):
                total[torch.tensor(1)] += 1
        with total.synchronized():
            assert total[1] == 4
