"""Epoch loops: numbering, breaks, exceptions, restarts, and their end."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
from tqdm import tqdm

from elasticrun import (
    AdaptiveDataLoader,
    JobStopped,
    LoopOrderError,
    State,
    current_epoch,
    finished_epochs,
    remaining_epochs_until,
    remaining_steps_until,
    request_checkpoint,
    request_stop,
)
from elasticrun.job.current import current_job
from elasticrun.testing import Job
from tests.support.data import Numbers
from tests.support.generations import Crash, generation, run_once

Delivered = list[tuple[int | None, str, int]]  # Epoch, loader, first sample of a batch.


def deliver(loader: AdaptiveDataLoader, delivered: Delivered) -> None:
    for batch in loader:
        delivered.append((current_epoch(), loader.name, int(batch[0])))


def run_through_stops(
    script: Callable[[Callable[[], None]], Any], directory: Path, stops: list[int]
) -> None:
    """Run a script generation by generation; it calls back for each batch."""
    for stop_in in [*stops, -1]:
        count = 0

        def on_batch(stop_in: int = stop_in) -> None:
            nonlocal count
            count += 1
            if count == stop_in:
                request_stop()

        run_once(lambda: script(on_batch), directory)


def test_epochs_are_numbered_from_zero(job: Job) -> None:
    assert current_epoch() is None
    seen = [
        (epoch, current_epoch(), finished_epochs())
        for epoch in remaining_epochs_until(3)
    ]
    assert seen == [(0, 0, 0), (1, 1, 1), (2, 2, 2)]
    assert current_epoch() is None
    assert finished_epochs() == 3


def test_before_the_epoch_loop_of_a_restart_the_finished_ones_count(
    tmp_path: Path,
) -> None:
    def script() -> list[int]:
        counts = [finished_epochs()]
        for epoch in remaining_epochs_until(3):
            counts.append(finished_epochs())
            if epoch == 1 and counts[0] == 0:
                request_stop()
        return [*counts, finished_epochs()]

    assert run_once(script, tmp_path) is None
    assert run_once(script, tmp_path) == [2, 2, 3]
    assert run_once(script, tmp_path) == [3, 3]


def test_epoch_loops_one_after_another_continue_the_numbering(job: Job) -> None:
    assert list(remaining_epochs_until(2)) == [0, 1]
    assert list(remaining_epochs_until(5)) == [2, 3, 4]
    assert list(remaining_epochs_until(4)) == []


@pytest.mark.parametrize("num_epochs", [1.0, "3", None, True])
def test_the_number_of_epochs_is_a_whole_number(num_epochs: Any) -> None:
    text = f"takes the number of epochs as a whole number, not {num_epochs!r}."
    with pytest.raises(TypeError, match=re.escape(text)):
        remaining_epochs_until(num_epochs)


def test_a_number_of_epochs_of_numpys_is_one(job: Job) -> None:
    assert list(remaining_epochs_until(np.int64(2))) == [0, 1]


def test_the_number_of_epochs_is_not_negative() -> None:
    with pytest.raises(ValueError, match=r"until\(-1\): epochs count from 0\."):
        remaining_epochs_until(-1)


def test_a_stop_at_the_end_of_an_epoch_begins_with_the_next(tmp_path: Path) -> None:
    def script() -> list[int]:
        epochs = []
        for epoch in remaining_epochs_until(4):
            epochs.append(epoch)
            seen.append(epoch)
            if epoch == 1:
                request_stop()
        return epochs

    seen: list[int] = []
    assert run_once(script, tmp_path) is None
    assert run_once(script, tmp_path) == [2, 3]
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("epochs", "2 epochs"),
        ("steps", "4 steps"),
        ("batches", "batches(4) of `train`"),
    ],
)
def test_a_finished_job_that_is_started_again_does_nothing_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str, what: str
) -> None:
    def script() -> list[int]:
        loader = AdaptiveDataLoader(Numbers(4), 2, name="train")
        if kind == "steps":
            return list(remaining_steps_until(4))
        if kind == "batches":
            return [int(batch[0]) for batch in loader.batches(4)]
        return [int(batch[0]) for _ in remaining_epochs_until(2) for batch in loader]

    assert len(run_once(script, tmp_path)) == 4
    assert not caplog.records
    assert run_once(script, tmp_path) == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage() == (
        f"{what} finished before this start, so none remains, and what follows the "
        "loop runs again. To train longer, raise the number; to start anew, use "
        "another directory."
    )


def test_a_finished_job_trains_longer_when_the_number_is_raised(
    tmp_path: Path,
) -> None:
    assert run_once(lambda: list(remaining_epochs_until(2)), tmp_path) == [0, 1]
    assert run_once(lambda: list(remaining_epochs_until(3)), tmp_path) == [2]


def test_the_end_of_the_last_epoch_writes_one_checkpoint(tmp_path: Path) -> None:
    run_once(lambda: list(remaining_epochs_until(3)), tmp_path)
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [
        "checkpoint-00000001"
    ]
    run_once(lambda: list(remaining_epochs_until(5)), tmp_path, save_interval=0)
    assert len(list(tmp_path.glob("checkpoint-*"))) == 3
    assert (tmp_path / "checkpoint-00000003").exists()


def test_break_writes_a_checkpoint_that_remembers_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def stop_early() -> list[int]:
        seen = []
        for epoch in remaining_epochs_until(9):
            seen.append(epoch)
            if epoch == 2:
                break
        return seen

    assert run_once(stop_early, tmp_path) == [0, 1, 2]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 1
    assert run_once(stop_early, tmp_path) == []
    assert "3 epochs finished before this start" in caplog.text


def test_break_finishes_the_epoch(job: Job) -> None:
    for epoch in remaining_epochs_until(5):
        if epoch == 1:
            break
    assert finished_epochs() == 2
    assert current_epoch() is None
    assert list(remaining_epochs_until(4)) == [2, 3]


def test_an_exception_does_not_finish_the_epoch(job: Job) -> None:
    with suppress(LookupError):
        for epoch in remaining_epochs_until(5):
            if epoch == 1:
                raise LookupError
    assert finished_epochs() == 1
    assert current_epoch() is None
    assert list(remaining_epochs_until(3)) == [1, 2]


def test_a_new_epoch_loop_continues_the_epoch_that_raised(tmp_path: Path) -> None:
    delivered: Delivered = []

    def script(on_batch: Callable[[], None]) -> None:
        train = AdaptiveDataLoader(Numbers(6), 2, name="train")
        valid = AdaptiveDataLoader(Numbers(6), 2, name="valid")
        has_failed = False
        while finished_epochs() < 2:
            with suppress(LookupError):
                for epoch in remaining_epochs_until(2):
                    deliver(train, delivered)
                    for batch in valid:
                        if epoch == 1 and batch[0] == 2 and not has_failed:
                            has_failed = True
                            raise LookupError
                        delivered.append((epoch, "valid", int(batch[0])))
                        on_batch()

    expected = [
        (epoch, name, first)
        for epoch in range(2)
        for name in ("train", "valid")
        for first in (0, 2, 4)
    ]
    with generation():
        script(lambda: None)
    assert delivered == expected
    delivered.clear()
    run_through_stops(script, tmp_path, [4])
    assert delivered == expected


def test_a_caught_exception_inside_an_epoch_gives_its_loop_up(tmp_path: Path) -> None:
    delivered: Delivered = []

    def script(on_batch: Callable[[], None]) -> None:
        train = AdaptiveDataLoader(Numbers(6), 2, name="train")
        valid = AdaptiveDataLoader(Numbers(6), 2, name="valid")
        for epoch in remaining_epochs_until(2):
            with suppress(LookupError):
                for batch in train:
                    delivered.append((epoch, "train", int(batch[0])))
                    on_batch()
                    if batch[0] == 2:
                        raise LookupError
            for batch in valid:
                delivered.append((epoch, "valid", int(batch[0])))
                on_batch()

    expected = [
        (epoch, name, first)
        for epoch in range(2)
        for name, firsts in (("train", (0, 2)), ("valid", (0, 2, 4)))
        for first in firsts
    ]
    for stops in ([], [1], [2], [3], [4, 1], [6, 1, 1], [9], [1] * 10):
        delivered.clear()
        run_through_stops(script, tmp_path / str(stops), stops)
        assert delivered == expected, stops


def test_three_loaders_in_one_epoch_and_a_stop_in_the_third(tmp_path: Path) -> None:
    delivered: Delivered = []

    def script(on_batch: Callable[[], None]) -> None:
        loaders = [
            AdaptiveDataLoader(Numbers(6), 2, name=name) for name in ("a", "b", "c")
        ]
        for _ in remaining_epochs_until(2):
            for loader in loaders:
                for batch in loader:
                    delivered.append((current_epoch(), loader.name, int(batch[0])))
                    on_batch()

    run_through_stops(script, tmp_path, [8, 9])
    assert delivered == [
        (epoch, name, first)
        for epoch in (0, 1)
        for name in "abc"
        for first in (0, 2, 4)
    ]


def test_one_loader_looped_twice_in_an_epoch(tmp_path: Path) -> None:
    loops: list[list[int]] = []

    def script(on_batch: Callable[[], None]) -> None:
        loader = AdaptiveDataLoader(Numbers(20), 4, True)
        for _ in remaining_epochs_until(1):
            for number in range(2):
                if len(loops) == number:
                    loops.append([])
                for batch in loader:
                    loops[number] += batch.tolist()
                    on_batch()

    with generation():
        script(lambda: None)
    whole = [list(loop) for loop in loops]
    loops.clear()
    run_through_stops(script, tmp_path, [2, 1, 4])
    assert loops == whole
    assert whole[0] != whole[1]


def test_evaluation_before_training_and_a_stop_during_validation(
    tmp_path: Path,
) -> None:
    delivered: Delivered = []

    def script(on_batch: Callable[[], None]) -> None:
        def run(loader: AdaptiveDataLoader) -> None:
            for batch in loader:
                delivered.append((current_epoch(), loader.name, int(batch[0])))
                on_batch()

        train = AdaptiveDataLoader(Numbers(6), 2, name="train")
        valid = AdaptiveDataLoader(Numbers(4), 2, name="valid")
        run(valid)
        for _ in remaining_epochs_until(2):
            run(train)
            run(valid)
        run(valid)

    expected: Delivered = [(None, "valid", 0), (None, "valid", 2)]
    for epoch in (0, 1):
        expected += [(epoch, "train", first) for first in (0, 2, 4)]
        expected += [(epoch, "valid", first) for first in (0, 2)]
    expected += [(None, "valid", 0), (None, "valid", 2)]
    for stops in ([1], [2], [6], [7, 5], [13], [1] * 14):
        delivered.clear()
        run_through_stops(script, tmp_path / str(stops), stops)
        assert delivered == expected, stops


def test_early_stopping_and_a_stop_in_the_test_loop(tmp_path: Path) -> None:
    delivered: Delivered = []

    def script(on_batch: Callable[[], None]) -> None:
        train = AdaptiveDataLoader(Numbers(4), 2, name="train")
        test = AdaptiveDataLoader(Numbers(6), 2, name="test")
        for epoch in remaining_epochs_until(30):
            for batch in train:
                delivered.append((epoch, "train", int(batch[0])))
                on_batch()
            if epoch == 1:
                break
        for batch in test:
            delivered.append((None, "test", int(batch[0])))
            on_batch()
        for epoch in remaining_epochs_until(3):
            for batch in train:
                delivered.append((epoch, "train", int(batch[0])))
                on_batch()

    run_through_stops(script, tmp_path, [5, 1, 2])
    assert delivered == [
        *[(epoch, "train", first) for epoch in (0, 1) for first in (0, 2)],
        *[(None, "test", first) for first in (0, 2, 4)],
        *[(2, "train", first) for first in (0, 2)],
    ]


def test_a_stop_outside_loops_takes_effect_at_the_next_boundary(
    tmp_path: Path,
) -> None:
    delivered: list[int] = []

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(6), 2)
        for _ in remaining_epochs_until(1):
            if not delivered:
                request_stop()
            delivered.extend(int(batch[0]) for batch in loader)

    run_once(script, tmp_path)
    assert delivered == [0]
    run_once(script, tmp_path)
    assert delivered == [0, 2, 4]


def test_a_stop_exits_with_the_code_that_asks_to_be_started_again(job: Job) -> None:
    request_stop()
    with pytest.raises(JobStopped) as stop:
        list(remaining_epochs_until(1))
    assert stop.value.code == 75


def test_a_requested_checkpoint_is_written_at_the_next_boundary(
    tmp_path: Path,
) -> None:
    delivered: list[int] = []

    def script() -> None:
        for batch in AdaptiveDataLoader(Numbers(8), 2):
            delivered.append(int(batch[0]))
            if batch[0] == 2:
                request_checkpoint()
            if batch[0] == 4 and len(delivered) == 3:
                raise Crash

    run_once(script, tmp_path)
    run_once(script, tmp_path)
    assert delivered == [0, 2, 4, 4, 6]


def test_a_save_interval_of_zero_saves_at_every_boundary(tmp_path: Path) -> None:
    def script() -> None:
        for _ in remaining_epochs_until(1):
            loader = AdaptiveDataLoader(Numbers(6), 2, name="train")
            numbers.extend(len(list(tmp_path.glob("checkpoint-*"))) for _ in loader)

    numbers: list[int] = []
    run_once(script, tmp_path, save_interval=0, keep=10, async_save=False)
    assert numbers == [0, 1, 2]
    assert len(list(tmp_path.glob("checkpoint-*"))) == 4


def test_nested_epoch_loops_are_refused(job: Job) -> None:
    for _ in remaining_epochs_until(1):
        with pytest.raises(
            LoopOrderError,
            match=r"an epoch loop began inside epoch 0 of another one\. Epochs of a "
            r"job are numbered one after another, so they cannot be nested\. Leave the "
            r"outer loop first, or use a plain range\(\) for one of them\.",
        ):
            list(remaining_epochs_until(2))
    assert finished_epochs() == 1


def test_an_epoch_loop_in_a_loop_is_refused(job: Job) -> None:
    loader = AdaptiveDataLoader(Numbers(6), 2, name="train")
    for _ in loader:
        with pytest.raises(
            LoopOrderError,
            match=r"an epoch loop began inside the loop over `train` "
            r"\(test_epochs\.py:\d+\)\. Leave that loop first\.",
        ):
            list(remaining_epochs_until(2))


def test_a_loop_that_is_missing_after_a_resume_is_an_error(tmp_path: Path) -> None:
    def script(names: str) -> None:
        loaders = {name: AdaptiveDataLoader(Numbers(6), 2, name=name) for name in "ab"}
        for _ in remaining_epochs_until(1):
            for name in names:
                for batch in loaders[name]:
                    if name == "b" and batch[0] == 2:
                        request_stop()

    run_once(lambda: script("ab"), tmp_path)
    with pytest.raises(
        LoopOrderError,
        match=r"the checkpoint stopped in epoch 0, loop 1, sample 4 of `b`, but the "
        r"program went on to the end of epoch 0 without that loop\. Samples would be "
        r"lost\. Keep the loops of the program as they were, or start anew",
    ):
        run_once(lambda: script("a"), tmp_path)
    with pytest.raises(
        LoopOrderError,
        match=r"the checkpoint stopped in epoch 0, loop 1, sample 4 of `b`, but now "
        r"that loop is over `a`\. Samples would be skipped or seen twice\.",
    ):
        run_once(lambda: script("aab"), tmp_path)


def test_a_generation_is_numbered_by_its_start(tmp_path: Path) -> None:
    numbers = [run_once(lambda: current_job().generation, tmp_path) for _ in range(3)]
    assert numbers == [0, 1, 2]


def test_a_loop_does_not_span_epochs(job: Job) -> None:
    loader = AdaptiveDataLoader(Numbers(20), 2, name="train")
    held = iter(loader)

    def script() -> None:
        for _ in remaining_epochs_until(2):
            next(held)
            next(held)

    with pytest.raises(
        LoopOrderError,
        match=r"an epoch ended while the loop over `train` \(.*\) was at sample 2 of "
        r"20\. A loop belongs to one epoch",
    ):
        script()


def test_break_leaves_a_loop_whose_iterator_a_variable_holds(tmp_path: Path) -> None:
    """At the end of its epoch, in the same way as one that nothing holds."""

    def run(directory: Path, *, is_held: bool, stops: list[int]) -> Delivered:
        delivered: Delivered = []

        def script(on_batch: Callable[[], None]) -> None:
            train = AdaptiveDataLoader(Numbers(20), 2, shuffle=True, name="train")
            valid = AdaptiveDataLoader(Numbers(4), 2, name="valid")
            for epoch in remaining_epochs_until(3):
                deliver(valid, delivered)
                bar = tqdm(enumerate(train)) if is_held else train
                for turn in bar:
                    batch = turn[1] if is_held else turn
                    delivered.append((epoch, "train", int(batch[0])))
                    on_batch()
                    if train.batch_index == 2 or epoch == 1:
                        break

        run_through_stops(script, directory, stops)
        return delivered

    bare = run(tmp_path / "bare", is_held=False, stops=[])
    assert len(bare) == 3 * 2 + 3 + 1 + 3
    assert run(tmp_path / "held", is_held=True, stops=[]) == bare
    assert run(tmp_path / "stops", is_held=True, stops=[2]) == bare


def test_an_iterator_that_break_has_left_does_not_go_on(job: Job) -> None:
    loader = AdaptiveDataLoader(Numbers(20), 2, name="train")
    seen: list[int] = []

    def script() -> None:
        rows = iter(loader)
        for _ in remaining_epochs_until(2):
            for batch in rows:
                seen.append(int(batch[0]))
                if len(seen) == 3:
                    break

    with pytest.raises(
        LoopOrderError, match=r"over `train` went on after the epoch or the job in "
    ):
        script()
    assert seen == [0, 2, 4]


def test_a_variable_that_holds_a_loop_before_another_is_named(job: Job) -> None:
    """What came behind `break` was taken for a part of the loop's last batch."""
    train = AdaptiveDataLoader(Numbers(20), 2, name="train")
    valid = AdaptiveDataLoader(Numbers(4), 2, name="valid")
    line = sys._getframe().f_lineno + 5

    def script(*, deletes: bool) -> None:
        for _ in remaining_epochs_until(finished_epochs() + 1):
            bar = tqdm(enumerate(train))
            for _ in bar:
                break
            if deletes:
                del bar
            deliver(valid, [])

    script(deletes=True)
    with pytest.raises(
        LoopOrderError,
        match=rf"over `train` \(test_epochs\.py:{line}\) .* or `del bar`",
    ):
        script(deletes=False)


