"""Streams of each kind over the same records, in real files."""

from __future__ import annotations

import gzip
import inspect
import io
import itertools
import json
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import IterableDataset

from elasticrun import ParquetRows, ResidentShards, Streams, TarShards, TextLines
from elasticrun.data.streams.index import STRIDE
from elasticrun.data.streams.iterables import streams_of

LENGTHS = (STRIDE + 88, 0, 1, 3 * STRIDE)


def rows() -> Iterator[list[dict[str, Any]]]:
    """Yield the records of each file: lines of the standard library's text."""
    lines = itertools.cycle(inspect.getsource(json).splitlines())
    count = itertools.count()
    for length in LENGTHS:
        yield [{"n": next(count), "text": next(lines)} for _ in range(length)]


def to_write(folder: Path) -> list[tuple[int, list[dict[str, Any]]]]:
    """Return the records of each file; none if another process has written them."""
    return [] if any(folder.glob("0.*")) else list(enumerate(rows()))


def json_lines(folder: Path, suffix: str = "") -> TextLines:
    opened: Callable[..., Any] = open
    if suffix == ".gz":
        opened = gzip.open
    elif suffix == ".zst":
        opened = pytest.importorskip("zstandard", reason="an extra").open
    for number, records in to_write(folder):
        with opened(folder / f"{number}.jsonl{suffix}", "wt") as file:
            file.writelines(f"{json.dumps(record)}\n" for record in records)
    return TextLines(folder / f"*.jsonl{suffix}", parse=json.loads)


def by_url(folder: Path) -> TextLines:
    json_lines(folder)
    return TextLines(f"file://{folder}/*.jsonl", parse=json.loads)


def tar_shards(folder: Path) -> TarShards:
    for number, records in to_write(folder):
        with tarfile.open(folder / f"{number}.tar", "w") as shard:
            for record in records:
                name = f"a.b/{'long' * (record['n'] % 50)}{record['n']}"
                for kind, content in {
                    "n": str(record["n"]),
                    "text.txt": record["text"],
                }.items():
                    member = tarfile.TarInfo(f"{name}.{kind}")
                    member.size = len(content.encode())
                    shard.addfile(member, io.BytesIO(content.encode()))

    def decode(sample: dict[str, Any]) -> dict[str, Any]:
        assert sample["__key__"].endswith(sample["n"].decode())
        return {"n": int(sample["n"]), "text": sample["text.txt"].decode()}

    return TarShards(folder / "*.tar", transform=decode)


def parquet(folder: Path) -> ParquetRows:
    arrow = pytest.importorskip("pyarrow", reason="an extra")
    from pyarrow import parquet

    kinds = arrow.schema([("n", arrow.int64()), ("text", arrow.string())])
    for number, records in to_write(folder):
        table = arrow.Table.from_pylist(records, schema=kinds)
        parquet.write_table(table, folder / f"{number}.parquet", row_group_size=100)
    return ParquetRows(folder / "*.parquet")


class Records(IterableDataset[Any]):
    """All records in one stream."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.chain.from_iterable(rows())


class Resumable(Records):
    """Says where it is."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[Any]:
        records = list(itertools.chain.from_iterable(rows()))
        while self.at < len(records):
            self.at += 1
            yield records[self.at - 1]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Cut(Streams):
    """The items of a map-style data set, in streams of one to four of them."""

    def __init__(self, dataset: Any) -> None:
        self.begins = [0]
        for length in itertools.cycle((4, 1, 3)):
            self.begins.append(min(self.begins[-1] + length, len(dataset)))
            if self.begins[-1] == len(dataset):
                break
        lengths = [end - begin for begin, end in itertools.pairwise(self.begins)]
        names = [f"stream {number}" for number in range(len(lengths))]
        super().__init__(names, lengths=lengths)
        self.dataset = dataset

    def open(self, stream: int, first: int) -> Iterator[Any]:
        begin = self.begins[stream] + first
        return (self.dataset[n] for n in range(begin, self.begins[stream + 1]))


class Iterable(IterableDataset[Any]):
    """The items of a map-style data set, one after another."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __iter__(self) -> Iterator[Any]:
        return (self.dataset[number] for number in range(len(self.dataset)))


def hugging_face(folder: Path) -> Streams:
    datasets = pytest.importorskip("datasets", reason="an extra")
    json_lines(folder)
    files = [str(path) for path in sorted(folder.glob("*.jsonl"))]
    files.remove(str(folder / "1.jsonl"))  # An empty file is none to it.
    return streams_of(
        datasets.load_dataset(
            "json",
            data_files=files,
            split="train",
            streaming=True,
            cache_dir=str(folder / "cache"),
        )
    )


KINDS: dict[str, Callable[[Path], Streams]] = {
    "lines": json_lines,
    "gzip": lambda folder: json_lines(folder, ".gz"),
    "zstd": lambda folder: json_lines(folder, ".zst"),
    "url": by_url,
    "tar": tar_shards,
    "parquet": parquet,
    "hugging face": hugging_face,
    "iterable": lambda _: streams_of(Records()),
    "resumable": lambda _: streams_of(Resumable()),
    "resident": lambda _: ResidentShards(list(rows()).__getitem__, LENGTHS),
}
