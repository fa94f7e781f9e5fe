"""A stop that any replica hears of saves all at one boundary, and is bounded."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from elasticrun import (
    AdaptiveDataLoader,
    current_job,
    rank,
    remaining_epochs_until,
    request_stop,
    world_size,
)
from elasticrun.replicas import stop_clock
from elasticrun.testing import Outcome, run_generation, start_generation
from elasticrun.testing.replicas import StartedGeneration
from tests.support.data import Numbers
from tests.support.loops import Loop, held, hold_at, is_stop_due, stop_at, value_after
from tests.support.stage import DEADLINE, Stage, freeze, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow

ENDLESS = {"ELASTICRUN_GRACE": 100_000}


def exit_codes(outcomes: list[Outcome]) -> list[int | None]:
    return [outcome.exit_code for outcome in outcomes]


def stopped(
    stage: Stage,
    loop: Callable[[], Any],
    world_size: int,
    *,
    at: list[str],
    by: Callable[[StartedGeneration], object],
    **variables: object,
) -> list[Outcome]:
    """Run a generation up to the marks `at`, interrupt it, and let it go on."""
    with start_generation(
        loop, world_size, variables=stage.variables(**variables)
    ) as generation:
        stage.wait_for(*at)
        by(generation)
        stage.mark("go")
        return generation.wait(timeout=DEADLINE)


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def check_stopped_at_one_boundary(stage: Stage, loop: Loop, world_size: int) -> None:
    [checkpoint] = stage.committed()
    index = checkpoint["position"]["index"]
    assert 0 < index < loop.num_samples
    delivered = [stage.num_delivered(rank) for rank in range(world_size)]
    assert delivered == [index // loop.batch_size] * world_size


# All save at one boundary


@pytest.mark.parametrize("is_lock_step", [True, False], ids=["lock-step", "free"])
@pytest.mark.parametrize(
    ("world_size", "signalled"),
    [
        (3, 0),
        *in_wide((1, 0), (4, 2)),
        *(
            pytest.param(*pair, marks=pytest.mark.soak)
            for pair in [(2, 0), (2, 1), (3, 1), (3, 2), (4, 0), (4, 1), (4, 3)]
        ),
    ],
)
def test_a_signal_to_any_replica_stops_all_at_one_boundary(
    stage: Stage, world_size: int, signalled: int, is_lock_step: bool
) -> None:
    ranks = range(world_size)
    hold = stop_at(stage, 5, *ranks)

    def body(loader: AdaptiveDataLoader) -> None:
        hold(loader)
        time.sleep(0.002 if is_lock_step else 0.001 * (1 + rank()))

    loop = Loop(stage, is_lock_step=is_lock_step, on_batch=body)
    first = stopped(
        stage, loop, world_size, at=held(ranks), by=lambda g: g.send_signal(signalled)
    )
    assert exit_codes(first) == [143] * world_size
    check_stopped_at_one_boundary(stage, loop, world_size)
    second = run_generation(
        Loop(stage, is_lock_step=is_lock_step),
        5 - world_size if is_lock_step else world_size,
        variables=stage.variables(),
    )
    stage.check_exactly_once(loop.num_samples)
    if is_lock_step:
        assert set(second) == {value_after(stage.samples())}


def test_sigint_leaves_with_130(stage: Stage) -> None:
    loop = Loop(stage, on_batch=stop_at(stage, 5, 0, 1))
    first = stopped(
        stage, loop, 2, at=held([0, 1]), by=lambda g: g.send_signal(1, signal.SIGINT)
    )
    assert exit_codes(first) == [130, 130]
    check_stopped_at_one_boundary(stage, loop, 2)
    assert "KeyboardInterrupt" not in stage.log(0) + stage.log(1)


def test_what_a_signal_has_announced_does_not_hurry_the_save(stage: Stage) -> None:
    """As Slurm warns with SIGUSR1, and sends SIGTERM when the time is over."""

    def warn_and_end(generation: StartedGeneration) -> None:
        generation.send_signal(1, signal.SIGUSR1)
        wait_until(lambda: "SIGUSR1: stopping at the next" in stage.log(1))
        generation.send_signal(1, signal.SIGTERM)

    loop = Loop(stage, on_batch=stop_at(stage, 5, 0, 1))
    first = stopped(stage, loop, 2, at=held([0, 1]), by=warn_and_end)
    assert exit_codes(first) == [138, 138]
    check_stopped_at_one_boundary(stage, loop, 2)


@pytest.mark.parametrize("world_size", [*in_wide(1), 3])
def test_the_program_itself_can_ask_and_leaves_with_75(
    stage: Stage, world_size: int
) -> None:
    def body(loader: AdaptiveDataLoader) -> None:
        if rank() == world_size - 1 and loader.batch_index == 5:
            request_stop()
            wait_until(is_stop_due, "the agreement")

    loop = Loop(stage, on_batch=body)
    first = stopped(stage, loop, world_size, at=[], by=lambda _: None)
    assert exit_codes(first) == [75] * world_size
    check_stopped_at_one_boundary(stage, loop, world_size)


def test_the_group_signals_all_replicas_at_once(stage: Stage) -> None:
    def signal_all(generation: StartedGeneration) -> None:
        for signalled in range(3):
            generation.send_signal(signalled)

    loop = Loop(stage, on_batch=stop_at(stage, 5, 0, 1, 2))
    first = stopped(stage, loop, 3, at=held(range(3)), by=signal_all)
    assert exit_codes(first) == [143] * 3
    check_stopped_at_one_boundary(stage, loop, 3)


def test_the_same_signal_twice_in_a_moment_is_one(stage: Stage) -> None:
    """The scheduler signals the group, and the agent its replicas."""

    def signal_twice(generation: StartedGeneration) -> None:
        generation.send_signal(0)
        generation.send_signal(0)

    def script() -> None:
        stop_clock.REPEAT_SECONDS = DEADLINE  # However late the second one comes.
        loop()

    loop = Loop(stage, on_batch=stop_at(stage, 5, 0, 1))
    first = stopped(stage, script, 2, at=held([0, 1]), by=signal_twice)
    assert exit_codes(first) == [143, 143]
    check_stopped_at_one_boundary(stage, loop, 2)


@pytest.mark.parametrize("signalled", [0, *in_wide(1, 2)])
def test_replicas_agree_while_the_others_are_inside_a_collective(
    stage: Stage, signalled: int
) -> None:
    def body(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index < 5:
            return
        if rank() == 1:
            stage.mark("held")
            wait_until(is_stop_due, "the agreement")
        dist.barrier()  # Where the other two wait, in C++.

    loop = Loop(stage, on_batch=body)
    first = stopped(stage, loop, 3, at=["held"], by=lambda g: g.send_signal(signalled))
    assert exit_codes(first) == [143] * 3
    check_stopped_at_one_boundary(stage, loop, 3)
    run_generation(Loop(stage), 2, variables=stage.variables())
    stage.check_exactly_once(loop.num_samples)


def test_replicas_that_run_ahead_through_an_evaluation_wait_for_the_others(
    stage: Stage,
) -> None:
    """With `even_batches=False` one has no batch at all, and is in the next epoch."""

    def script() -> None:
        stage.keep_log(os.environ["RANK"])
        train = AdaptiveDataLoader(Numbers(24), 8, shuffle=True)
        valid = AdaptiveDataLoader(Numbers(30), 3, even_batches=False)
        for epoch in remaining_epochs_until(20):
            for batch in train:
                dist.all_reduce(batch.sum())
            for _ in valid:
                if epoch == 1 and valid.batch_index == 4 and not stage.has("go"):
                    stage.mark(f"held-{rank()}")
                    stage.wait_for("go")
                    wait_until(is_stop_due, "the agreement")

    first = stopped(stage, script, 4, at=held(range(3)), by=lambda g: g.send_signal(3))
    assert exit_codes(first) == [143] * 4
    [checkpoint] = stage.committed()
    assert checkpoint["position"]["finished_epochs"] >= 1
    run_generation(script, 3, variables=stage.variables())
    for epoch in range(20):
        for loop, num_samples in enumerate((24, 30)):
            assert stage.delivered(epoch=epoch, loop=loop) == list(range(num_samples))


# DataLoader workers


@pytest.mark.parametrize(
    "method",
    [
        "fork",
        pytest.param("spawn", marks=[pytest.mark.slow, pytest.mark.wide]),
        pytest.param("forkserver", marks=[pytest.mark.slow, pytest.mark.wide]),
    ],
)
def test_workers_leave_the_signals_of_the_group_to_the_replica(
    stage: Stage, method: str
) -> None:
    def script() -> None:
        os.setpgid(0, 0)
        loop()

    loop = Loop(
        stage,
        on_batch=stop_at(stage, 5, 0, 1),
        options={"num_workers": 2, "multiprocessing_context": method},
    )
    workers: list[psutil.Process] = []

    def signal_groups(generation: StartedGeneration) -> None:
        for pid in (generation.pid(0), generation.pid(1)):
            workers.extend(psutil.Process(pid).children(recursive=True))
            os.killpg(pid, signal.SIGTERM)

    first = stopped(stage, script, 2, at=held([0, 1]), by=signal_groups)
    assert exit_codes(first) == [143, 143]
    check_stopped_at_one_boundary(stage, loop, 2)
    assert len(workers) >= 4
    wait_until(lambda: all(has_ended(worker.pid) for worker in workers))
    run_generation(Loop(stage), 2, variables=stage.variables())
    stage.check_exactly_once(loop.num_samples)


# What stalls


class Stalling(Numbers):
    """Reads sample by sample up to one that never comes, on some ranks."""

    def __init__(self, length: int, stage: Stage, ranks: tuple[int, ...]) -> None:
        super().__init__(length)
        self.stage = stage
        self.ranks = ranks
        self.num_read = 0

    def __getitem__(self, index: int) -> int:
        self.num_read += 1
        if self.num_read > 10 and int(os.environ["RANK"]) in self.ranks:
            self.stage.mark("stalled")
            while True:
                time.sleep(3600)
        return index


@pytest.mark.parametrize("num_workers", [*in_wide(0), 1])
def test_a_data_set_that_stalls_cannot_keep_a_stop_for_ever(
    stage: Stage, num_workers: int
) -> None:
    def mark_after_it(loader: AdaptiveDataLoader) -> None:
        """Mark that the boundary after the first batch was passed."""
        gate = current_job()._gate
        before = gate.number

        def watch() -> None:
            wait_until(lambda: gate.number > before)
            stage.mark("waits for a batch")

        if loader.batch_index == 0:
            threading.Thread(target=watch, daemon=True).start()

    loop = Loop(
        stage,
        dataset=Stalling(1200, stage, (0,)),
        options={"num_workers": num_workers},
        on_batch=mark_after_it,
    )
    workers: list[psutil.Process] = []

    def interrupt(generation: StartedGeneration) -> None:
        stage.wait_for("waits for a batch")
        workers.extend(psutil.Process(generation.pid(0)).children(recursive=True))
        generation.send_signal(0)

    first = stopped(stage, loop, 1, at=["stalled"], by=interrupt, ELASTICRUN_GRACE=0.5)
    assert exit_codes(first) == [143]
    assert stage.committed() == []
    log = stage.log(0)
    assert "no boundary came within 0.5 s of SIGTERM" in log
    assert "of `loader-0`" in log
    assert "in __getitem__" in log if num_workers == 0 else "in _next_data" in log
    assert len(workers) >= num_workers
    wait_until(lambda: all(has_ended(worker.pid) for worker in workers))


@pytest.mark.parametrize(
    ("stalled", "signalled"),
    [
        *[(0, 1), (1, 0)],
        *in_wide((0, 0), (0, 2), (1, 1), (1, 2)),
    ],
)
def test_the_others_say_which_rank_never_came(
    stage: Stage, stalled: int, signalled: int
) -> None:
    loop = Loop(
        stage,
        is_lock_step=False,
        pace=0.001,
        dataset=Stalling(10**6, stage, (stalled,)),
    )
    first = stopped(
        stage,
        loop,
        3,
        at=["stalled"],
        by=lambda g: g.send_signal(signalled),
        ELASTICRUN_GRACE=1,
    )
    assert exit_codes(first) == [143] * 3
    assert stage.committed() == []
    assert "in __getitem__" in stage.log(stalled)
    for other in {0, 1, 2} - {stalled}:
        assert re.search(rf"rank {stalled}\b", stage.log(other))


@pytest.mark.parametrize("signalled", [0, *in_wide(1)])
def test_a_stalled_rank_keeps_nobody_in_a_collective_for_ever(
    stage: Stage, signalled: int
) -> None:
    def script() -> None:
        if os.environ["RANK"] == "1":
            let_leave_last()
        Loop(stage, dataset=Stalling(1200, stage, (1,)))()

    def let_leave_last() -> None:
        """Else the end of rank 1 might end the collective before the clock does."""
        leave = stop_clock._exit_telling

        def leave_last(*arguments: Any) -> None:
            wait_until(lambda: "no boundary came" in stage.log(0))
            leave(*arguments)

        stop_clock._exit_telling = leave_last

    first = stopped(
        stage,
        script,
        2,
        at=["stalled"],
        by=lambda g: g.send_signal(signalled),
        ELASTICRUN_GRACE=1,
    )
    assert exit_codes(first) == [143] * 2
    assert "in __getitem__" in stage.log(1)
    for log in (stage.log(0), stage.log(1)):
        assert "no boundary came within 1 s of SIGTERM" in log


@pytest.mark.parametrize("signalled", [0, *in_wide(2)])
def test_a_stopped_replica_is_named(stage: Stage, signalled: int) -> None:
    loop = Loop(stage, num_samples=10**9, is_lock_step=False, pace=0.001)

    def script() -> None:
        stop_clock.NAMING_SECONDS = DEADLINE  # However slow rank 0 is to name it.
        loop()

    with start_generation(
        script, 3, variables=stage.variables(ELASTICRUN_GRACE=1)
    ) as generation:
        wait_until(lambda: all(stage.num_delivered(rank) > 5 for rank in range(3)))
        freeze(generation.pid(1))
        generation.send_signal(signalled)
        wait_until(lambda: has_ended(generation.pid(0)))
        wait_until(lambda: has_ended(generation.pid(2)))
        generation.send_signal(1, signal.SIGKILL)
        outcomes = generation.wait(timeout=DEADLINE)
    assert exit_codes(outcomes) == [143, -9, 143]
    for other in (0, 2):
        assert "rank 1 never answered within 1 s of SIGTERM" in stage.log(other)
    assert stage.committed() == []


def test_a_stopped_rank_0_is_named(stage: Stage) -> None:
    loop = Loop(stage, num_samples=10**9, is_lock_step=False, pace=0.001)
    with start_generation(
        loop, 2, variables=stage.variables(ELASTICRUN_GRACE=1)
    ) as generation:
        wait_until(lambda: all(stage.num_delivered(rank) > 5 for rank in range(2)))
        freeze(generation.pid(0))
        generation.send_signal(1)
        wait_until(lambda: has_ended(generation.pid(1)))
        generation.send_signal(0, signal.SIGKILL)
        outcomes = generation.wait(timeout=DEADLINE)
    assert exit_codes(outcomes) == [-9, 143]
    assert "rank 0 never answered within 1 s of SIGTERM" in stage.log(1)


# A second signal


@pytest.mark.parametrize(
    ("number", "exit_code"),
    [
        *in_wide((signal.SIGTERM, 143)),
        (signal.SIGINT, 130),
    ],
)
def test_a_second_signal_leaves_at_once(
    stage: Stage, number: int, exit_code: int
) -> None:
    loop = Loop(stage, on_batch=hold_at(stage, 5, 0, 1))
    with start_generation(loop, 2, variables=stage.variables(**ENDLESS)) as generation:
        stage.wait_for(*held([0, 1]))
        generation.send_signal(1, number)
        wait_until(lambda: "stopping at the next boundary" in stage.log(1))
        time.sleep(1.1)  # Within a second of the first one it is taken for the same.
        generation.send_signal(1, number)
        wait_until(lambda: has_ended(generation.pid(1)))
        generation.send_signal(0, signal.SIGKILL)
        outcomes = generation.wait(timeout=DEADLINE)
    assert exit_codes(outcomes) == [-9, exit_code]
    assert stage.committed() == []


def test_another_signal_than_the_first_leaves_at_once(stage: Stage) -> None:
    loop = Loop(stage, on_batch=hold_at(stage, 5, 0))
    with start_generation(loop, 1, variables=stage.variables(**ENDLESS)) as generation:
        stage.wait_for("held-0")
        generation.send_signal(0, signal.SIGINT)
        wait_until(lambda: "stopping at the next boundary" in stage.log(0))
        generation.send_signal(0, signal.SIGTERM)
        outcomes = generation.wait(timeout=DEADLINE)
    assert exit_codes(outcomes) == [143]


# Outside of loops


def meet(tensor: torch.Tensor) -> None:
    if world_size() > 1:
        dist.all_reduce(tensor)


def outside(stage: Stage, place: str) -> Callable[[], int]:
    """Return a script with two loops an epoch that is held outside of them."""

    def hold(here: str) -> None:
        if here == place and not stage.has("go"):
            stage.mark(f"held-{rank()}")
            stage.wait_for("go")
            if place != "after the last loop":
                wait_until(is_stop_due, "the agreement")

    def script() -> int:
        stage.keep_log(os.environ["RANK"])
        first = AdaptiveDataLoader(Numbers(600), 6)
        second = AdaptiveDataLoader(Numbers(600), 6)
        hold("before the first loop")
        for _ in remaining_epochs_until(2):
            for batch in first:
                meet(batch.sum())
                time.sleep(0.001)
            hold("between loops")
            for batch in second:
                meet(batch.sum())
                time.sleep(0.001)
        hold("after the last loop")
        return 1

    return script


@pytest.mark.parametrize("signalled", [0, *in_wide(1)])
@pytest.mark.parametrize("place", ["before the first loop", "between loops"])
def test_a_signal_outside_of_loops_stops_at_the_next_boundary(
    stage: Stage, place: str, signalled: int
) -> None:
    first = stopped(
        stage,
        outside(stage, place),
        2,
        at=held([0, 1]),
        by=lambda g: g.send_signal(signalled),
    )
    assert exit_codes(first) == [143, 143]
    [checkpoint] = stage.committed()
    assert checkpoint["position"]["finished_loops"] == int(place == "between loops")
    assert 0 < checkpoint["position"]["index"] < 600
    assert run_generation(
        outside(stage, "nowhere"), 1 + signalled, variables=stage.variables()
    )
    for epoch, loop in ((0, 0), (0, 1), (1, 0), (1, 1)):
        assert stage.delivered(epoch=epoch, loop=loop) == list(range(600))


def test_a_signal_after_the_last_loop_lets_the_program_end(stage: Stage) -> None:
    first = stopped(
        stage,
        outside(stage, "after the last loop"),
        2,
        at=held([0, 1]),
        by=lambda g: g.send_signal(1),
    )
    assert exit_codes(first) == [0, 0]
    [checkpoint] = stage.committed()
    assert checkpoint["position"]["finished_epochs"] == 2


def test_a_program_that_never_ends_after_its_last_loop_is_left(stage: Stage) -> None:
    def script() -> None:
        outside(stage, "nowhere")()
        stage.mark(f"held-{rank()}")
        while True:
            time.sleep(3600)

    def signal_both(generation: StartedGeneration) -> None:
        generation.send_signal(0)
        generation.send_signal(1)

    first = stopped(
        stage, script, 2, at=held([0, 1]), by=signal_both, ELASTICRUN_GRACE=0.5
    )
    assert exit_codes(first) == [143, 143]
    assert stage.committed()[-1]["position"]["finished_epochs"] == 2


# What programs do


def test_a_caught_exception_does_not_swallow_the_stop(stage: Stage) -> None:
    loop = Loop(stage, on_batch=stop_at(stage, 5, 0, 1))

    def script() -> str:
        try:
            loop()
        except Exception:
            return "swallowed"
        return "finished"

    first = stopped(stage, script, 2, at=held([0, 1]), by=lambda g: g.send_signal(0))
    assert exit_codes(first) == [143, 143]
    assert [outcome.result for outcome in first] == [None, None]


@pytest.mark.parametrize("is_set_before", [True, False])
def test_the_programs_own_handler_still_runs(stage: Stage, is_set_before: bool) -> None:
    loop = Loop(stage, on_batch=stop_at(stage, 5, 0, 1))

    def handler(number: int, frame: FrameType | None) -> None:
        stage.mark(f"handled-{os.environ['RANK']}")

    def script() -> None:
        if not is_set_before:
            current_job()
        signal.signal(signal.SIGTERM, handler)
        loop()

    first = stopped(stage, script, 2, at=held([0, 1]), by=lambda g: g.send_signal(1))
    assert exit_codes(first) == [143, 143]
    assert stage.has("handled-1")
    assert not stage.has("handled-0")
    check_stopped_at_one_boundary(stage, loop, 2)


def test_a_signal_to_a_fork_of_a_replica_is_its_own(stage: Stage) -> None:
    def body(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index != 5:
            return
        child = os.fork()
        if child == 0:
            signal.pause()
            os._exit(0)
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGTERM

    loop = Loop(stage, on_batch=body)
    assert run_generation(loop, 2, variables=stage.variables())
    stage.check_exactly_once(loop.num_samples)


def test_nobody_says_anything_at_a_normal_end(stage: Stage) -> None:
    loop = Loop(stage, num_epochs=2, options={"num_workers": 1})
    run_generation(loop, 3, variables=stage.variables())
    assert stage.log(1) + stage.log(2) == ""
    lines = stage.log(0).splitlines()
    assert all(line.startswith("INFO:elasticrun.") for line in lines)
