"""A loader over streams: restarts, what is counted, what goes wrong."""

from __future__ import annotations

import itertools
import logging
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset

from elasticrun import (
    AdaptiveDataLoader,
    CheckpointError,
    CombinedLoader,
    ElasticRunError,
    Endless,
    Mixed,
    Packed,
    ResidentShards,
    Streams,
    TextLines,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.data.streams import stream_reader
from elasticrun.data.streams.stream_reader import StreamReader
from elasticrun.data.streams.streams import lanes_of
from elasticrun.job.trace import Trace
from elasticrun.testing import read_trace, samples_of_loop
from tests.support.generations import generation, run_once


class Numbers(Streams):
    """Streams of numbers, one after another over all of them."""

    def __init__(self, *lengths: int, **options: Any) -> None:
        names = [f"stream {number}" for number in range(len(lengths))]
        super().__init__(names, lengths=lengths, **options)
        self.begins = [0, *itertools.accumulate(lengths)]
        self.opened: list[tuple[int, int]] = []

    def open(self, stream: int, first: int) -> Iterator[int]:
        self.opened.append((stream, first))
        return iter(range(self.begins[stream] + first, self.begins[stream + 1]))


def flat(batches: Any) -> list[int]:
    return [sample for batch in batches for sample in batch.tolist()]


LENGTHS = (30, 0, 7, 41, 12)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"drop_last": True},
        {"shuffle": True},
        {"batch_size": {0: 4, 30: 11}, "max_local_batch_size": 3},
    ],
)
def test_a_loop_goes_on_at_the_sample(options: dict[str, Any], tmp_path: Path) -> None:
    def script(stop_in: int = -1) -> list[tuple[int, list[int]]]:
        streams = Numbers(*LENGTHS, lanes=3, window=5)
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


def test_a_resume_reads_at_most_a_window_again() -> None:
    streams = Numbers(10_000, lanes=1, window=100)
    with generation():
        loader = AdaptiveDataLoader(streams, 10, shuffle=True)
        batches = loader.read(0, first_batch=555)
        next(batches)
    [(_, first)] = streams.opened
    assert 5400 <= first <= 5550


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


class Draws(Dataset[int]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> int:
        return drawing(index)


@pytest.mark.parametrize("what", ["sampler", "batch_sampler"])
def test_orders_of_ones_own_are_refused(job: Any, what: str) -> None:
    own = [0, 1] if what == "sampler" else [[0, 1]]
    with pytest.raises(
        ValueError, match="read in streams, whose order cannot be given"
    ):
        AdaptiveDataLoader(Numbers(3, 4), **{what: own})


def test_other_lengths_are_no_resume(tmp_path: Path) -> None:
    def script(*lengths: int) -> None:
        for _ in AdaptiveDataLoader(Numbers(*lengths), 4):
            request_stop()

    run_once(lambda: script(10, 20), tmp_path)
    with pytest.raises(CheckpointError, match="streams' lengths, lanes and window"):
        run_once(lambda: script(11, 19), tmp_path)


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
    assert not streams._readers
    assert streams[3] == 3
    assert streams._readers[0]._samples is None  # It was read, and holds no file.


def test_long_streams_are_opened_once_each() -> None:
    streams = Numbers(*[700] * 9, lanes=2, window=10)
    with generation():
        assert len(flat(AdaptiveDataLoader(streams, 16, shuffle=True))) == 6300
    assert sorted(streams.opened) == [(number, 0) for number in range(9)]


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
    with pytest.raises(CheckpointError, match="lengths, lanes and window"):
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


def test_given_lengths_need_no_end_and_no_marks(job: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n" * 9)
    lines = TextLines(tmp_path / "a", lengths=[5])
    assert [lines[number] for number in range(5)] == ["x"] * 5
    assert sorted(AdaptiveDataLoader(lines, 5, shuffle=True)) == [["x"] * 5]


def test_a_loop_without_an_end_is_refused(job: Any) -> None:
    mix = Mixed({"a": range(5)}, {"a": 1})
    with pytest.raises(ValueError, match="would have no end: Mixed goes on for ever"):
        next(iter(AdaptiveDataLoader(mix, 2)))
    with pytest.raises(ValueError, match="Endless goes on for ever"):
        next(iter(AdaptiveDataLoader(Endless(Numbers(3)), 2)))


def test_what_cannot_be_is_refused(job: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"'.*zz\*' matches no file"):
        TextLines([tmp_path, f"{tmp_path}/zz*"])
    with pytest.raises(ValueError, match="length=0 must be a whole number"):
        Packed(Numbers(3), lambda n: [n], 0)
    with pytest.raises(TypeError, match="Packed takes streams of documents, not list"):
        Packed([1, 2], lambda n: [n], 4)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"Write Endless\(Packed\(\.\.\.\)\)"):
        Packed(Endless(Numbers(3)), lambda n: [n], 4)
    with pytest.raises(ValueError, match="a pass over streams needs the length"):
        TextLines(tmp_path, lengths="unknown")
    with pytest.raises(ValueError, match="give one of these, and no lengths"):
        TextLines(tmp_path, skip_broken=True)
    with pytest.raises(ValueError, match="give one of these, and no lengths"):
        TextLines(tmp_path, parse=int, skip_broken=True, lengths=[3])
    with pytest.raises(TypeError, match="is one text"):
        Numbers.__mro__[1].__init__(Numbers(1), "file.txt")
    with pytest.raises(ElasticRunError, match="nowhere cannot be read through"):
        AdaptiveDataLoader(TextLines(tmp_path / "nowhere"), 4)


def test_uneven_shares_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        lanes_of(Numbers(90, 30), None, None, rank=0, world_size=2)
        lanes_of(Numbers(50, 50), None, None, rank=0, world_size=2)
        lanes_of(Numbers(50, 50), None, None, rank=0, world_size=3)
        lanes_of(Numbers(50, 50), None, None, rank=1, world_size=3)
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "Numbers: one of 2 replicas reads 1.5 times its share",
        "Numbers has 2 lanes for 3 replicas",
    ]


