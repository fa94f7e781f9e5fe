"""What the job decides about the batch sizes of a loader, with one replica."""

from __future__ import annotations

import io
import json
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointError,
    CheckpointWarning,
    CombinedLoader,
    ElasticRunError,
    LoopOrderError,
    remaining_epochs_until,
    request_checkpoint,
    request_stop,
    save_all_states,
)
from elasticrun.data.autoscale import Autoscaler
from tests.checkpoint.inspection.running import run
from tests.support.data import Numbers
from tests.support.full_disk import fail_for_space
from tests.support.generations import run_once


def measuring() -> AdaptiveDataParallel:
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), 0.0)
    model = AdaptiveDataParallel(net, optimizer, measure_noise=True)
    model.eval()  # To train, batches that are measured would come in two pieces.
    return model


def numbers(
    batch_size: Any = 4, *, num_samples: int = 64, largest: int = 16, **options: Any
) -> AdaptiveDataLoader:
    """Return a loader whose sizes the job decides, for a model that does not train."""
    measuring()
    loader = AdaptiveDataLoader(
        Numbers(num_samples), batch_size, name="train", **options
    )
    loader.autoscale(largest, min_efficiency=0)
    return loader


def autoscaler_of(loader: AdaptiveDataLoader) -> Autoscaler:
    assert loader._autoscaler is not None
    return loader._autoscaler


def force(loader: AdaptiveDataLoader, *sizes: int | None) -> None:
    """Let these be decided, one after another."""
    left = iter(sizes)
    autoscaler_of(loader).choose = lambda: next(left, None)  # type: ignore[method-assign]


def test_a_decision_holds_from_the_boundary_on_at_which_it_is_saved(
    tmp_path: Path,
) -> None:
    def script() -> list[int]:
        loader = numbers()
        force(loader, 8, 16)
        sizes = []
        for batch in loader:
            sizes.append(len(batch))
            if loader.batch_index in (2, 4):
                request_checkpoint()
            assert loader.batch_index == len(sizes) - 1
            assert loader.index == sum(sizes[:-1])
        assert len(loader) == len(sizes)
        return sizes

    assert run_once(script, tmp_path) == [4, 4, 4, 8, 8, 16, 16, 4]


def test_a_bar_shows_how_many_batches_there_are_now(tmp_path: Path) -> None:
    def script() -> None:
        loader = numbers(progress=True)
        force(loader, 16)
        for _ in loader:
            if loader.batch_index == 3:
                request_checkpoint()

    with redirect_stderr(io.StringIO()) as shown:
        run_once(script, tmp_path)
    assert "0/16" in shown.getvalue()
    assert "7/7" in shown.getvalue()


def test_other_saves_decide_nothing(tmp_path: Path) -> None:
    def script() -> list[int]:
        loader = numbers()
        force(loader, 8)
        sizes = []
        for batch in loader:
            sizes.append(len(batch))
            save_all_states()
            if loader.batch_index == 3:
                request_stop()
        return sizes

    assert run_once(script, tmp_path) is None
    assert run_once(lambda: len(list(numbers())), tmp_path) == 12


def test_a_failed_save_drops_the_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script() -> list[int]:
        loader = numbers()
        force(loader, 8, None, 16)
        sizes = []
        for batch in loader:
            sizes.append(len(batch))
            monkeypatch.undo()
            if loader.batch_index in (1, 3, 5):
                request_checkpoint()
            if loader.batch_index == 1:
                monkeypatch.setattr(os, "fsync", fail_for_space)
        return sizes

    with pytest.warns(CheckpointWarning, match="No space left"):
        sizes = run_once(script, tmp_path)
    assert sizes == [4] * 6 + [16, 16, 8]
    assert plan_in(tmp_path, "newest") == {"0": 4, "24": 16}


def plan_in(directory: Path, which: object) -> Any:
    return run(directory, "show", which, "--json").values["batch_sizes"]["train"]


