"""Loops over an AdaptiveDataLoader: what they deliver, say and cost."""

from __future__ import annotations

import io
import json
import sys
import tracemalloc
from collections.abc import Iterator
from contextlib import redirect_stderr, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from tqdm import tqdm

from elasticrun import (
    AdaptiveDataLoader,
    StateNameError,
    current_dataloader,
    remaining_epochs_until,
    request_stop,
    save_all_states,
)
from elasticrun.data.order.shares import BatchSplit
from elasticrun.job.current import current_job
from elasticrun.testing import Job, read_trace, samples_of_loop
from tests.support.data import Numbers, batches_of
from tests.support.generations import Crash, generation, run_once

pytestmark = pytest.mark.usefixtures("job")


def flat(batches: list[list[int]]) -> list[int]:
    return [sample for batch in batches for sample in batch]


def at_replica(loader: AdaptiveDataLoader, *, rank: int, world_size: int) -> Any:
    """Let a loader of this process read what one of several replicas would."""
    shares = loader.shares
    loader.shares = BatchSplit(
        **{**vars(shares), "rank": rank, "world_size": world_size}
    )
    return loader


def test_a_loop_in_order_is_that_of_a_plain_loader() -> None:
    data = Numbers(10)
    loader = AdaptiveDataLoader(data, batch_size=4)
    assert batches_of(loader) == batches_of(DataLoader(data, batch_size=4))


def test_a_shuffled_loop_has_every_sample_once() -> None:
    loader = AdaptiveDataLoader(Numbers(100), batch_size=7, shuffle=True)
    delivered = flat(batches_of(loader))
    assert sorted(delivered) == list(range(100))
    assert delivered != list(range(100))


def test_drop_last_leaves_out_the_end_of_the_order() -> None:
    whole = AdaptiveDataLoader(Numbers(10), batch_size=4, shuffle=True)
    cut = AdaptiveDataLoader(Numbers(10), batch_size=4, shuffle=True, drop_last=True)
    expected = batches_of(whole)[:2]
    with generation():
        cut = AdaptiveDataLoader(
            Numbers(10), batch_size=4, shuffle=True, drop_last=True
        )
        assert batches_of(cut) == expected
    assert len(cut) == 2
    assert cut.num_samples == 8


def test_a_loop_without_a_full_batch_is_over_at_once() -> None:
    loader = AdaptiveDataLoader(Numbers(3), batch_size=4, drop_last=True)
    assert len(loader) == loader.num_samples == 0
    assert batches_of(loader) == []
    assert current_job().progress.position.finished_loops == 1


def test_the_second_loop_over_a_loader_is_reshuffled() -> None:
    loader = AdaptiveDataLoader(Numbers(50), batch_size=8, shuffle=True)
    orders = []
    for _ in remaining_epochs_until(2):
        orders += [flat(batches_of(loader)), flat(batches_of(loader))]
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_two_loaders_of_one_length_have_different_orders() -> None:
    first = AdaptiveDataLoader(Numbers(50), batch_size=8, shuffle=True)
    second = AdaptiveDataLoader(Numbers(50), batch_size=8, shuffle=True)
    for _ in remaining_epochs_until(1):
        assert batches_of(first) != batches_of(second)


def test_another_seed_is_another_order() -> None:
    orders = []
    for seed in (0, 1):
        with generation():
            loader = AdaptiveDataLoader(Numbers(50), 8, True, seed=seed)
            orders.append(batches_of(loader))
    assert orders[0] != orders[1]


def test_the_length_is_that_of_the_whole_loop_also_after_a_resume(
    tmp_path: Path,
) -> None:
    lengths, delivered = [], []

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(20), batch_size=2)
        for batch in loader:
            delivered.append(batch.tolist())
            lengths.append((len(loader), loader.num_samples))
            if len(delivered) == 6:
                request_stop()

    run_once(script, tmp_path)
    run_once(script, tmp_path)
    assert len(delivered) == 10
    assert set(lengths) == {(10, 20)}


