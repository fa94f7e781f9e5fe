"""`ForeignLoop`: loops of trainers, stopped and killed at each of their steps."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    ForeignLoop,
    LoopOrderError,
    finished_epochs,
    remaining_epochs_until,
    request_stop,
    save_all_states,
)
from elasticrun.job.current import current_job
from tests.support.data import Numbers
from tests.support.foreign import (
    NUM_EPOCHS,
    NUM_STEPS,
    Trainer,
    delivered,
    deliveries,
    position_of,
)
from tests.support.generations import Crash, draw_from_each, run_once

EVERY_STEP = range(1, NUM_STEPS * NUM_EPOCHS + 1)


def run(
    directory: Path, on_step: Callable[[Trainer], None], **options: Any
) -> dict[str, Any] | None:
    trainer = Trainer(str(directory), on_step=on_step)
    trace = str(directory / "trace")
    ended: dict[str, Any] | None = run_once(
        trainer.run, directory, trace_dir=trace, **options
    )
    return ended


def calmly(trainer: Trainer) -> None:
    pass


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    directory = tmp_path_factory.mktemp("calm")
    return run(directory, calmly), delivered(directory / "trace")


def test_stops_at_every_step_do_not_show(tmp_path: Path, calm: Any) -> None:
    places = []

    def stop_first(trainer: Trainer) -> None:
        places.append(position_of(trainer))
        request_stop()

    results = [run(tmp_path, stop_first) for _ in EVERY_STEP]
    assert results == [None] * len(EVERY_STEP)
    assert places == [(e, s) for e in range(NUM_EPOCHS) for s in range(NUM_STEPS)]
    assert (run(tmp_path, calmly), delivered(tmp_path / "trace")) == calm


@pytest.mark.parametrize("died_in", EVERY_STEP)
def test_a_kill_repeats_the_step_and_nothing_else(
    tmp_path: Path, calm: Any, died_in: int
) -> None:
    def die(trainer: Trainer) -> None:
        if trainer.count.steps == died_in:
            raise Crash

    assert run(tmp_path, die, save_interval=0) is None
    assert run(tmp_path, calmly) == calm[0]
    assert delivered(tmp_path / "trace") == calm[1]
    taken = sorted(place for _, place in deliveries(tmp_path / "trace"))
    assert taken == sorted([*calm[1], divmod(died_in - 1, NUM_STEPS)])


def test_an_exception_that_is_caught_leaves_the_epoch_at_its_boundary(
    tmp_path: Path, calm: Any
) -> None:
    trainer = Trainer(str(tmp_path), fails_at=6)
    trace = str(tmp_path / "trace")
    assert run_once(trainer.run, tmp_path, trace_dir=trace) == calm[0]
    assert delivered(trace) == calm[1]


def test_batches_are_those_of_a_loop_of_ones_own(tmp_path: Path, calm: Any) -> None:
    def script() -> dict[Any, list[int]]:
        loader = AdaptiveDataLoader(Numbers(23), 6, shuffle=True)
        return {
            (epoch, number): batch.tolist()
            for epoch in remaining_epochs_until(NUM_EPOCHS)
            for number, batch in loader.enumerate()
        }

    assert run_once(script) == calm[1]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_read_begins_at_a_batch_and_gives_micro_batches(num_workers: int) -> None:
    def script() -> Any:
        loader = AdaptiveDataLoader(
            Numbers(23),
            6,
            shuffle=True,
            max_local_batch_size=4,
            num_workers=num_workers,
        )
        loop = ForeignLoop("trainer")
        loop.begin(len(loader))
        seen = []
        for batch, share in list(loader.read(1, 2)):
            loop.take(share)
            seen.append((batch.tolist(), loop.is_step, loop.loss_weight))
        return [list(loader.read(1)), seen]

    whole, seen = run_once(script)
    assert [batch for batch, _, _ in seen] == [b.tolist() for b, _ in whole[4:]]
    assert [is_step for _, is_step, _ in seen] == [False, True, False, True]
    assert [weight for *_, weight in seen] == [3 / 6, 3 / 6, 3 / 5, 2 / 5]


def test_reading_again_in_an_epoch_has_an_order_of_its_own(job: Any) -> None:
    loader = AdaptiveDataLoader(Numbers(23), 6, shuffle=True)
    first, again, other = (
        [batch.tolist() for batch, _ in loader.read(0, number=number)]
        for number in (0, 0, 1)
    )
    assert first == again != other
    with pytest.raises(ValueError, match="has 4 global batches"):
        loader.read(0, 5)
    assert list(loader.read(0, 4)) == []


def test_steps_that_accumulate_are_counted_together(tmp_path: Path) -> None:
    def script(stop_at: int) -> list[tuple[int, int]]:
        loop = ForeignLoop("trainer")
        places = []
        while finished_epochs() < 2:
            epoch, step = loop.begin(6)
            places.append((epoch, step))
            for number in range(step, 6, 2):
                if number == stop_at:
                    request_stop()
                loop.pass_boundary(2)
            loop.end()
        loop.finish()
        return places

    assert run_once(lambda: script(2), tmp_path) is None
    assert run_once(lambda: script(-1), tmp_path) == [(0, 4), (1, 0)]
    assert run_once(lambda: script(-1), tmp_path) == []


def test_the_generators_come_back_at_begin(tmp_path: Path) -> None:
    def script(*, is_first: bool) -> Any:
        loop = ForeignLoop("trainer")
        loop.begin(5)
        if is_first:
            loop.pass_boundary()
            save_all_states()
        return draw_from_each()

    first = run_once(lambda: script(is_first=True), tmp_path)
    assert run_once(lambda: script(is_first=False), tmp_path) == first


def test_loops_before_and_after_keep_their_places(tmp_path: Path) -> None:
    def script(*, stop_in: str) -> list[str]:
        loader = AdaptiveDataLoader(Numbers(4), 2, name="own")
        loop = ForeignLoop("trainer")
        seen = [f"before {batch.tolist()}" for batch in loader]
        while finished_epochs() < 2:
            epoch, step = loop.begin(2)
            for number in range(step, 2):
                seen.append(f"step {epoch} {number}")
                if stop_in == seen[-1]:
                    request_stop()
                loop.pass_boundary()
            loop.end()
        loop.finish()
        for batch in loader:
            seen.append(f"after {batch.tolist()}")
            if stop_in == seen[-1]:
                request_stop()
        return seen

    whole = run_once(lambda: script(stop_in=""))
    for stop_in in (whole[3], whole[6]):
        assert run_once(lambda s=stop_in: script(stop_in=s), tmp_path) is None
    assert run_once(lambda: script(stop_in=""), tmp_path) == whole[7:]


def test_a_count_of_ones_own_is_compared(tmp_path: Path) -> None:
    def script(*, step: int) -> None:
        loop = ForeignLoop("trainer")
        loop.begin(9, epoch=0, step=step)
        loop.pass_boundary()
        request_stop()
        loop.pass_boundary()
        loop.pass_boundary()

    assert run_once(lambda: script(step=0), tmp_path) is None
    told = "`trainer` is at step 3 of epoch 0 .* the job is at step 2 of epoch 0"
    with pytest.raises(LoopOrderError, match=told):
        run_once(lambda: script(step=3), tmp_path)
    run_once(lambda: script(step=2), tmp_path)


def test_the_position_is_named(job: Any) -> None:
    loop = ForeignLoop("trainer")
    loop.begin(9)
    loop.pass_boundary()
    position = current_job().progress.position
    assert str(position) == "epoch 0, loop 0, step 1 of `trainer`"


def test_what_has_no_place_is_refused(job: Any) -> None:
    own = AdaptiveDataLoader(Numbers(4), 2, name="own")
    loop = ForeignLoop("trainer")
    with pytest.raises(LoopOrderError, match=r"pass_boundary of .* outside of an ep"):
        loop.pass_boundary()
    loop.begin(9)
    with pytest.raises(LoopOrderError, match="began inside epoch 0"):
        loop.begin(9)
    inner = iter(own)
    next(inner)
    with pytest.raises(LoopOrderError, match="loop over `own`"):
        loop.pass_boundary()