# What is counted.


class Counted(TextLines):
    counted: ClassVar[list[int]] = []

    def scan(self, stream: int) -> Any:
        self.counted.append(stream)
        return super().scan(stream)


def test_lengths_are_counted_once_and_kept(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).write_text("x\n" * ord(name))

    def count() -> list[int]:
        Counted.counted.clear()
        lines = Counted([tmp_path / "a", tmp_path / "b", tmp_path / "c"])
        assert [scan.length for scan in lines.scans] == [97, 98, len(content)]
        return sorted(Counted.counted)

    content = "x" * 99
    directory = tmp_path / "checkpoints"
    assert run_once(count) == [0, 1, 2]  # There is nowhere to keep them.
    assert run_once(count, directory) == [0, 1, 2]
    assert run_once(count, directory) == []
    content = "y" * 17
    (tmp_path / "c").write_text("y\n" * 17)
    assert run_once(count, directory) == [2]
    [first, *_] = sorted((directory / "streams").iterdir())
    first.write_bytes(first.read_bytes()[:100])
    assert len(run_once(count, directory)) == 1


def test_a_file_that_changes_is_an_error(job: Any, tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("x\n" * 10)
    for content, match in [
        ("x\n" * 9, "ends after 9 samples, but had 10"),
        ("x\n" * 11, "goes on after its 10 samples"),
    ]:
        lines = TextLines(path, window=1)
        assert len(lines) == 10
        path.write_text(content)
        with pytest.raises(ElasticRunError, match=match):
            [lines[number] for number in range(10)]
        path.write_text("x\n" * 10)


def first_word(line: str) -> list[int]:
    return list(line.partition(" ")[0].encode())


def test_another_tokenizer_of_the_same_name_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one word\ntwo words\n")

    def packed() -> list[bytes]:
        sequences = Packed(TextLines(tmp_path / "a"), tokens, 2)
        return [bytes(sequences[n]["tokens"].tolist()) for n in range(len(sequences))]

    tokens = first_word
    expected = [b"on", b"et", b"wo"]
    assert run_once(packed, tmp_path / "job") == expected
    kept = len(list((tmp_path / "job" / "streams").iterdir()))
    assert run_once(packed, tmp_path / "job") == expected
    assert len(list((tmp_path / "job" / "streams").iterdir())) == kept
    longer: Any = lambda line: [*first_word(line), 0]  # noqa: E731
    longer.__qualname__ = tokens.__qualname__
    tokens = longer
    assert run_once(packed, tmp_path / "job") == [b"on", b"e\0", b"tw", b"o\0"]


def test_a_document_without_tokens_is_named(job: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\nthree\n")
    packed = Packed(TextLines(tmp_path / "a", parse=int), lambda n: [n], 1)
    with pytest.raises(ElasticRunError, match="document 2 of .*a has no tokens"):
        len(packed)


# Broken samples.


def integer(line: str) -> int:
    integer.num_calls += 1  # type: ignore[attr-defined]
    return int(line)


def write_broken(folder: Path) -> list[int]:
    """Write two files with broken lines; return the good ones in their order."""
    good = []
    for name, begin in {"a": 0, "b": 2000}.items():
        numbers = range(begin, begin + 1100)
        lines = ["?" if n % 5 < 2 or n % 512 == 0 else str(n) for n in numbers]
        (folder / name).write_text("\n".join(lines))
        good += [int(line) for line in lines if line != "?"]
    return good


def test_broken_samples_are_left_out_and_counted(tmp_path: Path) -> None:
    good = write_broken(tmp_path)

    def read() -> list[int]:
        lines = TextLines(tmp_path / "[ab]", parse=integer, skip_broken=True, window=9)
        assert lines.num_broken == 2200 - len(good)
        integer.num_calls = 0  # type: ignore[attr-defined]
        in_order = [lines[number] for number in range(len(lines))]
        for number in (600, 3, len(good) - 1):
            lines._forget_readers()
            assert lines[number] == good[number]
        assert lines.describe(0) == f"line 3 of {tmp_path / 'a'}"
        return in_order

    integer.num_calls = 0  # type: ignore[attr-defined]
    assert run_once(read, tmp_path / "job") == good
    again = run_once(lambda: (integer.num_calls, read())[0], tmp_path / "job")
    assert again == len(good) + 3  # No line was tried a second time.
    with generation(tmp_path / "job"):
        assert len(TextLines(tmp_path / "[ab]", parse=integer)) == 2200


def test_broken_samples_are_told(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_broken(tmp_path)
    len(TextLines(tmp_path / "a", parse=int, skip_broken=True))
    assert "442 samples are broken and left out, for which int raises" in caplog.text


def test_a_loop_without_broken_samples_goes_on(tmp_path: Path) -> None:
    good = write_broken(tmp_path)

    def script(stop_in: int = -1) -> list[int]:
        lines = TextLines(tmp_path / "[ab]", parse=int, skip_broken=True)
        for batch in AdaptiveDataLoader(lines, 100, shuffle=True):
            delivered.extend(batch.tolist())
            stop_in -= 1
            if stop_in == 0:
                request_stop()
        return delivered

    delivered: list[int] = []
    calm = run_once(script)
    assert sorted(calm) == good
    delivered = []
    run_once(lambda: script(4), tmp_path / "job")
    assert run_once(script, tmp_path / "job") == calm


def test_other_broken_samples_are_no_resume(tmp_path: Path) -> None:
    def script(text: str) -> None:
        (tmp_path / "a").write_text(text)
        lines = TextLines(tmp_path / "a", parse=int, skip_broken=True)
        for _ in AdaptiveDataLoader(lines, 1):
            request_stop()

    run_once(lambda: script("?\n1\n22\n"), tmp_path / "job")
    with pytest.raises(CheckpointError, match="a checksum of the order"):
        run_once(lambda: script("1\n?\n222\n"), tmp_path / "job")


def test_packed_and_endless_leave_broken_samples_out(job: Any, tmp_path: Path) -> None:
    good = write_broken(tmp_path)
    lines = TextLines(tmp_path / "a", parse=int, skip_broken=True)
    packed = Packed(lines, lambda number: [number], 3)
    assert packed[1]["tokens"].tolist() == good[3:6]
    packed._forget_readers()
    assert packed[200]["tokens"].tolist() == good[600:603]
    loader = AdaptiveDataLoader(Endless(lines, seed=None), 700)
    own = [number for number in good if number < 2000]
    assert flat(loader.batches(1)) == [*own, *own][:700]


def test_a_sample_that_breaks_later_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\nx\n")
    breaks_at: set[str] = set()

    def number(line: str) -> int:
        if line in breaks_at:
            raise ValueError("it breaks")
        return int(line)

    def read() -> Any:
        lines = TextLines(tmp_path / "a", parse=number, skip_broken=True)
        return [lines[n] for n in range(len(lines))]

    assert run_once(read, tmp_path / "job") == [1, 2]
    breaks_at.add("2")
    with pytest.raises(
        ElasticRunError, match=r"line 2 of .*a: .*number raised .*It did"
    ):
        run_once(read, tmp_path / "job")


def test_a_storage_that_fails_makes_no_sample_broken(job: Any, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n")

    def fetch(line: str) -> int:
        raise ConnectionError("gone")

    with pytest.raises(ElasticRunError, match=r"a cannot be read through: .*gone"):
        len(TextLines(tmp_path / "a", parse=fetch, skip_broken=True))


# Reading one stream.


def read(reader: StreamReader, number: int) -> Any:
    if number not in reader.kept:
        reader.come_to(number)
    return reader.kept.pop(number)


@given(st.integers(1, 40), st.integers(1, 10), st.data())
def test_a_reader_gives_any_sample(length: int, window: int, data: Any) -> None:
    reader = StreamReader(
        "s", length, lambda first: iter(range(first, length)), window=window
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
    assert not sent._readers
    child = os.fork()
    if child == 0:
        is_alone = streams[50] == 50 and len(streams._readers) == 1
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


class Uncounted(Numbers):
    """Streams whose lengths nobody is to ask for."""

    def __init__(self, *lengths: int, **options: Any) -> None:
        super().__init__(*lengths, **options)
        self._scans = None

    def scan_all(self) -> Any:
        raise AssertionError("they were counted")


@pytest.mark.parametrize("seed", [None, 1])
def test_endless_streams_go_on_in_passes_of_each_lane(
    seed: int | None, tmp_path: Path
) -> None:
    def script(stop_in: int = -1) -> list[int]:
        streams = Endless(Uncounted(*LENGTHS, lanes=2, window=4), seed=seed)
        loader = AdaptiveDataLoader(streams, 10, shuffle=seed is not None)
        for number, batch in enumerate(loader.batches(30), 1):
            delivered.extend(batch.tolist())
            if number == stop_in:
                request_stop()
        return delivered

    delivered: list[int] = []
    whole = run_once(script)
    lanes = [whole[0::2], whole[1::2]]
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


def test_a_lane_without_samples_is_an_error(job: Any) -> None:
    loader = AdaptiveDataLoader(Endless(Uncounted(0, 5, lanes=2)), 2)
    with pytest.raises(ElasticRunError, match="lane 0 has no sample in any"):
        next(iter(loader.batches(1)))


# Mixing.


def test_a_mix_can_be_sent_to_another_process() -> None:
    mix = Mixed(SOURCES, {"a": 3, "b": 1}, num_samples=40, block=20)
    assert len(mix) == 40  # Which makes its lanes.
    assert pickle.loads(pickle.dumps(mix))[53] == -1


SOURCES = {"a": Numbers(40, 13, lanes=2, window=5), "b": [-n for n in range(1, 11)]}


def test_shares_are_exact_and_sources_go_on_in_passes(job: Any) -> None:
    mix = Mixed(SOURCES, {"a": 3, "b": 1}, block=20)
    loader = AdaptiveDataLoader(mix, 10, shuffle=True)
    samples, sources = [], []
    for batch in loader.batches(40):
        samples += batch.tolist()
        sources += loader.sources
    assert all(
        ("b" if n < 0 else "a") == s for n, s in zip(samples, sources, strict=True)
    )
    for at in range(0, 400, 20):
        assert sources[at : at + 20].count("b") == 5
    own = [number for number in samples if number >= 0]
    assert sorted(own[:53]) == sorted(own[53:106]) == list(range(53))
    assert own[:53] != own[53:106]


def test_weights_follow_a_plan_of_samples_seen(job: Any) -> None:
    plan = {0: {"a": 1, "b": 1}, 35: {"a": 0, "b": 1}}
    loader = AdaptiveDataLoader(Mixed(SOURCES, plan, block=10), 10)
    signs = [sample < 0 for sample in flat(loader.batches(8))]
    assert [sum(signs[at : at + 10]) for at in range(0, 80, 10)] == [5] * 4 + [10] * 4


def test_a_loop_over_a_mix_has_the_samples_that_were_said(tmp_path: Path) -> None:
    def script(is_stopped: bool) -> list[int]:
        mix = Mixed(SOURCES, {"a": 1, "b": 1}, num_samples=50, block=10)
        for batch in AdaptiveDataLoader(mix, 8, shuffle=True):
            delivered.extend(batch.tolist())
            if is_stopped:
                request_stop()
        return delivered

    delivered: list[int] = []
    calm = run_once(lambda: script(False))
    assert len(calm) == 50
    delivered = []
    assert run_once(lambda: script(True), tmp_path) is None
    assert run_once(lambda: script(False), tmp_path) == calm


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"a": 1}, "give each of the sources"),
        ({"a": 1, "b": -1}, "from 0 up"),
        ({"a": 0, "b": 0}, "more than 0"),
        ({5: {"a": 1, "b": 1}}, "0 among them"),
        ({"a": 1000, "b": 0.1}, "has no sample in a block of 20"),
    ],
)
def test_weights_that_say_nothing_are_refused(
    job: Any, weights: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        len(Mixed(SOURCES, weights, block=20))


def test_what_a_sample_is_called() -> None:
    mix = Mixed(SOURCES, {"a": 1, "b": 1})
    assert mix.describe(45) == "sample 5 of stream 1"
    assert mix.describe(55) == "sample 2 of b"