def test_what_a_loader_says_of_its_batches() -> None:
    loader = AdaptiveDataLoader(Numbers(10), batch_size=4, max_local_batch_size=3)
    said = [
        (
            loader.index,
            loader.batch_index,
            loader.global_batch_size,
            loader.local_batch_size,
            loader.num_valid,
            loader.loss_weight,
            loader.is_first,
            loader.is_step,
            len(batch),
        )
        for batch in loader
    ]
    assert said == [
        (0, 0, 4, 4, 2, 0.5, True, False, 2),
        (0, 0, 4, 4, 2, 0.5, False, True, 2),
        (4, 1, 4, 4, 2, 0.5, True, False, 2),
        (4, 1, 4, 4, 2, 0.5, False, True, 2),
        (8, 2, 2, 2, 2, 1.0, True, True, 2),
    ]


def test_what_a_replica_without_samples_says_of_its_padding() -> None:
    loader = AdaptiveDataLoader(Numbers(10), batch_size=6, shuffle=True)
    at_replica(loader, rank=4, world_size=5)
    said = [
        (
            batch.numel(),
            loader.num_valid,
            loader.local_batch_size,
            loader.global_batch_size,
            loader.loss_weight,
            loader.is_step,
        )
        for batch in loader
    ]
    assert said == [(1, 1, 1, 6, 5 / 6, True), (1, 0, 0, 4, 0.0, True)]


def test_without_even_batches_there_is_no_padding() -> None:
    loader = AdaptiveDataLoader(Numbers(10), batch_size=6, even_batches=False)
    at_replica(loader, rank=4, world_size=5)
    said = [(batch.tolist(), loader.loss_weight) for batch in loader]
    assert said == [([5], 5 / 6)]
    assert current_job().progress.position.finished_loops == 1


@pytest.mark.parametrize("world_size", [1, 3, 4, 16])
def test_the_weights_of_one_batch_make_it_whole(world_size: int) -> None:
    weights = []
    for rank in range(world_size):
        with generation():
            loader = AdaptiveDataLoader(Numbers(10), 10, max_local_batch_size=2)
            at_replica(loader, rank=rank, world_size=world_size)
            weights += [loader.loss_weight for _ in loader]
    # Each is multiplied with a mean over the micro-batch, and DDP divides by all.
    assert sum(weights) / world_size == pytest.approx(1.0)


def test_what_a_loader_says_outside_loops() -> None:
    loader = AdaptiveDataLoader(Numbers(10), batch_size=4)
    for _ in range(2):
        assert loader.index == 0
        assert loader.batch_index == 0
        assert loader.num_samples == 10
        assert loader.global_batch_size == 4
        assert loader.local_batch_size == 0
        assert loader.num_valid == 0
        assert loader.loss_weight == 1.0
        assert loader.is_step
        batches_of(loader)


def test_the_current_loader_is_that_of_the_running_loop() -> None:
    loader = AdaptiveDataLoader(Numbers(4), batch_size=2)
    assert current_dataloader() is None
    for _ in loader:
        assert current_dataloader() is loader
    assert current_dataloader() is None
    for _ in loader:
        break
    assert current_dataloader() is None


def test_enumerate_gives_the_number_of_the_global_batch_after_a_resume(
    tmp_path: Path,
) -> None:
    numbers: list[int] = []

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(10), 4, max_local_batch_size=3)
        for number, batch in loader.enumerate():
            assert batch[0] // 4 == number
            numbers.append(number)
            if len(numbers) == 2:
                request_stop()

    run_once(script, tmp_path)
    assert numbers == [0, 0]
    run_once(script, tmp_path)
    assert numbers == [0, 0, 1, 1, 2]


def test_boundaries_fall_between_global_batches_only(tmp_path: Path) -> None:
    delivered: list[tuple[int, int]] = []

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(12), 4, max_local_batch_size=1)
        for batch in loader:
            delivered.append((loader.batch_index, int(batch)))
            if len(delivered) == 5:
                request_stop()

    run_once(script, tmp_path)
    assert [number for number, _ in delivered] == [0] * 4 + [1] * 4
    run_once(script, tmp_path)
    assert [sample for _, sample in delivered] == list(range(12))


