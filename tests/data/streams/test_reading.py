"""Reading one stream, and streams that nobody counts."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun import (
    AdaptiveDataLoader,
    ElasticRunError,
    Endless,
    ResidentShards,
    TextLines,
    request_stop,
)
from elasticrun.data.streams import stream_reader
from elasticrun.data.streams.stream_reader import StreamReader
from tests.support.generations import generation, run_once
from tests.support.numbered_streams import LENGTHS, Numbers, Unknown, flat


def read(reader: StreamReader, number: int) -> Any:
    if number not in reader.kept:
        reader.come_to(number)
    return reader.kept.pop(number)


@given(st.integers(1, 40), st.integers(1, 10), st.data())
def test_a_reader_gives_any_sample(length: int, window: int, data: Any) -> None:
    reader = StreamReader(
        "s",
        length,
        lambda first: iter(range(first, length)),
        window=window,
        num_before=data.draw(st.integers(0, window - 1)),
    )
    for number in data.draw(st.lists(st.integers(0, length - 1), max_size=30)):
        assert read(reader, number) == number
        assert len(reader.kept) <= 2 * window


def test_a_storage_that_fails_for_a_while_is_tried_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stream_reader, "_WAIT_SECONDS", (0.0, 0.0))
    fails_at = [3, 3, 5]

    def opened(first: int) -> Iterator[int]:
        for number in range(first, 10):
            if fails_at and fails_at[0] == number:
                raise ConnectionError(f"lost {fails_at.pop(0)}")
            yield number

    reader = StreamReader("s", 10, opened, window=1)
    with caplog.at_level(logging.WARNING):
        assert [read(reader, number) for number in range(10)] == list(range(10))
    assert caplog.text.count("trying again") == 3
    fails_at = [0] * 3
    with pytest.raises(ElasticRunError, match="sample 0 of s cannot be read: lost 0"):
        read(StreamReader("s", 10, opened, window=1), 0)


def test_a_stream_that_raises_is_named() -> None:
    def opened(first: int) -> Iterator[int]:
        yield from range(first, 4)
        raise ZeroDivisionError("oh")

    reader = StreamReader("s", 10, opened, window=1)
    with pytest.raises(ElasticRunError, match="sample 4 of s cannot be read: ZeroDiv"):
        [read(reader, number) for number in range(10)]


def test_a_process_that_is_forked_or_sent_opens_for_itself(job: Any) -> None:
    streams = Numbers(*LENGTHS, lanes=3)
    assert streams[0] == 0
    sent = pickle.loads(pickle.dumps(streams))
    assert sent._open is None
    child = os.fork()
    if child == 0:
        is_alone = streams[50] == 50 and 1 not in streams._open.kept
        os._exit(not is_alone)
    assert os.waitpid(child, 0)[1] == 0


def test_a_replica_loads_the_shards_of_its_lanes_when_the_loader_is_made() -> None:
    loaded: list[int] = []

    def load(number: int) -> list[int]:
        loaded.append(number)
        return list(range(number * 10, number * 10 + 10))

    shards = ResidentShards(load, [10] * 8, lanes=4)
    shards.prepare(1, 3)
    assert loaded == [1, 5]
    with generation():
        loader = AdaptiveDataLoader(shards, 8, shuffle=True)
        assert sorted(loaded) == list(range(8))
        assert sorted(flat(loader)) == list(range(80))
        assert len(loaded) == 8
    ResidentShards(load, [10] * 8, lanes=2).prepare(1, 3)  # Fewer lanes than replicas.
    assert len(loaded) == 16


# Streams that are not counted.


@pytest.mark.parametrize("seed", [None, 1])
def test_endless_streams_go_on_in_passes_of_each_lane(
    seed: int | None, tmp_path: Path
) -> None:
    def script(stop_in: int = -1) -> list[int]:
        streams = Endless(Unknown(*LENGTHS, lanes=2, window=4), seed=seed)
        loader = AdaptiveDataLoader(streams, 10, shuffle=seed is not None)
        for number, batch in enumerate(loader.batches(30), 1):
            delivered.extend(batch.tolist())
            if number == stop_in:
                request_stop()
        return delivered

    delivered: list[int] = []
    whole = run_once(script)
    lanes = sorted([whole[0::2], whole[1::2]], key=lambda lane: 37 in lane)
    assert set(lanes[0]) == {*range(37), *range(78, 90)}
    assert set(lanes[1]) == {*range(37, 78)}
    # A pass of each lane, and what a window of it may take in of the next.
    assert set(lanes[0][: 49 + 4]) == set(lanes[0])
    assert set(lanes[1][: 41 + 4]) == set(lanes[1])
    if seed is None:
        assert lanes[1][:50] == [*range(37, 78), *range(37, 46)]
    for directory in (None, tmp_path):
        delivered = []
        for stop_in in (3, 8, 4):
            run_once(lambda at=stop_in: script(at), directory or tmp_path / "other")
            if directory is None:
                shutil.rmtree(tmp_path / "other" / "streams")  # Learned lengths.
        assert run_once(script, directory or tmp_path / "other") == whole


def test_endless_streams_are_dealt_by_size(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lengths = [300, 0, 100, 100, 100, 0]
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_text(f"{number}\n" * length)
    lines = TextLines(tmp_path / "*.txt", parse=int, lanes=2)
    loader = AdaptiveDataLoader(Endless(lines), 100, shuffle=True)
    drawn = Counter(flat(loader.batches(60)))
    assert all(950 < drawn[number] * 100 / lengths[number] < 1050 for number in drawn)
    assert set(drawn) == {0, 2, 3, 4}
    assert "lanes" not in caplog.text
    Endless(TextLines(tmp_path / "*.txt"))
    assert "one of 4 lanes has 3.0 times the bytes of another" in caplog.text
    assert "or give lanes=2, which are nearly even" in caplog.text


def test_a_lane_without_samples_is_an_error(job: Any) -> None:
    loader = AdaptiveDataLoader(Endless(Unknown(0, 5, lanes=2)), 2)
    with pytest.raises(ElasticRunError, match="lane 0 has no sample in any"):
        next(iter(loader.batches(1)))


def test_what_other_replicas_train_is_not_kept(tmp_path: Path) -> None:
    (tmp_path / "lines").write_text("".join(f"{row}\n" for row in range(20_000)))
    lines = TextLines(tmp_path / "lines", parse=int, lanes=1, window=100)
    lines = lines.apart(is_shuffled=True)
    order = lines.lanes.order(1)(np.arange(20_000))
    for begin in range(0, 20_000, 8):  # As the second of two replicas.
        own = order[begin + 4 : begin + 8].tolist()
        assert lines.__getitems__(own) == own
        assert lines._open is not None
        assert len(lines._open.kept) <= 1000


def test_a_sample_may_be_asked_for_again_and_again() -> None:
    """As a short stream in many passes, or padding: nothing of it is lost."""
    streams = Numbers(9, 1, lanes=2, window=2)
    for _ in range(20):
        assert streams.__getitems__([9, 3, 9]) == [9, 3, 9]
