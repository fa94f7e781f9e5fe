"""`batches`: the next global batches of passes that never end."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun import (
    AdaptiveDataLoader,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.job.current import current_job
from elasticrun.testing import Job
from tests.support.data import Draws, Numbers
from tests.support.generations import generation, run_once

pytestmark = pytest.mark.usefixtures("job")


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch.tolist()]


def test_batches_lie_across_the_ends_of_passes() -> None:
    loader = AdaptiveDataLoader(Numbers(10), 4, shuffle=True)
    samples = flat(loader.batches(10))
    assert len(samples) == 40
    passes = [samples[start : start + 10] for start in range(0, 40, 10)]
    assert all(sorted(order) == list(range(10)) for order in passes)
    assert len({tuple(order) for order in passes}) == 4


def test_with_drop_last_a_pass_ends_with_its_last_full_batch() -> None:
    loader = AdaptiveDataLoader(Numbers(10), 4, shuffle=True, drop_last=True)
    samples = flat(loader.batches(6))
    for start in (0, 8, 16):
        assert len(set(samples[start : start + 8])) == 8


def test_where_one_ends_the_next_goes_on() -> None:
    with generation():
        whole = flat(AdaptiveDataLoader(Numbers(10), 4, True, name="a").batches(9))
    loader = AdaptiveDataLoader(Numbers(10), 4, shuffle=True, name="a")
    assert flat(loader) != whole[:10]  # A loop over one pass is none of them.
    parts = flat(loader.batches(2))
    assert loader.finished_batches == 2
    for batch in loader.batches():
        parts += batch.tolist()
        if loader.finished_batches == 5:  # It was the sixth that is left here.
            break
    assert loader.finished_batches == 6
    parts += flat(loader.batches(3))
    assert parts == whole


def test_two_loaders_of_one_length_have_orders_of_their_own() -> None:
    first = AdaptiveDataLoader(Numbers(50), 5, shuffle=True)
    second = AdaptiveDataLoader(Numbers(50), 5, shuffle=True)
    assert flat(first.batches(10)) != flat(second.batches(10))


def test_draws_depend_on_the_place_in_the_passes() -> None:
    """However the passes are cut into loops."""
    options: Any = {"seed_each": "sample", "name": "a"}
    with generation():
        whole = list(AdaptiveDataLoader(Draws(7), 2, True, **options).batches(8))
    loader = AdaptiveDataLoader(Draws(7), 2, True, **options)
    parts = [*loader.batches(3), *loader.batches(5)]
    assert torch.equal(torch.cat(parts), torch.cat(whole))


def test_what_is_said_of_it(tmp_path: Path) -> None:
    said: list[Any] = []

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(10), 4)
        for number in (3, 4):
            batches = loader.batches(number)
            said.append((len(batches), loader.first_batch))
            for _ in batches:
                said.append(
                    (
                        loader.batch_index,
                        loader.finished_batches,
                        loader.index,
                        loader.num_samples,
                    )
                )
                if loader.finished_batches == 4:
                    request_stop()
            said.append(loader.finished_batches)

    run_once(script, tmp_path)
    assert said == [
        (3, 0), (0, 0, 0, 12), (1, 1, 4, 12), (2, 2, 8, 12), 3,
        (4, 0), (0, 3, 0, 16), (1, 4, 4, 16),
    ]  # fmt: skip
    said.clear()
    run_once(script, tmp_path)
    assert said == [
        (3, 0), 3, (4, 2), (2, 5, 8, 16), (3, 6, 12, 16), 7,
    ]  # fmt: skip


def test_the_end_of_it_outside_of_epochs_is_saved(job: Job) -> None:
    loader = AdaptiveDataLoader(Numbers(10), 4, name="train")
    flat(loader.batches(3))
    newest = job.newest_checkpoint
    assert newest is not None
    assert newest.manifest.position["finished_loops"] == 1
    with newest.open("loader.train") as file:
        cursor = json.loads(file.read())["cursor"]
    assert cursor["end"] == 12
    for _ in remaining_epochs_until(1):
        flat(loader.batches(3))
        assert job.newest_checkpoint is newest


def test_a_state_of_its_own_goes_on_in_the_passes() -> None:
    loader = AdaptiveDataLoader(Numbers(10), 4, shuffle=True, name="train")
    flat(loader.batches(5))
    rest = []
    for batch in loader.batches(5):
        if loader.batch_index == 3:
            state = json.loads(json.dumps(loader.state_dict()))
        if loader.batch_index > 3:
            rest.append(batch.tolist())
    with generation():
        again = AdaptiveDataLoader(Numbers(10), 4, shuffle=True, name="train")
        again.load_state_dict(state)
        assert [batch.tolist() for batch in again.batches(5)] == rest
        assert again.finished_batches == 10


def test_passes_are_entered_anywhere_at_once() -> None:
    loader = AdaptiveDataLoader(Numbers(10**9), 50, shuffle=True, name="train")
    flat(loader.batches(1))
    state = loader.state_dict()
    far = 10**12 // 50 * 50
    state["cursor"] = {"place": [0, 0, False], "start": far, "end": far}
    state["cursor"]["is_complete"] = True
    loader.load_state_dict({**state, "index": None})
    for _ in loader.batches():
        assert loader.finished_batches == far // 50
        break


@pytest.mark.parametrize("number", [-1, 2.5, True])
def test_a_number_that_counts_no_batches_is_refused(number: Any) -> None:
    loader = AdaptiveDataLoader(Numbers(10), 4)
    with pytest.raises((TypeError, ValueError), match="batches"):
        loader.batches(number)


def test_passes_without_a_batch_are_refused() -> None:
    loader = AdaptiveDataLoader(Numbers(3), 4, drop_last=True)
    with pytest.raises(ValueError, match="3 samples are fewer than one batch of 4"):
        loader.batches(1)


def test_without_a_number_there_is_no_length() -> None:
    loader = AdaptiveDataLoader(Numbers(10), 4)
    with pytest.raises(TypeError, match="never ends"):
        len(loader.batches())
    assert len(list(islice(loader.batches(), 7))) == 7
    assert current_job().loader is None