def test_an_exception_leaves_a_loop_unfinished_that_a_variable_held(job: Job) -> None:
    loader = AdaptiveDataLoader(Numbers(12), 2)
    delivered: list[int] = []

    def train(fails_at: int) -> None:
        held = iter(loader)
        while (batch := next(held, None)) is not None:
            delivered.extend(batch.tolist())
            if fails_at in delivered:
                raise RuntimeError("out of memory")

    def run(fails_at: int) -> None:
        for _ in remaining_epochs_until(1):
            train(fails_at)

    try:
        run(5)
    except RuntimeError as error:  # Its traceback holds the iterator.
        caught = str(error)
    assert caught == "out of memory"
    run(-1)
    assert delivered == [*range(6), *range(4, 12)]  # Samples 4 and 5 failed.
    assert finished_epochs() == 1


class Unsavable(State):
    def save(self, fileobj: BinaryIO) -> None:
        raise OverflowError("too much")

    def load(self, fileobj: BinaryIO) -> None:
        raise AssertionError("nothing was saved")


def leave_an_epoch_by_break() -> None:
    Unsavable("unsavable")
    for _ in remaining_epochs_until(1):
        break


def test_a_failure_after_break_is_raised_at_the_next_use(tmp_path: Path) -> None:
    def script() -> None:
        leave_an_epoch_by_break()
        with pytest.raises(OverflowError, match="too much"):
            finished_epochs()
        assert finished_epochs() == 1  # Once.

    run_once(script, tmp_path)