def test_a_save_in_the_body_delivers_the_current_batch_again(tmp_path: Path) -> None:
    delivered: list[list[int]] = []

    def script() -> None:
        for batch in AdaptiveDataLoader(Numbers(8), batch_size=2):
            delivered.append(batch.tolist())
            if len(delivered) == 2:
                save_all_states()
                raise Crash

    run_once(script, tmp_path)
    run_once(script, tmp_path)
    assert delivered == [[0, 1], [2, 3], [2, 3], [4, 5], [6, 7]]


def test_two_saves_in_one_generation_are_two_checkpoints(tmp_path: Path) -> None:
    paths = []

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(8), batch_size=2)
        paths.extend(save_all_states() for _ in loader)

    run_once(script, tmp_path)
    assert [path.name for path in paths if path] == [
        f"checkpoint-{number:08d}" for number in (1, 2, 3, 4)
    ]
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == [path.name for path in paths[1:] if path]


def test_a_program_without_a_checkpoint_directory_runs_and_saves_nothing() -> None:
    def script() -> Any:
        for epoch in remaining_epochs_until(2):
            for _ in AdaptiveDataLoader(Numbers(4), 2, name=f"train-{epoch}"):
                assert save_all_states() is None
        return "done"

    assert run_once(script) == "done"


def stop_by_break(loader: AdaptiveDataLoader) -> None:
    for _ in loader:
        break


def stop_by_return(loader: AdaptiveDataLoader) -> Any:
    for batch in loader:
        return batch
    return None


def stop_through_wrappers(loader: AdaptiveDataLoader) -> None:
    def logged(batches: Any) -> Iterator[Any]:
        yield from batches

    for _, _ in enumerate(logged(loader.enumerate())):
        break


@pytest.mark.parametrize(
    "leave", [stop_by_break, stop_by_return, stop_through_wrappers]
)
def test_a_loop_that_was_left_is_finished(leave: Any) -> None:
    leave(AdaptiveDataLoader(Numbers(10), batch_size=2))
    position = current_job().progress.position
    assert (position.finished_loops, position.index, position.loader) == (1, 0, "")


def test_a_loop_that_raised_is_finished_once_the_next_one_begins() -> None:
    loader = AdaptiveDataLoader(Numbers(10), batch_size=2)
    with suppress(LookupError):
        for _ in loader:
            if loader.batch_index == 2:
                raise LookupError
    position = current_job().progress.position
    assert (position.finished_loops, position.index) == (0, 4)
    assert position.loader == loader.name
    assert batches_of(loader)[0] == [0, 1]
    assert current_job().progress.position.finished_loops == 2


def test_a_data_set_that_fails_leaves_the_loop_unfinished() -> None:
    class Broken(Numbers):
        def __getitem__(self, index: int) -> int:
            if index == 5:
                raise OSError("the disk is gone")
            return index

    loader = AdaptiveDataLoader(Broken(10), batch_size=2)
    with pytest.raises(OSError, match="the disk is gone"):
        batches_of(loader)
    assert current_job().progress.position.index == 4
    assert current_dataloader() is None


def test_progress_shows_a_bar_that_resumes_where_it_was(tmp_path: Path) -> None:
    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(20), 2, name="train", progress=True)
        for _ in loader:
            if loader.batch_index == 5:
                request_stop()

    shown = []
    for _ in range(2):
        with redirect_stderr(io.StringIO()) as written:
            run_once(script, tmp_path)
        shown.append(written.getvalue())
    assert "train:   0%" in shown[0]
    assert "6/10" in shown[0]
    assert "train:  60%" in shown[1]
    assert "10/10" in shown[1]


def test_a_bar_of_ones_own_is_told_where_the_loop_begins(tmp_path: Path) -> None:
    def script() -> str:
        loader = AdaptiveDataLoader(Numbers(20), 2, name="train")
        file = io.StringIO()
        for _ in tqdm(loader, initial=loader.first_batch, file=file, mininterval=0):
            if loader.batch_index == 5:
                request_stop()
        return file.getvalue()

    run_once(script, tmp_path)
    shown = run_once(script, tmp_path)
    assert " 6/10" in shown
    assert "10/10" in shown


