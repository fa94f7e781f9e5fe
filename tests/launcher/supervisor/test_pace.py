"""How fast a generation trains, and when it is done, from reports alone."""

from __future__ import annotations

from typing import Any

import pytest

from elasticrun.launcher.supervisor.status import Pace, place_of


def report(time: float, passed: int, **values: Any) -> dict[str, Any]:
    return {
        "time": time,
        "num_passed": passed,
        "generation": 0,
        "epoch": 0,
        "num_epochs": 10,
        "index": passed,
        "num_samples": 1000,
        **values,
    }


def test_a_first_batch_that_takes_long_is_no_speed_of_zero() -> None:
    pace = Pace()
    for second in range(60):
        pace.take(report(second, 0))
        assert pace.rate is None
    pace.take(report(60, 50))
    assert pace.rate == pytest.approx(50)


def test_reports_between_two_batches_do_not_lower_the_speed() -> None:
    pace = Pace()
    pace.take(report(0, 50))  # The first batch was done before anybody looked.
    for second in range(1, 5):
        pace.take(report(second, 50))
        assert pace.rate is None
    for second in range(5, 60):  # A step takes 5 s; others report memory meanwhile.
        pace.take(report(second, 50 * (second // 5 + 1)))
        assert pace.rate == pytest.approx(10)


def test_evaluation_loops_do_not_break_the_speed() -> None:
    pace = Pace()
    for second in range(30):  # A loop of 5 samples after each 10.
        pace.take(report(second, 100 * second, index=7))
    assert pace.rate == pytest.approx(100)


def test_time_left_counts_all_loops_of_an_epoch() -> None:
    pace = Pace()
    for second in range(1, 5):
        pace.take(report(second, 100 * second))
    assert pace.seconds_left is None  # Nobody would believe it.
    for second in range(5, 10):
        pace.take(report(second, 100 * second))
    assert pace.seconds_left == pytest.approx(100 - 9)
    # An epoch has 1,000 samples to train with, and 500 to evaluate.
    for second in range(10, 31):
        passed = 100 * second
        epoch, index = divmod(passed, 1500)
        pace.take(report(second, passed, epoch=epoch, index=index % 1000))
    assert pace.seconds_left == pytest.approx(150 - 30, rel=0.1)


def test_a_generation_that_resumes_counts_what_was_done_before() -> None:
    pace = Pace()
    pace.take(report(0, 0, generation=3, epoch=9, index=500))
    for second in range(1, 9):
        values = {"generation": 3, "epoch": 9, "index": 500 + 50 * second}
        pace.take(report(second, 50 * second, **values))
    assert pace.seconds_left == pytest.approx(10 - 8)


def test_places_have_the_numbers_that_the_loops_variables_have() -> None:
    inside = {"epoch": 2, "num_epochs": 20, "in_epoch": True, "position": "exactly"}
    loop = {"batch": 119, "num_batches": 900, "loader": "train"}
    endless = {**loop, "num_batches": None}
    none = {"batch": None, "num_batches": None, "loader": ""}
    steps = {**loop, "loader": "remaining_steps_until"}
    outside = {**inside, "epoch": 0, "in_epoch": False, "num_epochs": None}
    assert place_of({}) is None
    assert place_of({**inside, **loop}) == (
        "epoch 2 of 20, batch 119 of 900 in `train`"
    )
    assert place_of({**inside, **none}) == "epoch 2 of 20"
    assert place_of({**inside, **none, "in_epoch": False}) == "after 2 of 20 epochs"
    assert place_of({**outside, **steps}) == "step 119 of 900"
    assert place_of({**outside, **endless}) == "batch 119 in `train`"
    assert place_of({**outside, **none}) == "exactly"
    foreign = {**loop, "loader": "steps of fit"}
    assert place_of({**outside, **foreign}) == "step 119 of 900 in `fit`"
