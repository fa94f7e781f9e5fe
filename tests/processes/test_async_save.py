"""Several replicas train on while a thread of each writes; one commits for all."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any, BinaryIO

import pytest
import torch.distributed as dist

from elasticrun import (
    AdaptiveDataLoader,
    ElasticRunError,
    State,
    Variables,
    current_job,
    rank,
    request_stop,
)
from elasticrun.testing import run_generation, start_generation
from tests.support.data import Numbers
from tests.support.full_disk import no_space
from tests.support.held import Held, held_writer
from tests.support.stage import DEADLINE, Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow


class Own(State):
    """Has a file of each replica, and counts its batches."""

    is_per_replica = True

    def __init__(self, name: str = "own") -> None:
        super().__init__(name)
        self.seen = 0

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(f"{rank()}:{self.seen}".encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.seen = int(fileobj.read().partition(b":")[2])


def trained(
    stage: Stage,
    body: Callable[[AdaptiveDataLoader, Held], object],
    *,
    num_batches: int = 12,
    holding: tuple[int, ...] = (0, 1, 2),
) -> Callable[[], Any]:
    """Return a job in lock-step; the writers of some ranks are held from the start.

    It saves by the number of batches, so that all know where.
    """

    def script() -> Any:
        stage.keep_log(os.environ["RANK"])
        with held_writer() as held:
            if int(os.environ["RANK"]) not in holding:
                held.let_go()
            own, best = Own(), Variables(batches=0)
            for _ in (loader := AdaptiveDataLoader(Numbers(num_batches * 6), 6)):
                dist.barrier()
                own.seen += 1
                best.batches += 1
                body(loader, held)
            held.let_go()
            current_job().close()
        return own.seen

    return script


def wait_until_idle() -> None:
    saver = current_job()._saver
    assert saver is not None
    wait_until(lambda: not saver.is_busy)


def own_files(stage: Stage, number: int) -> dict[str, str]:
    folder = stage.checkpoints / f"checkpoint-{number:08d}"
    return {path.name: path.read_text() for path in folder.glob("own.rank-*")}


def indices(stage: Stage) -> list[int]:
    return [entry["position"]["index"] // 6 for entry in stage.committed()]


def saving_every(stage: Stage, num_batches: int, **more: object) -> dict[str, str]:
    return stage.variables(ELASTICRUN_SAVE_EVERY=num_batches, **more)


@pytest.mark.parametrize(
    "holding",
    [*in_wide(((0,),), ((1,),)), (0, 1, 2)],
)
def test_all_save_what_was_at_the_boundary(
    stage: Stage, holding: tuple[int, ...]
) -> None:
    def body(loader: AdaptiveDataLoader, held: Held) -> None:
        if loader.batch_index == 11:
            if rank() == holding[0]:  # Others than rank 0 begin after it.
                held.wait_for_writer()
            dist.barrier()
            assert stage.committed() == []  # All train on, and nothing is there yet.
            dist.barrier()
            held.let_go()

    seen = run_generation(
        trained(stage, body, holding=holding), 3, variables=saving_every(stage, 7)
    )
    assert seen == [12, 12, 12]
    assert indices(stage) == [7]
    assert own_files(stage, 1) == {f"own.rank-{r}": f"{r}:7" for r in range(3)}


def test_the_next_save_and_a_stop_wait_on_every_rank(stage: Stage) -> None:
    """Rank 1's disk is slow; the others have nothing to wait for but rank 1."""

    def body(loader: AdaptiveDataLoader, held: Held) -> None:
        if loader.batch_index == 3 and rank() == 1:
            held.wait_for_writer()
            held.let_go_when_awaited()
        if loader.batch_index == 8 and rank() == 2:
            request_stop()

    with start_generation(
        trained(stage, body, num_batches=100_000, holding=(1,)),
        3,
        variables=saving_every(stage, 2, ELASTICRUN_KEEP=10**6),
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [75, 75, 75]
    found = indices(stage)
    assert found[:4] == [2, 4, 6, 8]
    assert found[-1] > 8
    for number, index in enumerate(found, start=1):
        assert set(own_files(stage, number).values()) == {
            f"{r}:{index}" for r in range(3)
        }


@pytest.mark.parametrize("killed", [0, 1])
def test_a_replica_killed_in_flight_tears_nothing(stage: Stage, killed: int) -> None:
    def body(loader: AdaptiveDataLoader, held: Held) -> None:
        if loader.batch_index == 3:
            held.let_go()
            wait_until(stage.committed)
            dist.barrier()
        if loader.batch_index == 4 and rank() == killed:
            wait_until_idle()
            held.hold_again()
        if loader.batch_index == 8 and rank() == killed:
            held.wait_for_writer()
            os.kill(os.getpid(), signal.SIGKILL)

    with start_generation(
        trained(stage, body), 3, variables=saving_every(stage, 3)
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert outcomes[killed].exit_code == -9
    assert all(outcome.exit_code for outcome in outcomes)
    assert indices(stage) == [3]

    def resumed() -> int:
        return Own().seen

    assert run_generation(resumed, 3, variables=stage.variables()) == [3] * 3


def test_a_failing_disk_of_one_is_told_on_all_and_counted(stage: Stage) -> None:
    def body(loader: AdaptiveDataLoader, held: Held) -> None:
        if loader.batch_index == 0 and rank() == 1:
            held.error = no_space()
        if loader.batch_index == 8:
            held.let_go()
            wait_until_idle()
            assert current_job().num_failed_saves == 0
        if loader.batch_index == 9:
            assert current_job().num_failed_saves == 1

    run_generation(trained(stage, body), 3, variables=saving_every(stage, 7))
    for each in range(3):
        log = stage.log(each)
        assert log.count("CheckpointWarning: checkpoint 1 was not saved: rank 1:") == 1
        assert "No space left on device" in log
    assert stage.committed() == []


@pytest.mark.parametrize("async_save", ["on", *in_wide("off")])
@pytest.mark.parametrize("error", [TimeoutError, *in_wide(AssertionError)])
def test_an_error_without_a_text_is_one(
    stage: Stage, error: type[Exception], async_save: str
) -> None:
    class Failing(Own):
        def save(self, fileobj: BinaryIO) -> None:
            if rank() == 1:
                raise error
            super().save(fileobj)

    def script() -> str:
        stage.keep_log(os.environ["RANK"])
        Failing()
        try:
            return str(current_job().save())
        except Exception as mistake:
            return f"{type(mistake).__name__}: {mistake}"

    variables = stage.variables(ELASTICRUN_ASYNC_SAVE=async_save)
    told = run_generation(script, 2, variables=variables)
    if error is TimeoutError:
        assert told == ["None", "None"]
        for each in range(2):
            assert "1 was not saved: rank 1: TimeoutError. There" in stage.log(each)
    else:
        assert told == ["CheckpointError: rank 1: AssertionError", "AssertionError: "]
    assert stage.directories() == []


def test_a_state_that_one_replica_lacks_is_not_left_out(stage: Stage) -> None:
    def script() -> str:
        if rank() == 0:
            Own()
        try:
            return str(current_job().save())
        except ElasticRunError as error:
            return str(error)

    for told in run_generation(script, 2, variables=stage.variables()):
        assert "would lack own.rank-1: rank 0 has registered that state" in told
    assert stage.directories() == []


@pytest.mark.parametrize("failing", [*in_wide(0), 2])
def test_a_mistake_in_a_state_ends_all_ranks(stage: Stage, failing: int) -> None:
    class Failing(Own):
        def save(self, fileobj: BinaryIO) -> None:
            if rank() == failing:
                raise KeyError("a mistake")
            super().save(fileobj)

    def body(loader: AdaptiveDataLoader, held: Held) -> None:
        held.let_go()
        if loader.batch_index == 0:
            Failing("failing")

    with start_generation(
        trained(stage, body), 3, variables=saving_every(stage, 3)
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]
    assert "KeyError: 'a mistake'" in (outcomes[failing].error or "")
    assert stage.committed() == []


def test_an_exception_in_one_replica_lets_all_finish_what_is_in_flight(
    stage: Stage,
) -> None:
    def body(loader: AdaptiveDataLoader, held: Held) -> None:
        if loader.batch_index == 8:
            if rank() == 0:
                held.wait_for_writer()
            dist.barrier()
            held.let_go()
            if rank() == 1:
                raise ZeroDivisionError("rank 1 only")

    with start_generation(
        trained(stage, body), 3, variables=saving_every(stage, 7)
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert all(outcome.exit_code for outcome in outcomes)
    assert "rank 1 only" in (outcomes[1].error or "")
    assert len(stage.committed()) == 1
    assert stage.directories() == ["checkpoint-00000001"]


def test_who_registers_in_flight_loads_the_same_on_all_ranks(stage: Stage) -> None:
    def first() -> None:
        late = Variables(name="late", value=1)
        late.value = 7
        current_job().save()

    def body(loader: AdaptiveDataLoader, held: Held) -> None:
        if loader.batch_index == 8:
            if rank() == 0:
                held.wait_for_writer()
                held.let_go_when_awaited()
            else:
                held.let_go()
            late = Variables(name="late", value=1)
            assert late.value == 7
            newest = current_job().newest_checkpoint
            assert newest is not None
            assert newest.number == 2

    variables = saving_every(stage, 7, ELASTICRUN_KEEP=1)
    run_generation(first, 3, variables=variables)
    run_generation(trained(stage, body), 3, variables=variables)
    assert stage.directories() == ["checkpoint-00000002"]


def test_an_interval_of_0_saves_each_boundary_without_a_gap(stage: Stage) -> None:
    def body(loader: AdaptiveDataLoader, held: Held) -> None:
        held.let_go()

    run_generation(
        trained(stage, body),
        2,
        variables=stage.variables(ELASTICRUN_SAVE_INTERVAL=0, ELASTICRUN_KEEP=100),
    )
    assert indices(stage) == list(range(1, 13))
    for number in range(1, 13):
        assert set(own_files(stage, number).values()) == {f"0:{number}", f"1:{number}"}


def test_one_without_memory_writes_while_it_waits(stage: Stage) -> None:
    """Which rank is in flight and which waits is a matter of each."""

    def script() -> int:
        stage.keep_log(os.environ["RANK"])
        own = Own()
        for _ in (loader := AdaptiveDataLoader(Numbers(72), 6)):
            dist.barrier()
            own.seen += 1
        return loader.num_samples

    variables = saving_every(stage, 9)

    def mixed() -> int:
        if os.environ["RANK"] == "1":
            os.environ["ELASTICRUN_ASYNC_SAVE"] = "off"
        return script()

    assert run_generation(mixed, 2, variables=variables) == [72, 72]
    (index,) = indices(stage)
    assert index == 9
    assert own_files(stage, 1) == {f"own.rank-{r}": f"{r}:{index}" for r in range(2)}