def test_the_trace_has_a_line_for_each_micro_batch(tmp_path: Path) -> None:
    trace_dir = tmp_path / "trace"

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(5), 4, max_local_batch_size=2)
        for epoch in remaining_epochs_until(2):
            for _ in loader:
                if epoch == 1:
                    request_stop()

    for _ in range(2):
        run_once(script, tmp_path, trace_dir=str(trace_dir))
    common = {"rank": 0, "world_size": 1, "loop": 0}
    expected = [
        (0, 0, 0, 0, [0, 1]),
        (0, 0, 0, 1, [2, 3]),
        (0, 0, 1, 0, [4]),
        (0, 1, 0, 0, [0, 1]),
        (0, 1, 0, 1, [2, 3]),
        (1, 1, 1, 0, [4]),
    ]
    assert read_trace(trace_dir) == [
        {
            "generation": generation_,
            "epoch": epoch,
            "batch": batch,
            "micro": micro,
            "indices": indices,
            "num_valid": len(indices),
            **common,
        }
        for generation_, epoch, batch, micro, indices in expected
    ]
    names = sorted(path.name for path in trace_dir.iterdir())
    assert names == ["0-0.jsonl", "1-0.jsonl"]
    first_line = (trace_dir / "0-0.jsonl").read_text().splitlines()[0]
    assert list(json.loads(first_line)) == [
        "generation",
        "rank",
        "world_size",
        "epoch",
        "loop",
        "batch",
        "micro",
        "indices",
        "num_valid",
    ]
    assert samples_of_loop(read_trace(trace_dir), epoch=1, loop=0) == {
        0: [0, 1, 2, 3],
        1: [4],
    }


def test_the_trace_has_real_samples_first(tmp_path: Path) -> None:
    with generation(trace_dir=str(tmp_path)):
        loader = AdaptiveDataLoader(Numbers(10), batch_size=2, shuffle=True)
        batches_of(at_replica(loader, rank=2, world_size=3))
    lines = read_trace(tmp_path)
    assert len(lines) == 5
    assert all(line["num_valid"] == 0 for line in lines)
    assert all(len(line["indices"]) == 1 for line in lines)


def calls_of(action: Any) -> list[str]:
    """Return every function, of Python or C, that an action calls."""
    calls: list[str] = []

    def note(frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)
        elif event == "c_call":
            calls.append(f"{argument.__name__} (C)")

    sys.setprofile(note)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls[:-1]  # Without that of `sys.setprofile`.


def test_a_boundary_takes_no_lock_and_no_system_call(job: Job) -> None:
    job.boundary.reach()  # The first one has memory prepared for saves.
    # Either would be a C function.
    assert calls_of(job.boundary.reach) == ["reach", "arrive"]


def test_a_batch_passes_one_boundary_and_asks_nobody() -> None:
    def iterate(num_batches: int) -> list[str]:
        loader = AdaptiveDataLoader(
            Numbers(num_batches), 1, collate_fn=list, name=f"loader-of-{num_batches}"
        )
        return calls_of(lambda: [None for _ in loader])

    few, many = iterate(10), iterate(110)
    own = ("reach", "arrive", "popleft (C)", "append (C)")
    for name in own:
        assert many.count(name) - few.count(name) == 100
    for name in ("acquire (C)", "wait", "write (C)", "fsync (C)", "monotonic (C)"):
        assert many.count(name) == few.count(name)


def test_resuming_far_into_a_long_loop_costs_nothing() -> None:
    num_samples = 10**9
    loader = AdaptiveDataLoader(Numbers(num_samples), batch_size=50, shuffle=True)
    at_start = next(iter(loader))
    state = {**loader.state_dict(), "index": num_samples // 10 * 9}
    tracemalloc.start()
    loader.load_state_dict(state)
    for batch in loader:
        assert batch.shape == torch.Size([50])
        assert batch.tolist() != at_start.tolist()
        assert loader.batch_index == len(loader) // 10 * 9
        break
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4_000_000


def test_a_name_is_not_empty(job: Job) -> None:
    with pytest.raises(StateNameError, match="name='' cannot name a loader"):
        AdaptiveDataLoader(Numbers(4), 2, name="")