@pytest.mark.slow
def test_a_failure_after_break_is_raised_at_the_end_at_last(tmp_path: Path) -> None:
    with pytest.raises(OverflowError, match="too much"):
        run_once(leave_an_epoch_by_break, tmp_path)
    script = "from tests.job.test_epochs import *; leave_an_epoch_by_break()"
    ended = subprocess.run(
        [sys.executable, "-c", script],
        env={
            **os.environ,
            "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path / "other"),
            "ELASTICRUN_JOB": "test",
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.endswith("OverflowError: too much\n")


def test_iterators_that_a_module_keeps_end_in_silence(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\n"
        "from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel\n"
        "from elasticrun import remaining_epochs_until\n"
        "net = torch.nn.Linear(4, 1)  # Keeps this module longer than what it needs.\n"
        "model = AdaptiveDataParallel(net, torch.optim.SGD(net.parameters()))\n"
        "train = AdaptiveDataLoader(torch.zeros(4), batch_size=2)\n"
        "epochs = remaining_epochs_until(2)\n"
        "next(epochs)\n"
        "batches = iter(train)\n"
        "next(batches)\n"
    )
    ended = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ended.stderr == ""
    assert not list(tmp_path.glob("checkpoint-*"))  # The epoch was not finished.


def test_epochs_may_be_numbered_from_one(tmp_path: Path) -> None:
    seen: list[tuple[int, int | None]] = []

    def script() -> None:
        for epoch in remaining_epochs_until(3, start=1):
            seen.append((epoch, current_epoch()))
            if epoch == 2:
                request_stop()

    run_once(script, tmp_path)
    run_once(script, tmp_path)
    assert seen == [(1, 0), (2, 1), (3, 2)]
