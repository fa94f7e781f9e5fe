"""DataLoader workers and the signals that a whole process group gets."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from unittest import mock

import psutil
from torch.utils.data import TensorDataset

from elasticrun.testing import run_generation
from tests.support.stage import wait_until


def loop_over_workers_that_are_signalled_at_their_start() -> int:
    import torch

    import elasticrun as er

    er.init()
    os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGTERM))
    data = TensorDataset(torch.arange(12))
    loader = er.AdaptiveDataLoader(
        data, 2, num_workers=2, multiprocessing_context="fork"
    )
    return sum(len(batch) for (batch,) in loader)


def test_a_stop_cannot_kill_a_worker_that_is_just_starting() -> None:
    delivered = run_generation(loop_over_workers_that_are_signalled_at_their_start, 1)
    assert delivered == [12]


def loop_over_workers_of_which_forks_hang(hanging: set[int]) -> tuple[list[int], int]:
    import torch

    import elasticrun as er

    er.init()
    num_forks = 0

    def count() -> None:
        nonlocal num_forks
        num_forks += 1

    def hang() -> None:
        if num_forks in hanging:
            signal.pause()  # Stop signals are held back.

    os.register_at_fork(before=count, after_in_child=hang)
    data = TensorDataset(torch.arange(12))
    loader = er.AdaptiveDataLoader(
        data, 2, num_workers=2, multiprocessing_context="fork"
    )
    return [int(each) for (batch,) in loader for each in batch], num_forks


def test_a_worker_that_never_begins_is_forked_again() -> None:
    ((delivered, num_forks),) = run_generation(
        loop_over_workers_of_which_forks_hang, 1, {2, 3}
    )
    assert delivered == list(range(12))
    assert num_forks == 4


def loop_over_workers_that_begin_when_they_are_given_up(marks: str) -> list[int]:
    import torch

    import elasticrun as er
    from elasticrun.data.workers import forking

    er.init()
    kill = os.kill

    def kill_late(pid: int, number: int) -> None:
        wait_until(Path(marks, str(pid)).exists)
        kill(pid, number)

    def note(_: int) -> None:
        Path(marks, str(os.getpid())).touch()

    loader = er.AdaptiveDataLoader(
        TensorDataset(torch.arange(12)),
        2,
        num_workers=4,
        multiprocessing_context="fork",
        worker_init_fn=note,
    )
    with (
        mock.patch.object(forking, "_PATIENCE", (0.0,)),
        mock.patch.object(os, "kill", kill_late),
    ):
        return [int(each) for (batch,) in loader for each in batch]


def test_a_worker_that_begins_late_is_not_killed(tmp_path: Path) -> None:
    """It holds its queue's lock, for which a worker in its place would wait."""
    loop = loop_over_workers_that_begin_when_they_are_given_up
    assert run_generation(loop, 1, str(tmp_path)) == [list(range(12))]


def loop_over_workers_whose_start_is_interrupted() -> int:
    import torch

    import elasticrun as er

    er.init()
    wait = os.waitid

    class Interrupted(Exception):
        """What a signal handler of the program raises."""

    def interrupt(*_: object) -> None:
        raise Interrupted

    def wait_and_be_interrupted(*arguments: int) -> None:
        wait(*arguments)
        signal.raise_signal(signal.SIGVTALRM)

    signal.signal(signal.SIGVTALRM, interrupt)
    os.register_at_fork(after_in_child=signal.pause)
    loader = er.AdaptiveDataLoader(
        TensorDataset(torch.arange(12)),
        2,
        num_workers=1,
        multiprocessing_context="fork",
    )
    before = set(psutil.Process().children())
    with (
        mock.patch.object(os, "waitid", wait_and_be_interrupted),
        contextlib.suppress(Interrupted),
    ):
        list(loader)
    return len(set(psutil.Process().children()) - before)


def test_a_worker_whose_start_is_interrupted_is_not_left_stopped() -> None:
    loop = loop_over_workers_whose_start_is_interrupted
    assert run_generation(loop, 1) == [0]


def end_while_the_other_goes_on(num_rounds: int) -> int:
    import torch

    import elasticrun as er

    er.init()
    data = TensorDataset(torch.arange(40))
    loader = er.AdaptiveDataLoader(data, 2, even_batches=False)
    if er.rank() == 1:
        er.request_stop()
        er.current_job().close()
        return 0
    return sum(len(list(loader)) for _ in range(num_rounds))


def test_a_replica_whose_program_ends_does_not_hold_the_others_back() -> None:
    # For the grace an answer would be awaited.
    never = {"ELASTICRUN_GRACE": "100000"}
    ended = run_generation(end_while_the_other_goes_on, 2, 50, variables=never)
    assert ended[1] == 0
