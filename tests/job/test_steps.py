"""`remaining_steps_until`: turns without a loader, each of which ends in a boundary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    LoopOrderError,
    current_dataloader,
    remaining_epochs_until,
    remaining_steps_until,
    request_checkpoint,
    request_stop,
    save_all_states,
)
from elasticrun.checkpoint.states.generators import seed_all
from elasticrun.job.current import current_job
from elasticrun.testing import Job
from tests.support.data import Numbers
from tests.support.generations import Crash, run_once

pytestmark = pytest.mark.usefixtures("job")


def test_the_number_is_a_total_for_the_job() -> None:
    assert list(remaining_steps_until(3)) == [0, 1, 2]
    assert list(remaining_steps_until(3)) == []
    assert list(remaining_steps_until(5)) == [3, 4]


def test_the_first_step_may_have_another_number() -> None:
    for step in remaining_steps_until(3, start=7):
        if step == 8:
            break
    assert step == 8
    assert list(remaining_steps_until(4, start=7)) == [9, 10]


def test_more_steps_than_before_a_restart_go_on(tmp_path: Path) -> None:
    def script(num_steps: int) -> list[int]:
        return list(remaining_steps_until(num_steps))

    assert run_once(lambda: script(3), tmp_path) == [0, 1, 2]
    assert run_once(lambda: script(3), tmp_path) == []
    assert run_once(lambda: script(5), tmp_path) == [3, 4]
    assert run_once(lambda: script(6), tmp_path) == [5]


def test_a_loop_that_was_left_does_not_go_on_after_a_restart(tmp_path: Path) -> None:
    def script(num_steps: int) -> list[int]:
        taken = []
        for step in remaining_steps_until(num_steps):
            taken.append(step)
            if step == 2:
                break
        save_all_states()
        return taken

    assert run_once(lambda: script(9), tmp_path) == [0, 1, 2]
    assert run_once(lambda: script(10), tmp_path) == []


def test_more_steps_in_front_of_what_followed_them_are_refused(tmp_path: Path) -> None:
    def script(num_steps: int) -> None:
        for _ in remaining_steps_until(num_steps):
            pass
        for _ in AdaptiveDataLoader(Numbers(6), 2):
            request_stop()

    run_once(lambda: script(3), tmp_path)
    with pytest.raises(
        LoopOrderError,
        match=r"remaining_steps_until\(5\) \(test_steps\.py:\d+\) had ended after "
        r"3 steps, and the checkpoint is from later, at loop 1 after 0 epochs, ",
    ):
        run_once(lambda: script(5), tmp_path)


def test_generators_come_back(tmp_path: Path) -> None:
    drawn: list[float] = []

    def script(stop_in: tuple[int, ...]) -> None:
        seed_all(0)
        for step in remaining_steps_until(6):
            drawn.append(float(torch.rand(())))
            if step in stop_in:
                request_stop()

    run_once(lambda: script(()))
    whole, drawn = drawn, []
    for _ in range(3):
        run_once(lambda: script((1, 3)), tmp_path)
    assert drawn == whole


def test_a_crash_repeats_the_steps_after_the_last_checkpoint(tmp_path: Path) -> None:
    taken: list[int] = []

    def script() -> None:
        for step in remaining_steps_until(5):
            taken.append(step)
            if step == 1:
                request_checkpoint()
            if len(taken) == 4:
                raise Crash

    run_once(script, tmp_path)
    run_once(script, tmp_path)
    assert taken == [0, 1, 2, 3, 2, 3, 4]


def test_the_end_is_saved(job: Job) -> None:
    list(remaining_steps_until(2))
    assert job.newest_checkpoint is not None
    assert str(job.progress.position) == "loop 1 after 0 epochs"


def test_the_position_says_which_step(job: Job) -> None:
    list(remaining_steps_until(2))
    for _ in remaining_epochs_until(1):
        for _ in remaining_steps_until(4):
            assert current_dataloader() is None
        assert str(job.progress.position) == "epoch 0, loop 2"
        for _ in remaining_steps_until(9):
            assert str(job.progress.position) == "epoch 0, loop 2, step 4"
            break


def test_a_model_trains_as_without_elasticrun() -> None:
    torch.manual_seed(0)
    net = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AdaptiveDataParallel(net, optimizer)
    x = torch.randn(4, 2)
    expected = net.weight.detach().clone()
    for _ in remaining_steps_until(3):
        optimizer.zero_grad()
        model(x).mean().backward()
        optimizer.step()
        expected -= 0.1 * x.mean(0)
    torch.testing.assert_close(net.weight.detach(), expected)


def test_it_is_no_inner_loop() -> None:
    for _ in AdaptiveDataLoader(Numbers(4), 2, name="train"):
        with pytest.raises(LoopOrderError, match="stands in the body of the loop over"):
            list(remaining_steps_until(3))


@pytest.mark.parametrize("number", [-1, 2.5, True, None])
def test_a_number_that_counts_no_steps_is_refused(number: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="remaining_steps_until"):
        remaining_steps_until(number)


def test_an_exception_leaves_it_at_the_step(tmp_path: Path) -> None:
    for step in remaining_steps_until(9):
        if step == 3:
            break
    job = current_job()
    assert (job.progress.position.finished_loops, job.loader) == (1, None)
    assert list(remaining_steps_until(6)) == [4, 5]
