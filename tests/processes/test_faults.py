"""Replicas die at any moment: nobody hangs, nothing torn stays, the job goes on."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import pytest
import torch.distributed as dist

from elasticrun import (
    AdaptiveDataLoader,
    State,
    rank,
    remaining_epochs_until,
    request_checkpoint,
    request_stop,
)
from elasticrun.checkpoint.storage.place import MANIFEST_NAME
from elasticrun.job import job
from elasticrun.testing import read_trace, run_generation, start_generation
from tests.support.data import Numbers
from tests.support.loops import Loop, held, is_stop_due, stop_at, value_after
from tests.support.stage import DEADLINE, Stage, freeze, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow

SLOW = pytest.mark.slow  # Rank 0 waits at its end for whoever has not left.


def resumed_indices(stage: Stage, world_size: int) -> list[int]:
    """Run the job to its end; return the batches that the new generation delivered."""
    before = {line["generation"] for line in read_trace(stage.trace)}
    values = run_generation(Loop(stage), world_size, variables=stage.variables())
    assert set(values) == {value_after(stage.samples())}
    assert stage.delivered() == list(range(1200))
    return sorted(
        {
            line["batch"]
            for line in read_trace(stage.trace)
            if line["generation"] not in before
        }
    )


def saving(stage: Stage, *batches: int, then: Callable[[], object]) -> Loop:
    """Return a job that asks for checkpoints at some batches, and does something."""

    def body(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index in batches:
            request_checkpoint()
            # Or a slow agreement is for a boundary behind where all wait for it.
            wait_until(is_stop_due, "the agreement")
        if loader.batch_index == max(batches) + 20:
            wait_until(stage.committed, "the checkpoint")
            then()

    return Loop(stage, on_batch=body)


# Killed


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=SLOW), *in_wide(2)])
def test_the_next_generation_delivers_again_what_came_after_the_checkpoint(
    stage: Stage, killed: int
) -> None:
    def die() -> None:
        if rank() == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    with start_generation(
        saving(stage, 5, then=die), 3, variables=stage.variables()
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert outcomes[killed].exit_code == -9
    assert all(outcome.exit_code for outcome in outcomes)
    [checkpoint] = stage.committed()
    first = checkpoint["position"]["index"] // 6
    assert resumed_indices(stage, 2) == list(range(first, 200))


def test_the_others_do_not_go_on_without_the_dead(stage: Stage) -> None:
    loop = Loop(stage, num_samples=10**9, is_lock_step=False, pace=0.001)
    with start_generation(loop, 3, variables=stage.variables()) as generation:
        wait_until(lambda: all(stage.num_delivered(rank) > 5 for rank in range(3)))
        generation.send_signal(1, signal.SIGKILL)
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [1, -9, 1]
    for other in (0, 2):
        assert "the process of rank 1 died" in (outcomes[other].error or "")


def test_a_stop_whose_answer_died_ends_at_once(stage: Stage) -> None:
    loop = Loop(stage, num_samples=10**9, is_lock_step=False, pace=0.001)
    with start_generation(loop, 3, variables=stage.variables()) as generation:
        wait_until(lambda: all(stage.num_delivered(rank) > 5 for rank in range(3)))
        freeze(generation.pid(1))  # So that it never answers.
        generation.send_signal(0)
        wait_until(lambda: "SIGTERM: stopping" in stage.log(0))
        generation.send_signal(1, signal.SIGKILL)
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [143, -9, 143]
    for other in (0, 2):
        assert "rank 1 died after SIGTERM" in stage.log(other)
    assert stage.committed() == []


def test_without_rank_0_the_others_say_so_and_end(stage: Stage) -> None:
    loop = Loop(stage, num_samples=10**9, is_lock_step=False, pace=0.001)
    with start_generation(loop, 3, variables=stage.variables()) as generation:
        wait_until(lambda: all(stage.num_delivered(rank) > 5 for rank in range(3)))
        generation.send_signal(0, signal.SIGKILL)
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [-9, 1, 1]
    for outcome in outcomes[1:]:
        assert "AgreementError: rank 0 is gone" in (outcome.error or "")


@pytest.mark.parametrize("killed", [0, *in_wide(1)])
def test_who_waits_for_the_dead_on_a_gpu_ends_and_says_why(
    stage: Stage, killed: int
) -> None:
    """There is no GPU here: its collective is a wait without end."""

    def wait_without_end(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index == 5:
            stage.mark(f"waits-{rank()}")
            threading.Event().wait()

    def train() -> object:
        job._STUCK_SECONDS["cpu"] = 0.2
        return Loop(stage, on_batch=wait_without_end, is_lock_step=False)()

    with start_generation(train, 3, variables=stage.variables()) as generation:
        wait_until(lambda: stage.has("waits-0", "waits-1", "waits-2"))
        generation.send_signal(killed, signal.SIGKILL)
        outcomes = generation.wait(timeout=DEADLINE)
    for number, outcome in enumerate(outcomes):
        if number != killed:
            assert outcome.exit_code == 1
            said = stage.log(number)
            assert f"rank {killed} is gone" in said or "rank 1 died" in said
            assert "No boundary came within 0.2 s" in said
            assert "in wait_without_end" in said


class SlowState(State):
    """Is where the test wants it while it saves."""

    is_per_replica = True

    def __init__(self, stage: Stage, during_save: Callable[[], Any]) -> None:
        super().__init__("slow")
        self.stage = stage
        self.during_save = during_save

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(b"half of it")
        self.during_save()
        fileobj.write(b"the other half")

    def load(self, fileobj: BinaryIO) -> None:
        assert fileobj.read() == b"half of itthe other half"


def with_state(stage: Stage, during_save: Callable[[], Any]) -> Callable[[], int]:
    """Return a job that saves at batch 5 and at batch 50, with a `SlowState`."""

    def body(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index in (5, 50):
            request_checkpoint()

    def script() -> int:
        stage.keep_log(os.environ["RANK"])
        SlowState(stage, during_save)
        return Loop(stage, on_batch=body, pace=0.001)()

    return script


@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=SLOW), *in_wide(2)])
def test_a_replica_that_dies_while_it_saves_tears_no_checkpoint(
    stage: Stage, killed: int
) -> None:
    def die() -> None:
        if rank() == killed and stage.committed():
            os.kill(os.getpid(), signal.SIGKILL)

    # No agent ends the others: they must not wait for who will never come.
    with start_generation(
        with_state(stage, die), 3, variables=stage.variables()
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [
        -9 if rank == killed else 1 for rank in range(3)
    ]
    [checkpoint] = stage.committed()
    first = checkpoint["position"]["index"] // 6
    with_state(stage, lambda: None)
    values = run_generation(
        with_state(stage, lambda: None), 3, variables=stage.variables()
    )
    assert set(values) == {value_after(stage.samples())}
    resumed = [line for line in read_trace(stage.trace) if line["generation"] == 1]
    assert min(line["batch"] for line in resumed) == first


@SLOW
def test_a_stop_does_not_wait_for_ever_for_who_dies_while_saving(stage: Stage) -> None:
    def die() -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def script() -> int:
        stage.keep_log(os.environ["RANK"])
        SlowState(stage, die)
        return Loop(stage, on_batch=stop_at(stage, 5, 0, 1, 2))()

    with start_generation(script, 3, variables=stage.variables()) as generation:
        stage.wait_for(*held(range(3)))
        generation.send_signal(2)
        stage.mark("go")
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [143, -9, 143]
    assert stage.committed() == []
    assert "rank 1: its process died" in stage.log(0)
    assert "rank 1: its process died" in stage.log(2)


def test_a_save_does_not_wait_for_a_replica_whose_program_has_ended(
    stage: Stage,
) -> None:
    class Failing(SlowState):
        def sync(self) -> None:
            if rank() == 1:
                raise ZeroDivisionError("rank 1 only")

    def script() -> int:
        stage.keep_log(os.environ["RANK"])
        Failing(stage, lambda: None)
        return saving(stage, 5, then=lambda: None)()

    with start_generation(script, 3, variables=stage.variables()) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert all(outcome.exit_code for outcome in outcomes)
    assert stage.committed() == []
    assert "rank 1: its program has ended" in stage.log(0)


def test_an_exception_in_one_replica_ends_the_others_too(stage: Stage) -> None:
    def body(loader: AdaptiveDataLoader) -> None:
        if rank() == 1 and loader.batch_index == 20:
            raise ZeroDivisionError("rank 1 only")

    with start_generation(
        Loop(stage, on_batch=body), 3, variables=stage.variables()
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]
    assert "rank 1 only" in (outcomes[1].error or "")
    assert stage.committed() == []


# Saving by time


def positions(stage: Stage) -> list[int]:
    return [entry["position"]["index"] // 6 for entry in stage.committed()]


def test_checkpoints_by_time_are_at_the_same_boundaries_everywhere(
    stage: Stage,
) -> None:
    def body(loader: AdaptiveDataLoader) -> None:
        if rank() == 0 and len(stage.committed()) > 2:
            request_stop()

    class Boundaries(State):
        is_per_replica = True

        def __init__(self) -> None:
            super().__init__("boundaries")

        def save(self, fileobj: BinaryIO) -> None:
            number = stage.num_delivered(rank())
            fileobj.write(str(number).encode())

        def load(self, fileobj: BinaryIO) -> None:
            raise AssertionError("nothing to load")

    def script() -> None:
        stage.keep_log(os.environ["RANK"])
        Boundaries()
        Loop(stage, on_batch=body, pace=0.002, num_epochs=10_000)()

    variables = stage.variables(ELASTICRUN_SAVE_INTERVAL=0.05, ELASTICRUN_KEEP=100)
    with start_generation(script, 3, variables=variables) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [75] * 3
    assert len(stage.committed()) > 3
    for path in stage.checkpoints.glob(f"checkpoint-*/{MANIFEST_NAME}"):
        numbers = [file.read_bytes() for file in path.parent.glob("boundaries*")]
        assert numbers == [numbers[0]] * 3


def test_an_interval_of_0_saves_at_every_boundary(stage: Stage) -> None:
    loop = Loop(stage, num_samples=60)
    run_generation(
        loop,
        2,
        variables=stage.variables(ELASTICRUN_SAVE_INTERVAL=0, ELASTICRUN_KEEP=100),
    )
    assert positions(stage) == [*range(1, 11), 0]


def test_off_saves_at_the_end_only(stage: Stage) -> None:
    run_generation(Loop(stage, pace=0.001), 2, variables=stage.variables())
    [checkpoint] = stage.committed()
    assert checkpoint["position"]["finished_epochs"] == 1


@pytest.mark.parametrize("killed", [0, *in_wide(1)])
def test_a_kill_goes_back_to_the_last_checkpoint_by_time(
    stage: Stage, killed: int
) -> None:
    def body(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index > 100:  # A save takes its time, and ends at a boundary.
            time.sleep(1.0)

    with start_generation(
        Loop(stage, on_batch=body),
        2,
        variables=stage.variables(ELASTICRUN_SAVE_INTERVAL=0.01),
    ) as generation:
        wait_until(stage.committed)
        generation.send_signal(killed, signal.SIGKILL)
        outcomes = generation.wait(timeout=DEADLINE)
    assert outcomes[killed].exit_code == -9
    assert outcomes[1 - killed].exit_code
    last = positions(stage)[-1]
    assert 0 < last < 200
    assert resumed_indices(stage, 3) == list(range(last, 200))


# Start and stop, many times


@pytest.mark.parametrize(
    "num_generations",
    [
        pytest.param(10, marks=pytest.mark.slow),
        pytest.param(100, marks=pytest.mark.soak),
    ],
)
@pytest.mark.wide
def test_many_generations_start_and_stop(stage: Stage, num_generations: int) -> None:
    """Each goes on for a few batches; none hangs, none says anything it should not."""

    def script() -> None:
        stage.keep_log(os.environ["RANK"])
        loop = AdaptiveDataLoader(Numbers(6_000), 6, shuffle=True)
        for batch in remaining(loop):
            dist.all_reduce(batch.sum())
            if rank() == 0:
                stage.mark("running")

    variables = stage.variables(ELASTICRUN_GRACE=100_000)  # Who hangs does not end.
    for number in range(num_generations):
        with start_generation(script, 3, variables=variables) as generation:
            stage.wait_for("running")
            generation.send_signal(number % 3)
            outcomes = generation.wait(timeout=DEADLINE)
        (stage.root / "marks" / "running").unlink()
        assert [outcome.exit_code for outcome in outcomes] == [143] * 3, number
        assert len(stage.committed()) == min(number + 1, 3)
    expected = "INFO:elasticrun.", "WARNING:elasticrun.job.boundary:stopping at "
    for rank_ in range(3):
        lines = stage.log(rank_).splitlines()
        assert all(line.startswith(expected) for line in lines)


def remaining(loop: AdaptiveDataLoader) -> Any:
    """Loop for so many epochs that no machine comes to the end."""
    for _ in remaining_epochs_until(1_000_000):
        yield from loop


def test_replicas_that_leave_a_loop_at_different_batches_save_nothing(
    stage: Stage,
) -> None:
    def script() -> None:
        valid = AdaptiveDataLoader(Numbers(24), 4, name="valid")
        train = AdaptiveDataLoader(Numbers(10**6), 4, name="train")
        for _ in remaining_epochs_until(1):
            for number, _ in valid.enumerate():
                if number == 1 + rank():
                    break
            for batch in train:
                if batch[0] >= 20:
                    request_stop()

    with start_generation(script, 2, variables=stage.variables()) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert stage.committed() == []
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    assert re.search(
        r"rank 0 is to save at epoch 0, loop 1, sample \d+ of `train`, but rank 1 at "
        r"epoch 0, loop 1, sample \d+ of `train`\. Replicas must leave their loops",
        outcomes[0].error or "",
    )