def test_it_goes_on_without_autoscale_and_with_the_recorded_plan(
    tmp_path: Path,
) -> None:
    def script() -> None:
        loader = numbers(num_samples=64)
        force(loader, 8)
        for _ in loader:
            if loader.batch_index == 1:
                request_checkpoint()
            if loader.batch_index == 3:
                request_stop()

    def plain(batch_size: Any = 4) -> list[int]:
        loader = AdaptiveDataLoader(Numbers(64), batch_size, name="train")
        return [number for batch in loader for number in batch.tolist()]

    run_once(script, tmp_path / "job")
    assert plan_in(tmp_path / "job", 1) == {"0": 4, "8": 8}
    shown = run(tmp_path / "job", "show", "newest").lines
    assert "  batch sizes  {0: 4, 8: 8} of train, by samples seen" in shown
    assert run_once(plain, tmp_path / "job") == list(range(24, 64))
    assert run_once(lambda: plain({0: 4, 8: 8}), tmp_path / "job") == [*range(24, 64)]
    with pytest.raises(CheckpointError, match="4 as the batch size"):
        run_once(lambda: plain(8), tmp_path / "job")


def test_at_the_end_of_an_epoch_the_next_one_is_decided(tmp_path: Path) -> None:
    def script() -> list[list[int]]:
        loader = numbers(num_samples=20)
        force(loader, 8, 16, 5)
        sizes = []
        for epoch in remaining_epochs_until(3):
            if epoch == 2:
                assert len(loader) == 2
            sizes.append([len(batch) for batch in loader])
        return sizes

    sizes = run_once(script, tmp_path, save_every="epoch")
    assert sizes == [[4] * 5, [8, 8, 4], [16, 4]]


def test_endless_passes_are_decided_by_all_samples(tmp_path: Path) -> None:
    def script() -> list[list[int]]:
        loader = numbers(num_samples=10)
        force(loader, 8, 16)
        sizes: list[list[int]] = []
        for _ in remaining_epochs_until(2):
            sizes.append([])
            for batch in loader.batches(4):
                sizes[-1].append(len(batch))
                if loader.batch_index == 1:
                    request_checkpoint()
        return sizes

    assert run_once(script, tmp_path) == [[4, 4, 8, 8], [8, 8, 16, 16]]


def test_other_loops_and_places_decide_nothing(tmp_path: Path) -> None:
    def script() -> list[int]:
        loader, valid = numbers(num_samples=16), AdaptiveDataLoader(Numbers(8), 4)
        force(loader, 8)
        sizes = []
        for _ in remaining_epochs_until(2):
            for _ in valid:
                request_checkpoint()
            sizes += [len(batch) for batch in loader]
            for _ in valid:
                request_checkpoint()
        return sizes

    # Only where an epoch has ended.
    assert run_once(script, tmp_path, save_every="epoch") == [4] * 4 + [8, 8]


def know(loader: AdaptiveDataLoader, *steps: list[float]) -> None:
    """Let the loader have timed these."""
    assert loader._state.times is not None
    loader._state.times.decode({"batch_size": 16, "steps": steps})


def chosen(
    *,
    critical: float | None,
    seconds: dict[int, float],
    largest: int = 64,
    first: int = 16,
    min_efficiency: float = 0.0,
) -> int | None:
    """Return what is chosen, given how long batches of a size take."""
    model = measuring()
    loader = AdaptiveDataLoader(Numbers(64), first, name="train")
    loader.autoscale(largest, min_efficiency=min_efficiency)
    loader._state._decide(((16, 16),) if first != 16 else ())
    error = 0.0 if critical is not None else 9.0
    steps = [[critical or 1.0, 1.0 + sign * error] for sign in (-1, 1)] * 5
    values = json.dumps({"steps": steps, "progress": 0.0})
    record = model._noise
    assert record is not None
    record.load(io.BytesIO(values.encode()))
    know(loader, *([1, 1, size, 1, time] for size, time in seconds.items()))
    return autoscaler_of(loader).choose()


