"""Streams in real replicas: each sample once, through stops, kills and rescaling."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from elasticrun import (
    AdaptiveDataLoader,
    Uncounted,
    Variables,
    generation,
    init,
    rank,
    remaining_epochs_until,
    request_checkpoint,
)
from elasticrun.testing import GenerationFailed, run_generation
from tests.support.programs import request_stop_and_wait
from tests.support.streams import KINDS, LENGTHS

pytestmark = pytest.mark.slow

BATCH = 96
NUM_BATCHES = -(-sum(LENGTHS) // BATCH)
# Of streams that nobody has counted, each in a lane of its own.
NUM_OF_SLOTS = -(-max(LENGTHS) * len(LENGTHS) // BATCH)


def numbers(samples: list[Any]) -> list[int]:
    return [int(sample["n"]) for sample in samples]


def script(
    directory: str,
    files: str,
    kind: str,
    num_workers: int = 0,
    stop_in: int = -1,
    kill_in: tuple[int, int] = (-1, -1),
) -> str:
    """Loop twice over streams; note what is delivered."""
    init(directory, save_interval="off")
    streams: Any = KINDS[kind.removeprefix("uncounted ")](Path(files))
    loader = AdaptiveDataLoader(
        Uncounted(streams) if kind.startswith("uncounted ") else streams,
        BATCH,
        shuffle=True,
        num_workers=num_workers,
        max_local_batch_size=50,
        collate_fn=numbers,
    )
    count = Variables(batches=0)
    with open(f"{directory}.{generation()}.{rank()}", "w") as log:
        for epoch in remaining_epochs_until(2):
            for batch in loader:
                if (epoch, loader.batch_index) == kill_in and rank() == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                own = batch[: loader.num_valid]
                assert 0 < len(own) <= 50 or loader.loss_weight == 0
                share = [loader.global_batch_size, loader.loss_weight]
                line = [epoch, loader.batch_index, share, own]
                print(json.dumps(line), file=log, flush=True)
                if loader.is_step:
                    count.batches += 1
                    if count.batches == stop_in:
                        request_stop_and_wait()
                    elif count.batches % 7 == 0:
                        request_checkpoint()
    return f"{count.batches} batches"


def delivered(directory: Path) -> dict[int, dict[tuple[int, int], list[int]]]:
    """Return, for each generation, the samples of each global batch, sorted."""
    generations: dict[int, dict[tuple[int, int], list[int]]] = {}
    for log in sorted(directory.parent.glob(f"{directory.name}.*.*")):
        batches = generations.setdefault(int(log.name.split(".")[1]), {})
        for line in log.read_text().splitlines():
            epoch, batch, _, samples = json.loads(line)
            batches.setdefault((epoch, batch), []).extend(samples)
    return {
        number: {key: sorted(samples) for key, samples in batches.items()}
        for number, batches in generations.items()
    }


_FAST = ("lines", "tar", "uncounted lines")  # The others are wide.


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "kind",
    [
        each if each in _FAST else pytest.param(each, marks=pytest.mark.wide)
        for each in (*KINDS, "uncounted gzip", "uncounted lines", "uncounted resumable")
    ],
)
def test_batches_are_the_same_through_stops_a_kill_and_rescaling(
    kind: str, tmp_path: Path
) -> None:
    files = tmp_path / "files"
    files.mkdir()
    KINDS[kind.removeprefix("uncounted ")](files)  # Replicas find them whole.
    calm, shaken = tmp_path / "calm", tmp_path / "shaken"
    run_generation(script, 1, str(calm), str(files), kind)
    [expected] = delivered(calm).values()
    num_batches = 1 + max(batch for _, batch in expected)
    if kind in ("uncounted gzip", "uncounted lines"):
        assert num_batches == NUM_OF_SLOTS
    else:
        assert num_batches == NUM_BATCHES
    for epoch in (0, 1):
        samples = [n for (at, _), own in expected.items() if at == epoch for n in own]
        assert sorted(samples) == list(range(sum(LENGTHS)))

    args = (str(shaken), str(files), kind)
    assert run_generation(script, 1, *args, 0, 5) == [None]
    with pytest.raises(GenerationFailed):
        run_generation(script, 3, *args, 2, -1, (1, 3))
    assert run_generation(script, 2, *args, 1) == [f"{2 * num_batches} batches"] * 2

    kept: dict[tuple[int, int], list[int]] = {}
    for batches in delivered(shaken).values():
        assert all(set(own) <= set(expected[key]) for key, own in batches.items())
        # What lies before the place where a generation went on was delivered whole;
        # what came behind it had not been saved, and a kill may have torn it.
        kept = {key: own for key, own in kept.items() if key < min(batches)}
        assert all(own == expected[key] for key, own in kept.items())
        assert len(kept) == sum(key < min(batches) for key in expected)
        kept |= batches
    assert kept == expected

    check_weights(shaken, generation=2, world_size=2)


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("kind", ["uncounted iterable", "uncounted lines"])
def test_stops_come_while_the_next_batch_is_summed(kind: str, tmp_path: Path) -> None:
    files = tmp_path / "files"
    files.mkdir()
    KINDS[kind.removeprefix("uncounted ")](files)
    calm, shaken = tmp_path / "calm", tmp_path / "shaken"
    run_generation(script, 1, str(calm), str(files), kind)
    args = (str(shaken), str(files), kind)
    assert run_generation(script, 3, *args, 0, 4) == [None] * 3
    assert run_generation(script, 2, *args, 2, len(*delivered(calm).values()) - 2) == [
        None,
        None,
    ]
    run_generation(script, 3, *args)
    check_weights(shaken, generation=2, world_size=3)
    kept: dict[tuple[int, int], list[int]] = {}
    for batches in delivered(shaken).values():
        assert not kept.keys() & batches.keys()
        kept |= batches
    assert [kept] == list(delivered(calm).values())


def check_weights(directory: Path, *, generation: int, world_size: int) -> None:
    """Compare the weights in a generation with what was delivered in it."""
    shares: dict[tuple[int, int], list[list[Any]]] = {}
    for number in range(world_size):
        log = Path(f"{directory}.{generation}.{number}")
        for line in log.read_text().splitlines():
            epoch, batch, share, samples = json.loads(line)
            shares.setdefault((epoch, batch), []).append([*share, len(samples)])
    for own in shares.values():
        size = sum(num_samples for _, _, num_samples in own)
        assert own == [
            [size, pytest.approx(n * world_size / size), n] for _, _, n in own
        ]


class OfItsRank(IterableDataset[int]):
    """Shares itself out where nobody sees it."""

    def __init__(self) -> None:
        self.own = range(rank(), 40, 2)

    def __iter__(self) -> Iterator[int]:
        return iter(self.own)


def loop_over_what_differs(directory: str) -> None:
    init(directory)
    for _ in AdaptiveDataLoader(OfItsRank(), 4):
        pass


def test_iterable_data_that_differs_by_rank_is_found_out(tmp_path: Path) -> None:
    expected = (
        r"the beginning of the data is '\[0, 2.*on rank 0, but '\[1, 3.*on rank 1"
    )
    with pytest.raises(GenerationFailed, match=expected):
        run_generation(loop_over_what_differs, 2, str(tmp_path))
