"""Each kind of stream on real files: what it reads, and where it can be entered."""

from __future__ import annotations

import io
import itertools
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile
from torch.utils.data import IterableDataset

from elasticrun import (
    AdaptiveDataLoader,
    CombinedLoader,
    ElasticRunError,
    Mixed,
    Packed,
    ParquetRows,
    TarShards,
    TextLines,
    TokenFiles,
)
from elasticrun.data.streams import files
from elasticrun.data.streams.files import begins_of
from elasticrun.data.streams.index import STRIDE
from elasticrun.data.streams.iterables import streams_of
from tests.support.streams import (
    KINDS,
    Records,
    Resumable,
    json_lines,
    parquet,
    rows,
)

pytestmark = pytest.mark.usefixtures("job")


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_once_in_any_place(kind: str, tmp_path: Path) -> None:
    streams = KINDS[kind](tmp_path)
    records = list(itertools.chain.from_iterable(rows()))
    assert len(streams) == len(records)
    assert [streams[number] for number in range(len(records))] == records
    for number in (STRIDE, STRIDE - 1, 2 * STRIDE + 500, 7, len(records) - 1):
        streams._open = None
        assert streams[number] == records[number]


def test_a_tar_shard_is_entered_near_the_sample(tmp_path: Path) -> None:
    shards = KINDS["tar"](tmp_path)
    shards.count_all()
    assert [shards.mark(3, number)[0] for number in (3, 4, 301)] == [0, 4, 300]


