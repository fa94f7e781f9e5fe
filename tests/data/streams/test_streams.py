"""A loader over streams: loops, restarts, and what is refused."""

from __future__ import annotations

import itertools
import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Dataset, IterableDataset

from elasticrun import (
    AdaptiveDataLoader,
    CheckpointError,
    CombinedLoader,
    ElasticRunError,
    Endless,
    Mixed,
    Packed,
    ParquetRows,
    ResidentShards,
    TextLines,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.data.streams.in_lanes import warn_of_uneven
from elasticrun.job.trace import Trace
from elasticrun.testing import read_trace, samples_of_loop
from tests.support.generations import generation, run_once
from tests.support.numbered_streams import LENGTHS, Cut, Numbers, flat


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Numbers, {}),
        (Numbers, {"drop_last": True}),
        (Numbers, {"shuffle": True}),
        (Cut, {"shuffle": True}),
        (Cut, {"batch_size": {0: 4, 30: 11}, "max_local_batch_size": 3}),
    ],
)
def test_a_loop_goes_on_at_the_sample(
    kind: type[Numbers], options: dict[str, Any], tmp_path: Path
) -> None:
    def script(stop_in: int = -1) -> list[tuple[int, list[int]]]:
        streams = kind(*LENGTHS, lanes=3, window=9)
        loader = AdaptiveDataLoader(streams, **{"batch_size": 8, **options})
        for epoch in remaining_epochs_until(2):
            for batch in loader:
                delivered.append((epoch, batch.tolist()))
                if len(delivered) == stop_in:
                    request_stop()
        return delivered

    delivered: list[tuple[int, list[int]]] = []
    calm = run_once(script)
    for epoch in (0, 1):
        samples = [sample for at, batch in calm if at == epoch for sample in batch]
        assert (
            len(set(samples)) == len(samples) == (88 if "drop_last" in options else 90)
        )
    for stop_in in (1, 5, len(calm) // 2, len(calm) - 1):
        delivered = []
        directory = tmp_path / str(stop_in)
        assert run_once(lambda at=stop_in: script(at), directory) is None
        assert len(delivered) in (stop_in, stop_in + 1)
        assert run_once(script, directory) == calm


def test_a_state_dict_is_where_the_loader_was() -> None:
    def loader() -> Any:
        return AdaptiveDataLoader(Numbers(*LENGTHS, lanes=3, window=5), 8, True)

    with generation():
        first = loader()
        batches = iter(first)
        delivered = flat(itertools.islice(batches, 5))
        state = first.state_dict()
        rest = flat(batches)
    with generation():
        second = loader()
        second.load_state_dict(state)
        assert flat(second) == rest
    assert sorted(delivered + rest) == list(range(90))


def test_a_loop_over_streams_in_the_body_of_another_one(tmp_path: Path) -> None:
    def script(stop_in: int = -1) -> list[list[int]]:
        outer = AdaptiveDataLoader(Numbers(*LENGTHS, lanes=3, window=5), 40, True)
        inner = AdaptiveDataLoader(Numbers(6, 5, lanes=2), 4, True)
        for batch in outer:
            bodies.append([*batch.tolist(), *flat(inner), *flat(inner.batches(2))])
            if len(bodies) == stop_in:
                request_stop()
        return bodies

    bodies: list[list[int]] = []
    calm = run_once(script)
    assert len(calm) == 3
    assert all(sorted(body[-19:-8]) == list(range(11)) for body in calm)
    bodies = []
    run_once(lambda: script(1), tmp_path)
    assert run_once(script, tmp_path) == calm


def test_endless_batches_go_on_in_other_passes(tmp_path: Path) -> None:
    def script(num_batches: int) -> list[int]:
        loader = AdaptiveDataLoader(Numbers(*LENGTHS, lanes=3, window=5), 8, True)
        for number, batch in enumerate(loader.batches(40), 1):
            delivered.extend(batch.tolist())
            if number == num_batches:
                request_stop()
        return delivered

    delivered: list[int] = []
    whole = run_once(lambda: script(-1))
    delivered = []
    passes = [whole[at : at + 90] for at in (0, 90, 180)]
    assert all(sorted(each) == list(range(90)) for each in passes)
    assert passes[0] != passes[1] != passes[2]
    for num_batches in (3, 20, 11):
        run_once(lambda at=num_batches: script(at), tmp_path)
    assert run_once(lambda: script(-1), tmp_path) == whole


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_resume_reads_at_most_a_window_again(shuffle: bool) -> None:
    streams = Numbers(10_000, lanes=1, window=100)
    with generation():
        loader = AdaptiveDataLoader(streams, 10, shuffle)
        batches = loader.read(0, first_batch=555)
        next(batches)
    [(_, first)] = streams.opened
    assert 5400 <= first <= 5550
    assert shuffle or first == 5550


def test_members_of_a_combined_loader_may_be_streams(job: Any) -> None:
    streams = AdaptiveDataLoader(Numbers(*LENGTHS, lanes=3), 9, True, name="streams")
    items = AdaptiveDataLoader(range(50), 5, shuffle=True, name="items")
    turns = list(CombinedLoader([streams, items]))
    assert sorted(flat(turn[0] for turn in turns)) == list(range(90))
    assert sorted(flat(turn[1] for turn in turns)) == list(range(50))


def drawing(number: int) -> int:
    return number + random.randrange(1000)


def parsed_and_drawn(folder: Path) -> TextLines:
    (folder / "a").write_text("1\n2\n3\n")
    return TextLines(folder / "a", parse=int, transform=drawing)


@pytest.mark.parametrize(
    "make",
    [
        lambda _: Numbers(*LENGTHS, lanes=3, transform=drawing),
        parsed_and_drawn,
        lambda folder: Mixed(
            {"a": Numbers(8), "b": parsed_and_drawn(folder)},
            {"a": 1, "b": 1},
            num_samples=20,
        ),
        lambda _: Mixed({"a": Draws(), "b": range(6)}, {"a": 1, "b": 1}, num_samples=9),
    ],
)
def test_transforms_draw_alike_with_and_without_workers(
    job: Any, make: Any, tmp_path: Path
) -> None:
    def drawn(num_workers: int) -> list[Any]:
        streams = make(tmp_path)
        loader = AdaptiveDataLoader(
            streams, 8, True, seed_each="sample", num_workers=num_workers
        )
        return flat(loader)

    assert run_once(lambda: drawn(2)) == run_once(lambda: drawn(0))


def read_in(number: int) -> tuple[int, int]:
    return number, os.getpid()


def test_all_workers_read_lanes(job: Any) -> None:
    streams = Numbers(*LENGTHS, lanes=3, transform=read_in)
    batches = list(AdaptiveDataLoader(streams, 8, num_workers=2))
    assert len({pid for _, pids in batches for pid in pids.tolist()}) == 2


@pytest.mark.parametrize("option", ["parse", "transform"])
def test_parsing_that_draws_is_told(
    job: Any, tmp_path: Path, option: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "a").write_text("1\n2\n3\n4\n")
    drawn: Any = {option: lambda line: int(line) + random.random()}
    for data in (TextLines(tmp_path / "a", **drawn), Numbers(*LENGTHS)):
        list(AdaptiveDataLoader(data, 1, seed_each="sample"))
    told = [each.message for each in caplog.records if "Draw them" in each.message]
    assert len(told) == (option == "parse"), told


class Draws(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return drawing(index)


@pytest.mark.parametrize("what", ["sampler", "batch_sampler"])
def test_orders_of_ones_own_are_refused(job: Any, what: str) -> None:
    own = [0, 1] if what == "sampler" else [[0, 1]]
    with pytest.raises(ValueError, match="read in streams, in their own order"):
        AdaptiveDataLoader(Numbers(3, 4), **{what: own})


def test_other_lengths_are_no_resume(tmp_path: Path) -> None:
    def script(*lengths: int) -> None:
        for _ in AdaptiveDataLoader(Numbers(*lengths), 4):
            request_stop()

    run_once(lambda: script(10, 20), tmp_path)
    match = "10 samples in stream 0, but now 11; 20 samples in stream 1, but now 19"
    with pytest.raises(CheckpointError, match=match):
        run_once(lambda: script(11, 19), tmp_path)


def test_data_may_grow_between_epochs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def script(*lengths: int, stop: bool = False) -> list[list[int]]:
        streams = Numbers(*lengths, lanes=3, window=5)
        loader = AdaptiveDataLoader(streams, 4, shuffle=True, name="train")
        return [flat(loader) for _ in remaining_epochs_until(1 if stop else 3)]

    run_once(lambda: script(10, 20, stop=True), tmp_path)
    [second, third] = run_once(lambda: script(10, 20, 7), tmp_path)
    assert sorted(second) == sorted(third) == list(range(37))
    assert "since the last epoch (37 samples in place of 30): the next" in caplog.text


def test_streams_of_an_earlier_version_are_no_resume(tmp_path: Path) -> None:
    """Which dealt them whole; the order was a number in the fingerprint."""
    with generation():
        loader = AdaptiveDataLoader(Numbers(10, 20), 4, shuffle=True)
        next(iter(loader))
        state = loader.state_dict()
        state["fingerprint"]["order"] = 1234
    with generation(), pytest.raises(CheckpointError, match="as earlier versions"):
        AdaptiveDataLoader(Numbers(10, 20), 4, shuffle=True).load_state_dict(state)


def test_empty_and_missing_streams_are_refused(job: Any) -> None:
    with pytest.raises(ValueError, match="Numbers has no streams"):
        Numbers()
    with pytest.raises(ValueError, match="is empty"):
        AdaptiveDataLoader(Numbers(0, 0), 4)
    with pytest.raises(ValueError, match="window=0"):
        Numbers(1, window=0)


def test_streams_within_a_window_are_opened_once_each() -> None:
    streams = Numbers(*[7] * 200, lanes=4, window=100)
    with generation():
        loader = AdaptiveDataLoader(streams, 16, shuffle=True)
        assert sorted(flat(loader)) == list(range(1400))
    assert sorted(streams.opened) == [(number, 0) for number in range(200)]
    assert streams[3] == 3
    assert streams._open is not None
    assert not streams._open.readers  # It was read whole, and holds no file.


def test_two_loops_over_the_same_streams_open_them_for_themselves(job: Any) -> None:
    streams = Numbers(*[700] * 4, lanes=2, window=10)
    both = CombinedLoader(
        [
            AdaptiveDataLoader(streams, 16, shuffle=True),
            AdaptiveDataLoader(streams, 16, shuffle=True),
        ]
    )
    for turn in zip(*both, strict=True):
        assert sorted(flat(turn)) == list(range(2800))
    assert sorted(streams.opened) == sorted([(number, 0) for number in range(4)] * 2)


def test_a_trace_names_streams_and_their_samples(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n" * 3)
    (tmp_path / "b").write_text("y\n" * 5)
    lines = TextLines([tmp_path / "a", tmp_path / "b"])
    mix = Mixed({"text": lines, "items": "abc"}, {"text": 1, "items": 1}, block=6)

    def script() -> None:
        for _ in AdaptiveDataLoader(mix, 6).batches(1):
            pass
        streams = Endless(Numbers(3, 4, lanes=1), seed=None)
        for _ in AdaptiveDataLoader(streams, 9).batches(1):
            pass

    run_once(script, tmp_path / "job", trace_dir=str(tmp_path / "trace"))
    mixed, endless = read_trace(tmp_path / "trace")
    places = zip(mixed["indices"], map(tuple, mixed["streams"]), strict=True)
    assert all(mix.place(index) == place for index, place in places)
    assert sum(stream == "items" for stream, _ in mixed["streams"]) == 3
    assert [str(tmp_path / "a"), 0] in mixed["streams"]
    first = [["stream 0", number] for number in range(3)]
    second = [["stream 1", number] for number in range(4)]
    assert endless["streams"] == [*first, *second, *first[:2]]


def test_a_trace_has_the_samples_of_streams_in_their_order(tmp_path: Path) -> None:
    """As replicas deliver them, lane by lane."""
    for rank, (indices, places) in enumerate([([7, 9, 5], [0, 3, 1]), ([8], [2])]):
        trace = Trace(str(tmp_path), generation=0, rank=rank, world_size=2)
        trace.write(
            epoch=0,
            loop=0,
            batch=0,
            micro=0,
            indices=indices,
            num_valid=len(indices),
            places=places,
        )
        trace.close()
    lines = read_trace(tmp_path)
    assert samples_of_loop(lines, epoch=0, loop=0) == {0: [7, 5, 8, 9]}


def test_other_names_of_streams_are_no_resume(tmp_path: Path) -> None:
    def script(first: str, second: str) -> None:
        lines = TextLines([tmp_path / first, tmp_path / second])
        for _ in AdaptiveDataLoader(lines, 4):
            request_stop()

    for name in "abc":
        (tmp_path / name).write_text("x\n" * 9)
    run_once(lambda: script("a", "b"), tmp_path / "job")
    with pytest.raises(CheckpointError, match="lengths, blocks, lanes and window"):
        run_once(lambda: script("b", "a"), tmp_path / "job")


def test_other_samples_of_iterable_data_are_no_resume(tmp_path: Path) -> None:
    def script(first: int) -> None:
        for _ in AdaptiveDataLoader(Drawing(first), 4):
            request_stop()

    assert run_once(lambda: script(0), tmp_path) is None
    assert run_once(lambda: script(0), tmp_path) is None  # What it draws is as before.
    with pytest.raises(CheckpointError, match="first samples"):
        run_once(lambda: script(1), tmp_path)


class Drawing(IterableDataset[float]):
    """Numbers to which the program's generator adds something."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[float]:
        for number in range(self.first, self.first + 50):
            yield number + random.random() / 2


def test_counting_and_comparing_draw_nothing_of_the_programs(job: Any) -> None:
    random.seed(4)
    expected = random.random()
    random.seed(4)
    AdaptiveDataLoader(Drawing(0), 4)
    assert random.random() == expected


def test_given_lengths_need_no_marks(job: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n" * 5)
    lines = TextLines(tmp_path / "a", lengths=[5])
    assert [lines[number] for number in range(5)] == ["x"] * 5
    assert sorted(AdaptiveDataLoader(lines, 5, shuffle=True)) == [["x"] * 5]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_lengths_that_are_not_those_of_the_streams_are_told(
    job: Any, tmp_path: Path, num_workers: int
) -> None:
    (tmp_path / "a").write_text("x\n" * 9)
    for length, match in {
        8: r"a goes on after its 8 samples, which is what lengths= says\. The others",
        10: r"a ends after 9 samples, but lengths= says 10\.",
    }.items():
        lines = TextLines(tmp_path / "a", lengths=[length])
        with pytest.raises(ElasticRunError, match=match):
            list(AdaptiveDataLoader(lines, 5, num_workers=num_workers))


def test_streams_that_are_said_to_be_empty_are_so(job: Any, tmp_path: Path) -> None:
    for name, text in {"a": "x\n" * 3, "b": "", "c": "x\n" * 3}.items():
        (tmp_path / name).write_text(text)
    lines = TextLines(tmp_path / "[bc]", lengths=[0, 3])
    assert len([*AdaptiveDataLoader(lines, 1)]) == 3
    with pytest.raises(ElasticRunError, match="a goes on after its 0 samples, which"):
        AdaptiveDataLoader(TextLines(tmp_path / "[ac]", lengths=[0, 3]), 1)
    wrong = ResidentShards([[1, 2], [3]].__getitem__, [0, 1])
    with pytest.raises(ElasticRunError, match="shard 0 goes on after its 0 samples"):
        AdaptiveDataLoader(Mixed({"a": wrong}, weights={"a": 1}), 1)


class InBatches(IterableDataset[int]):
    """Its length is that of a loader over it."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))

    def __len__(self) -> int:
        return 3


def test_a_len_that_is_too_small_is_told(
    job: Any, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        assert flat(AdaptiveDataLoader(InBatches(), 2)) == [0, 1, 2]
    said = "InBatches goes on after its 3 samples, which is what its __len__ says"
    assert caplog.text.count(said) == 1


def test_a_loop_without_an_end_is_refused(job: Any) -> None:
    mix = Mixed({"a": range(5)}, {"a": 1})
    with pytest.raises(ValueError, match="would never end, since Mixed has no end"):
        next(iter(AdaptiveDataLoader(mix, 2)))
    with pytest.raises(ValueError, match="since Endless has no end"):
        next(iter(AdaptiveDataLoader(Endless(Numbers(3)), 2)))


def test_what_cannot_be_is_refused(job: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*zz\*' matches no file"):
        TextLines([tmp_path, f"{tmp_path}/zz*"])
    (tmp_path / "a0").touch()
    with pytest.raises(ValueError, match="a0 is named twice"):
        TextLines([tmp_path / "a0", f"{tmp_path}/a*"])
    with pytest.raises(ValueError, match="length=0 must be a whole number"):
        Packed(Numbers(3), lambda n: [n], 0)
    with pytest.raises(
        TypeError, match="Packed takes streams that have an end, not list"
    ):
        Packed([1, 2], lambda n: [n], 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="an end, not Endless.* Endless takes a Packed"):
        Packed(Endless(Numbers(3)), lambda n: [n], 4)
    with pytest.raises(ValueError, match="give transform or parse, and no lengths"):
        TextLines(tmp_path, skip_broken=True)
    with pytest.raises(ValueError, match="give transform or parse, and no lengths"):
        TextLines(tmp_path, parse=int, skip_broken=True, lengths=[3])
    for weights in ({}, {"a": None}, {"a": "3"}, {"a": float("inf")}):
        with pytest.raises(ValueError, match="give each of the sources"):
            Mixed({"a": Numbers(3)}, weights)  # type: ignore[arg-type]
    for lengths in ("many", 50, [5, None], [3, -5], [3, 4, 5]):
        with pytest.raises(ValueError, match="is neither .* for each of 2 streams"):
            TextLines(["a", "b"], lengths=lengths)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="from keys to data sets and to weights"):
        Mixed([Numbers(3)], [1])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Endless takes streams that have an end, not"):
        Endless(Mixed({"a": Numbers(3)}, {"a": 1}))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Give \['id'\]"):
        ParquetRows(tmp_path, columns="id")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="is one text"):
        Numbers.__mro__[1].__init__(Numbers(1), "file.txt")
    with pytest.raises(ElasticRunError, match="nowhere cannot be read through"):
        AdaptiveDataLoader(TextLines(tmp_path / "nowhere"), 4)


def test_one_long_stream_fills_all_lanes(caplog: pytest.LogCaptureFixture) -> None:
    streams = Cut(600, lanes=8)
    warn_of_uneven("`train`", streams.lanes.order(1), 8)
    assert streams.lanes.order(1).num_lanes == 8
    assert not caplog.text
    with generation():
        assert sorted(flat(AdaptiveDataLoader(streams, 16, True))) == list(range(600))
    assert sorted(streams.opened) == [(0, first) for first in range(0, 600, 6)]


@pytest.mark.parametrize("lengths", [[300], [900, 100], [300] * 10, [10_000]])
def test_little_data_mixes(lengths: list[int], job: Any, tmp_path: Path) -> None:
    """Also where files end in a short block."""
    for number, length in enumerate(lengths):
        (tmp_path / f"{number:02}.txt").write_text("x\n" * length)
    order = TextLines(tmp_path / "*.txt").lanes.order
    total, last = sum(lengths), lengths[-1] % 256  # In the last file's last block.
    ends = [order(key)(np.arange(total * 3 // 4, total)) for key in range(100)]
    share = np.mean(np.concatenate(ends) >= total - last)
    assert share == pytest.approx(last / total, rel=0.4)


def test_uneven_shares_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def deal(streams: Dataset[Any], shares: int, name: str | None = None) -> None:
        with generation(virtual_replicas=shares):
            AdaptiveDataLoader(streams, 4, name=name)

    with caplog.at_level(logging.WARNING):
        deal(Numbers(90, 30), 2)
        deal(Numbers(50, 50), 2)
        deal(Numbers(50, 50), 3, "train")
        deal(Drawing(0), 2)
    told = [record.message.split(",")[0] for record in caplog.records]
    assert [line for line in told if "replicas" in line] == [
        "`loader-0` (Numbers): one of 2 replicas reads 1.5 times its share",
        "`train` (Numbers) has 2 lanes for 3 replicas",
        "`loader-0` (Drawing) has 1 lane for 2 replicas",
    ]