CONSTANT = {16: 1.0, 32: 1.0, 64: 1.0}
PROPORTIONAL = {16: 1.0, 32: 2.0, 64: 4.0}


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("critical", "seconds", "largest", "expected"),
    [
        (1e6, CONSTANT, 64, 32),  # Twice as many at most.
        (1e6, CONSTANT, 24, 24),
        (1e6, PROPORTIONAL, 64, None),  # Nothing is to be had.
        (0.1, CONSTANT, 64, None),  # Less than 5 %.
        (None, CONSTANT, 64, None),  # Unknown.
        (1e6, {32: 1.0}, 64, None),  # This size was not timed.
    ],
)
def test_what_is_chosen(
    critical: float | None,
    seconds: dict[int, float],
    largest: int,
    expected: int | None,
) -> None:
    assert chosen(critical=critical, seconds=seconds, largest=largest) == expected


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("min_efficiency", "first", "expected"),
    [
        (0.0, 16, 32),
        (0.9, 16, 28),  # (100 + 16) / (100 + 28) is 0.906.
        (1.0, 16, None),
        (0.9, 4, 15),  # It is 16 now, of too little worth: (100 + 4) / (100 + 15).
    ],
)
def test_samples_are_worth_as_much_as_is_asked_for(
    min_efficiency: float, first: int, expected: int | None
) -> None:
    found = chosen(
        critical=100.0, seconds=CONSTANT, first=first, min_efficiency=min_efficiency
    )
    assert found == expected


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("min_efficiency", [-0.1, 1.1, float("nan")])
def test_an_efficiency_is_from_0_to_1(min_efficiency: float) -> None:
    loader = AdaptiveDataLoader(Numbers(64), 4)
    with pytest.raises(ValueError, match="must be from 0 to 1"):
        loader.autoscale(16, min_efficiency=min_efficiency)


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize(
    ("options", "largest", "text"),
    [
        ({"batch_size": {0: 4, 8: 8}}, 16, "batch_size is a plan"),
        ({"batch_size": 4, "drop_last": True}, 16, "with drop_last"),
        ({"batch_sampler": [[0, 1], [2]]}, 16, "batch_sampler gives"),
        ({"batch_size": 4}, 3, "below batch_size=4"),
        ({"batch_size": 4}, 0, "must be a whole number"),
    ],
)
def test_sizes_that_are_fixed_otherwise_are_refused(
    options: dict[str, Any], largest: int, text: str
) -> None:
    loader = AdaptiveDataLoader(Numbers(16), **options)
    with pytest.raises(ValueError, match=text):
        loader.autoscale(largest)


@pytest.mark.usefixtures("job")
def test_a_second_loader_is_refused() -> None:
    numbers()
    with pytest.raises(ElasticRunError, match="one loader"):
        AdaptiveDataLoader(Numbers(8), 4).autoscale(8)


@pytest.mark.usefixtures("job")
def test_a_model_has_to_measure() -> None:
    loader = AdaptiveDataLoader(Numbers(8), 4)
    loader.autoscale(8)
    with pytest.raises(ElasticRunError, match="measure_noise=True"):
        next(iter(loader))


@pytest.mark.usefixtures("job")
def test_loops_in_which_sizes_cannot_change_are_refused() -> None:
    loader = numbers()
    with pytest.raises(LoopOrderError, match="it is a member of"):
        next(iter(CombinedLoader([loader], "min_size")))
    with pytest.raises(LoopOrderError, match="somebody else owns"):
        next(loader.read(0))
    for _ in AdaptiveDataLoader(Numbers(4), 4):
        with pytest.raises(LoopOrderError, match="in the body"):
            next(iter(loader))


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("second", [None, 3])
def test_a_second_loop_over_the_same_samples_is_refused(second: int | None) -> None:
    loader = numbers()
    list(loader)
    with pytest.raises(LoopOrderError, match="once in each epoch"):
        list(loader if second is None else loader.batches(second))


def test_a_state_of_ones_own_has_the_sizes(tmp_path: Path) -> None:
    def script() -> Any:
        loader = numbers()
        force(loader, 8)
        for _ in loader:
            if loader.batch_index == 1:
                request_checkpoint()
            if loader.batch_index == 2:
                return loader.state_dict()
        return None

    state = run_once(script, tmp_path)

    def other(batch_size: Any) -> int:
        loader = AdaptiveDataLoader(Numbers(64), batch_size, name="train")
        loader.load_state_dict(state)
        return int(next(iter(loader))[0])

    assert run_once(lambda: other({0: 4, 8: 8})) == 16
    with pytest.raises(CheckpointError, match="as the batch size"):
        run_once(lambda: other(4))