def test_large_samples_make_smaller_blocks() -> None:
    for size, block, remote in ((100, 256, 2**22 // 100), (30_000, 72, 140)):
        of = [
            begins_of(name, 100_000, 100_000 * size, stride=4)[1]
            for name in ("a.tar", "s3://a.tar")
        ]
        assert of == [block, -(-remote // 4) * 4]
    assert begins_of("a.tar.gz", 100, 100).tolist() == []


class Ranged(AbstractBufferedFile):
    def _fetch_range(self, start: int, end: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(start)
            read = file.read(end - start)
        Ranges.fetched.append(len(read))
        return read


class Ranges(LocalFileSystem):
    """Files of a store: ranges of them are asked for, and noted."""

    protocol = "ranges"
    fetched: ClassVar[list[int]] = []

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return super()._strip_protocol(str(path).removeprefix("ranges://"))

    def _open(
        self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any
    ) -> Any:
        return Ranged(self, path, mode, block_size or 50 << 20)  # As that of S3.


fsspec.register_implementation("ranges", Ranges, clobber=True)


@pytest.mark.parametrize("kind", ["jsonl", "tar", "bin"])
def test_a_store_is_asked_once_for_each_byte_of_a_block(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    block, size = 1 << 16, 0
    monkeypatch.setattr(files, "_REMOTE_BLOCK", block)
    for number in range(4):
        path = tmp_path / f"{number}.{kind}"
        if kind == "tar":
            with tarfile.open(path, "w") as shard:
                for n in range(800):
                    shard.addfile(tarfile.TarInfo(f"{n}.txt"), io.BytesIO())
        elif kind == "jsonl":
            path.write_text("".join(f"{n:0100}\n" for n in range(4000)))
        else:
            np.zeros(200_000, np.uint16).tofile(path)
        size += path.stat().st_size
    url = f"ranges://{tmp_path}/*.{kind}"
    streams: Any = {
        "jsonl": lambda: TextLines(url, lanes=2),
        "tar": lambda: TarShards(url, lanes=2),
        "bin": lambda: TokenFiles(url, 32, lanes=2),
    }[kind]()
    loader = AdaptiveDataLoader(streams, 16, shuffle=True, collate_fn=len)
    for epoch in range(2):
        Ranges.fetched = []
        assert sum(num for num, _ in loader.read(epoch)) == len(streams)
        # The first block of a lane is entered in its middle, and at its end again.
        assert sum(Ranges.fetched) < 1.2 * size + 2 * block
        assert (
            sum(fetched > 5000 for fetched in Ranges.fetched) < 1.2 * size / block + 6
        )


class Read(TarShards):
    """Shards that note what was read of them, and how often they were opened."""

    read: list[tuple[int, int]]
    num_opened = 0

    def open(self, stream: int, first: int) -> Iterator[dict[str, Any]]:
        Read.num_opened += 1
        for number, sample in enumerate(super().open(stream, first), first):
            self.read.append((stream, number))
            yield sample


def test_a_loop_over_large_samples_begins_with_those_that_it_asks(
    tmp_path: Path,
) -> None:
    for number in range(8):
        with tarfile.open(tmp_path / f"{number}.tar", "w") as shard:
            for n in range(200):
                shard.addfile(tarfile.TarInfo(f"{number * 200 + n}.txt"), io.BytesIO())
    shards = Read(tmp_path / "*.tar", lanes=4, window=4 * 40)
    loader = AdaptiveDataLoader(shards, 4, shuffle=True, collate_fn=keys)
    for epoch in range(3):
        shards.read = []
        whole = [batch for batch, _ in loader.read(epoch)]
        assert sorted(itertools.chain.from_iterable(whole)) == list(range(1600))
        for first in (0, 7, 200, 370, 399):
            read = shards.read = []
            batches = [batch for batch, _ in loader.read(epoch, first)]
            assert batches == whole[first:]
            missing = sum(map(len, batches))
            assert missing <= len(read) <= missing + 4 * 40
        read = shards.read = []
        next(loader.read(epoch, 200))
        for block in range(16):  # Up to a window where it begins in one, else one.
            numbers = [n % 100 for of, n in read if 2 * of + n // 100 == block]
            assert len(numbers) <= (1 if 0 not in numbers else 40)
        assert len(read) < 80


def test_a_compressed_shard_is_opened_once_by_a_resume(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as shard:
        for n in range(200):
            shard.addfile(tarfile.TarInfo(f"{n}.txt"), io.BytesIO())
    shards = Read(tmp_path / "a.tar.gz", window=40)
    shards.read = []
    loader = AdaptiveDataLoader(shards, 4, shuffle=True, collate_fn=keys)
    whole = [batch for batch, _ in loader.read(0)]
    Read.num_opened, shards.read = 0, []
    assert [batch for batch, _ in loader.read(0, 25)] == whole[25:]
    assert Read.num_opened == 1


def keys(samples: list[dict[str, Any]]) -> list[int]:
    return [int(sample["__key__"]) for sample in samples]


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_shard_of_hugging_faces_is_entered_by_its_state_if_that_is_exact(
    is_shuffled: bool, caplog: pytest.LogCaptureFixture
) -> None:
    datasets = pytest.importorskip("datasets", reason="an extra")
    seen = []

    def note(row: dict[str, int]) -> dict[str, int]:
        seen.append(row["n"])
        return row

    rows = datasets.IterableDataset.from_generator(
        lambda: ({"n": number} for number in range(3 * STRIDE))
    )
    if is_shuffled:
        rows = rows.shuffle(seed=0, buffer_size=100)
    streams = streams_of(rows.map(note))
    expected = [each["n"] for each in streams.open(0, 0)]
    streams.count_all()
    seen.clear()
    first = 2 * STRIDE + 3
    assert [each["n"] for each in streams.open(0, first)] == expected[first:]
    assert len(seen) == (3 * STRIDE if is_shuffled else STRIDE)
    assert not caplog.records


@pytest.mark.parametrize("where", ["", "file://"])
def test_tokens_are_sequences_with_their_targets(where: str, tmp_path: Path) -> None:
    tokens = [np.arange(length, dtype=np.uint16) for length in (0, 8, 25, 33)]
    for number, each in enumerate(tokens):
        each.tofile(tmp_path / f"{number}.bin")
    files = TokenFiles(f"{where}{tmp_path}/*.bin", 8)
    assert [scan.length for scan in files.scans] == [0, 0, 3, 4]
    assert [files[n][0].item() for n in range(7)] == [0, 8, 16, 0, 8, 16, 24]
    assert all(torch.equal(files[n].diff(), torch.ones(8)) for n in range(7))


@pytest.mark.parametrize("where", ["", "file://"])
def test_tokens_that_numpy_has_saved_have_a_type_and_no_header(
    where: str, tmp_path: Path
) -> None:
    tokens = np.arange(70_000, 70_009, dtype=np.int32)
    np.save(tmp_path / "a.npy", tokens)
    files = TokenFiles(f"{where}{tmp_path}/a.npy", 4)
    assert [*files[0].tolist(), *files[1][1:].tolist()] == tokens.tolist()
    np.save(tmp_path / "b.npy", tokens.reshape(3, 3))
    with pytest.raises(ElasticRunError, match=r"b\.npy has an array of shape \(3, 3\)"):
        len(TokenFiles(tmp_path / "b.npy", 4))
    os.truncate(tmp_path / "a.npy", os.path.getsize(tmp_path / "a.npy") - 1)
    with pytest.raises(ElasticRunError, match=r"35 bytes of tokens.* 9 of int32"):
        len(TokenFiles(f"{where}{tmp_path}/a.npy", 4))


@pytest.mark.parametrize("version", [(1, 0), (2, 0)])
def test_what_follows_an_array_is_no_token(
    tmp_path: Path, version: tuple[int, int]
) -> None:
    tokens = np.arange(9, dtype=np.int32)
    with open(tmp_path / "a.npy", "wb") as file:
        np.lib.format.write_array(file, tokens, version=version)
        np.save(file, tokens)
    files = TokenFiles(tmp_path / "a.npy", 4)
    assert [scan.length for scan in files.scans] == [2]
    assert [each.tolist() for each in files.open(0, 1)] == [[4, 5, 6, 7, 8]]


def test_a_part_of_a_token_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(np.arange(9, dtype=np.int32).tobytes()[:-1])
    with pytest.raises(ElasticRunError, match="35 bytes, which are no whole number"):
        len(TokenFiles(tmp_path / "a.bin", 4, dtype=np.int32))


def test_braces_stand_for_several_files(tmp_path: Path) -> None:
    names = [f"{number:02}.{kind}" for number in (8, 9, 10) for kind in "ab"]
    for name in [*names, "8.a", "{1,2}"]:
        (tmp_path / name).touch()

    def named(pattern: str) -> list[str]:
        return [Path(name).name for name in TextLines(f"{tmp_path}/{pattern}").names]

    assert named("{08..10}.{a,b}") == names
    assert named("0{8..9}.*") == names[:4]
    assert named("{8..8}.a") == ["8.a"]
    assert named("{1,2}") == named("[{]1,[12]}") == ["{1,2}"]
    assert named("{0..10}") == [str(number) for number in range(11)]  # As in a shell.
    assert named("{11..09}") == ["11", "10", "09"]
    chain = f"simplecache::file://{tmp_path}"
    assert TextLines(f"{chain}/08.*").names == [f"{chain}/08.{kind}" for kind in "ab"]
    assert TextLines("s3://bucket/{a,b}-{0..1}.txt").names == [
        f"s3://bucket/{kind}-{number}.txt" for kind in "ab" for number in range(2)
    ]


def document(sample: dict[str, Any]) -> list[int]:
    return list(sample["text"].encode())


@pytest.mark.parametrize("pad", [None, 0])
def test_packed_documents_cross_sequences_and_no_streams(
    pad: int | None, tmp_path: Path
) -> None:
    packed = Packed(json_lines(tmp_path), document, 32, pad=pad)
    expected = []
    for records in rows():
        tokens = [token for record in records for token in document(record)]
        if pad is not None:
            tokens += [pad] * (-len(tokens) % 32)
        expected += [tokens[at : at + 32] for at in range(0, len(tokens) - 31, 32)]
    assert [packed[n]["tokens"].tolist() for n in range(len(packed))] == expected
    for number in (len(packed) - 1, STRIDE, 3, STRIDE - 1):
        packed._open = None
        assert packed[number]["tokens"].tolist() == expected[number]


def test_packed_sequences_say_where_documents_begin(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("aaa\nbb\n\nccccc\n")
    packed = Packed(
        TextLines(tmp_path / "a"), lambda text: list(text.encode()), 4, pad=0
    )
    assert [bytes(packed[n]["tokens"].tolist()) for n in range(3)] == [
        b"aaab",
        b"bccc",
        b"cc\0\0",
    ]
    assert [packed[n]["documents"].tolist() for n in range(3)] == [
        [0, 0, 0, 1],
        [0, 1, 1, 1],
        [0, 0, -1, -1],
    ]


class SharesItselfOut(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        worker = torch.utils.data.get_worker_info()
        return iter(range(0 if worker is None else worker.id, 10, 2))


class Split(IterableDataset[int]):
    """As `split_dataset_by_node` leaves one."""

    _distributed = (0, 2)

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, 10, 2))


class StateWithNumbers(Resumable):
    """Its state has keys that JSON would make texts of."""

    def state_dict(self) -> Any:
        return {0: self.at}

    def load_state_dict(self, state: Any) -> None:
        self.at = state[0]


def test_a_state_that_json_changes_is_not_used(job: Any) -> None:
    streams = streams_of(StateWithNumbers())
    assert not len(streams.scans[0].marks)
    records = list(itertools.chain.from_iterable(rows()))
    for number in (STRIDE + 5, 3):  # It begins again by the state that it had at first.
        streams._open = None
        assert streams[number] == records[number]


class IsItsOwnIterator(Resumable):
    def __iter__(self) -> Any:
        self.records = itertools.chain.from_iterable(rows())
        return self

    def __next__(self) -> Any:
        self.at += 1
        return next(self.records)

    def load_state_dict(self, state: dict[str, int]) -> None:
        super().load_state_dict(state)
        self.records = itertools.islice(
            itertools.chain.from_iterable(rows()), self.at, None
        )


def test_what_is_its_own_iterator_is_entered_by_its_state(job: Any) -> None:
    streams = streams_of(IsItsOwnIterator())
    assert len(streams.scans[0].marks)
    records = list(itertools.chain.from_iterable(rows()))
    for number in (STRIDE + 5, 3):
        streams._open = None
        assert streams[number] == records[number]


def test_two_loops_over_a_place_that_there_is_once_are_found_out(job: Any) -> None:
    dataset = Resumable()
    both = CombinedLoader(
        [AdaptiveDataLoader(dataset, 4), AdaptiveDataLoader(dataset, 4)]
    )
    with pytest.raises(ElasticRunError, match="Resumable keeps its position in itself"):
        list(both)


def test_what_was_split_by_node_is_refused() -> None:
    with pytest.raises(TypeError, match="split_dataset_by_node"):
        AdaptiveDataLoader(Split(), 4)


def test_what_shares_itself_out_is_refused() -> None:
    with pytest.raises(TypeError, match="splits itself .get_worker_info"):
        AdaptiveDataLoader(SharesItselfOut(), 4)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_broken_record_is_named(num_workers: int, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\n{"n": 2\n')
    lines = TextLines(tmp_path / "a.jsonl", parse=json.loads)
    loader = AdaptiveDataLoader(lines, 2, num_workers=num_workers)
    with pytest.raises(
        ElasticRunError, match=r"line 2 of .*a\.jsonl: loads raised JSONDecodeError"
    ):
        list(loader)


def test_columns_that_a_file_does_not_have_are_named(tmp_path: Path) -> None:
    rows = parquet(tmp_path)
    assert ParquetRows(rows.names, columns=["n"])[5] == {"n": 5}
    with pytest.raises(ElasticRunError, match=r"0\.parquet has no columns \['m'\]"):
        ParquetRows(rows.names, columns=["n", "m"])[5]


def test_packed_and_mixed_take_iterable_data_as_it_is(tmp_path: Path) -> None:
    packed = Packed(Records(), document, 32)
    text = [token for own in rows() for record in own for token in document(record)]
    assert packed[7]["tokens"].tolist() == text[7 * 32 : 8 * 32]
    mix = Mixed(
        {"a": Records(), "b": packed}, {"a": 1, "b": 1}, block=10, num_samples=40
    )
    loader = AdaptiveDataLoader(mix, 10, collate_fn=lambda samples: samples)
    samples = [sample for batch in loader for sample in batch]
    assert [s["n"] for s in samples if "n" in s] == list(range(20))
    assert [s["tokens"].tolist() for s in samples if "tokens" in s] == [
        text[n * 32 : (n + 1) * 32] for n in range(20)
    ]
