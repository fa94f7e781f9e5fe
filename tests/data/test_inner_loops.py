"""A loop in the body of another one belongs to that loop's batch."""

from __future__ import annotations

import logging
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    current_dataloader,
    remaining_steps_until,
    request_stop,
    save_all_states,
)
from elasticrun.job.current import current_job
from elasticrun.replicas.stop_clock import StopClock
from elasticrun.testing import Job, read_trace, samples_of_loop
from tests.support.data import Draws, Numbers
from tests.support.generations import Crash, generation, run_once

pytestmark = pytest.mark.usefixtures("job")


def test_it_has_no_boundary_and_no_place_in_the_position(tmp_path: Path) -> None:
    seen: list[tuple[str, int]] = []

    def script() -> None:
        train = AdaptiveDataLoader(Numbers(12), 4, name="train")
        valid = AdaptiveDataLoader(Numbers(6), 2, name="valid")
        for _ in train:
            seen.append(("train", train.batch_index))
            if train.batch_index == 1:
                for _ in valid:
                    seen.append(("valid", valid.batch_index))
                    assert current_dataloader() is valid
                    assert str(current_job().progress.position).endswith(
                        "loop 0 after 0 epochs, sample 4 of `train`"
                    )
                    request_stop()
                assert current_dataloader() is train

    run_once(script, tmp_path)
    whole = [("train", 0), ("train", 1), *[("valid", i) for i in range(3)]]
    assert seen == whole
    run_once(script, tmp_path)
    assert seen == [*whole, ("train", 2)]


def test_its_order_and_draws_depend_on_the_batch_around_it(tmp_path: Path) -> None:
    def script(*stop_in: int) -> None:
        train = AdaptiveDataLoader(Numbers(8), 2, name="train")
        probe = AdaptiveDataLoader(
            Draws(6), 6, shuffle=True, seed_each="sample", name="probe"
        )
        for _ in train:
            for number in range(2):
                (batch,) = probe
                found[train.batch_index, number] = batch.tolist()
            if train.batch_index in stop_in:
                request_stop()

    found: dict[tuple[int, int], Any] = {}
    run_once(script)
    whole, found = found, {}
    assert len({str(draws) for draws in whole.values()}) == 8
    for _ in range(2):
        run_once(lambda: script(1), tmp_path)
    assert found == whole


def test_a_body_that_runs_again_begins_its_passes_where_it_did(tmp_path: Path) -> None:
    seen: list[tuple[int, list[int]]] = []

    def script() -> None:
        train = AdaptiveDataLoader(Numbers(8), 2, name="train")
        probe = AdaptiveDataLoader(Numbers(5), 1, shuffle=True, name="probe")
        for _ in train:
            for _ in range(2):
                samples = [int(batch) for batch in probe.batches(2)]
                seen.append((train.batch_index, samples))
            if len(seen) == 4:
                save_all_states()  # The batch comes again, and with it these.
                raise Crash

    run_once(script, tmp_path)
    run_once(script, tmp_path)
    assert seen[2:4] == seen[4:6]
    samples = [sample for _, own in [*seen[:4], *seen[6:]] for sample in own]
    assert sorted(samples[:5]) == sorted(samples[5:10]) == list(range(5))


def test_loops_in_loops_in_steps(tmp_path: Path) -> None:
    seen: list[Any] = []

    def script(stop_in: int = -1) -> None:
        train = AdaptiveDataLoader(Numbers(4), 2, shuffle=True, name="train")
        valid = AdaptiveDataLoader(Numbers(4), 2, shuffle=True, name="valid")
        for step in remaining_steps_until(3):
            for x in train:
                for y in valid:
                    seen.append((step, x.tolist(), y.tolist()))
                    if len(seen) == stop_in:
                        request_stop()

    run_once(script)
    whole, seen = seen, []
    run_once(lambda: script(3), tmp_path)
    assert len(seen) == 4
    run_once(script, tmp_path)
    assert seen == whole
    assert len(seen) == 12


def test_break_and_exceptions_leave_the_inner_loop_alone() -> None:
    train = AdaptiveDataLoader(Numbers(8), 2, name="train")
    valid = AdaptiveDataLoader(Numbers(8), 2, name="valid")
    for _ in train:
        for _ in valid:
            break
        try:
            for _ in valid:
                raise LookupError
        except LookupError:
            assert current_dataloader() is train
    assert current_job().progress.position.finished_loops == 1


def test_sums_of_it_count_once(tmp_path: Path) -> None:
    totals: list[int] = []

    def script() -> None:
        train = AdaptiveDataLoader(Numbers(8), 2, name="train")
        valid = AdaptiveDataLoader(Numbers(5), 2, name="valid")
        total = Accumulator(name="total")
        for _ in train:
            for batch in valid:
                total["samples"] += len(batch)
            with total.synchronized():
                totals.append(total["samples"])
                total.clear()
            if train.batch_index == 1 and len(totals) == 2:
                request_stop()

    run_once(script, tmp_path)
    run_once(script, tmp_path)
    assert totals == [5] * 4


def test_the_trace_tells_it_from_the_loop_around_it(tmp_path: Path) -> None:
    with generation(trace_dir=str(tmp_path)):
        train = AdaptiveDataLoader(Numbers(4), 2, name="train")
        valid = AdaptiveDataLoader(Numbers(3), 3, name="valid")
        for _ in train:
            list(valid)
    lines = read_trace(tmp_path)
    assert [line.get("inside") for line in lines] == [None, [0, 0], None, [1, 0]]
    assert samples_of_loop(lines, epoch=0, loop=0) == {0: [0, 1], 1: [2, 3]}


def test_an_iterator_of_the_inner_loop_may_be_kept_for_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train = AdaptiveDataLoader(Numbers(8), 2, name="train")
    valid = AdaptiveDataLoader(Numbers(8), 2, name="valid", num_workers=1)
    with caplog.at_level(logging.WARNING):
        for _ in train:
            kept = iter(valid)
            next(kept)
            break
        del kept
    assert current_job().loader is None
    assert current_job().progress.position.finished_loops == 1
    assert not caplog.records


def test_a_stop_that_waits_for_it_says_so(
    job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    train = AdaptiveDataLoader(Numbers(8), 2, name="train")
    valid = AdaptiveDataLoader(Numbers(8), 2, name="valid")
    clock = StopClock(1000.0, job._describe)
    for _ in train:
        assert job.why_no_boundary is None
        clock.on_signal(signal.SIGTERM)
        for _ in valid:
            clock.on_time(time.monotonic() + 400.0)
            assert not caplog.records
            clock.on_time(time.monotonic() + 600.0)
            break
        break
    (warning,) = caplog.messages
    assert re.fullmatch(
        r"half of the 1000 s are over .* the program is at loop 0 after 0 epochs, "
        r"sample 0 of `train`; the loop over `valid` \(test_inner_loops\.py:\d+\) runs "
        r"in the body of that over `train` \(.*\), and a stop waits for its end",
        warning,
    )
