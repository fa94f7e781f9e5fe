"""Tar shards that are torn, or hold what no shard holds."""

from __future__ import annotations

import io
import logging
import os
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    ElasticRunError,
    ParquetRows,
    TarShards,
    TextLines,
    TokenFiles,
)

Torn = Callable[[bytes], bytes]


def pack(path: Path, *members: tarfile.TarInfo) -> Path:
    with tarfile.open(path, "w") as shard:
        for member in members:
            shard.addfile(member, io.BytesIO(b"abc"))
    return path


def file_named(name: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.size = 3
    return member


def read(path: Path) -> list[str]:
    loader = AdaptiveDataLoader(TarShards([path]), 2, collate_fn=list)
    return [sample["__key__"] for batch in loader for sample in batch]


def flipped(data: bytes) -> bytes:
    return data[:3082] + bytes([data[3082] ^ 255]) + data[3083:]


@pytest.mark.parametrize(
    "torn",
    [
        flipped,
        lambda data: data[: 4 * 1024 + 100],  # In a header.
        lambda data: data[: 4 * 1024 + 513],  # In the content.
        lambda data: b"this is no tar" * 1000,
    ],
    ids=["flipped header", "cut in header", "cut in content", "no tar"],
)
def test_a_torn_shard_is_an_error(job: Any, tmp_path: Path, torn: Torn) -> None:
    path = pack(tmp_path / "a.tar", *(file_named(f"{n}.txt") for n in range(10)))
    assert len(read(path)) == 10
    path.write_bytes(torn(path.read_bytes()))
    with pytest.raises(ElasticRunError, match=r"a\.tar"):
        read(path)


def test_links_are_left_out_and_told(
    job: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hard, soft, device = (tarfile.TarInfo(name) for name in ("a.txt", "b.txt", "c.txt"))
    hard.type, soft.type, device.type = tarfile.LNKTYPE, tarfile.SYMTYPE, b"3"
    hard.linkname = soft.linkname = "/etc/passwd"
    path = pack(tmp_path / "a.tar", hard, soft, device, file_named("ok.txt"))
    with caplog.at_level(logging.WARNING):
        assert read(path) == ["ok"]
    for name in ("a.txt", "b.txt", "c.txt"):
        assert f"{name} is left out: it is a link or a device" in caplog.text


def test_names_are_those_of_webdataset(job: Any, tmp_path: Path) -> None:
    names = ["__meta__", "__x__/a.txt", "README", "a.b/c", "d/1.JPG", "d/1.Seg.png"]
    names += [".hidden", "d/2.jpg", "e.f/3.jpg", "4.", "4.TXT"]
    path = pack(tmp_path / "a.tar", *map(file_named, names))
    shards = TarShards(path)
    found = [shards[number] for number in range(len(shards))]
    assert [(each.pop("__key__"), [*each]) for each in found] == [
        ("d/1", ["jpg", "seg.png"]),
        ("d/2", ["jpg"]),
        ("e.f/3", ["jpg"]),
        ("4", ["", "txt"]),
    ]


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("longer", ["a.tar", "b.tar"])
def test_samples_with_other_members_make_no_batch(
    job: Any, tmp_path: Path, num_workers: int, longer: str
) -> None:
    for shard in ("a.tar", "b.tar"):
        names = ["1.jpg", "1.cls"] if shard == longer else ["2.jpg"]
        pack(tmp_path / shard, *map(file_named, names))
    shards = TarShards(tmp_path / "*.tar")
    with pytest.raises(ElasticRunError, match=r"'jpg'.* and \['__key__', 'jpg'"):
        list(AdaptiveDataLoader(shards, 2, num_workers=num_workers))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (TarShards, "a.tar"),
        (TextLines, "a.txt"),
        (TextLines, "a.txt.gz"),
        (ParquetRows, "a.parquet"),
        (partial(TokenFiles, length=4), "a.bin"),
    ],
)
def test_a_pipe_is_no_data(job: Any, tmp_path: Path, kind: Any, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ElasticRunError, match="is no plain file, but a pipe"):
        list(AdaptiveDataLoader(kind(str(tmp_path / name)), 1))


@pytest.mark.parametrize("put", ["a pipe", "a length of -5"])
def test_what_is_no_index_is_made_anew(job: Any, tmp_path: Path, put: str) -> None:
    path = tmp_path / "a.txt"
    path.write_text("1\n2\n")
    lines = TextLines(str(path), index=tmp_path / "kept")
    assert len(AdaptiveDataLoader(lines, 1)) == 2
    (kept,) = (tmp_path / "kept").iterdir()
    made = kept.read_bytes()
    kept.unlink()
    if put == "a pipe":
        os.mkfifo(kept)
    else:
        kept.write_bytes(made.replace(b"[2, ", b"[-5, "))
    assert len(AdaptiveDataLoader(TextLines(str(path), index=kept.parent), 1)) == 2
    assert kept.read_bytes().endswith(made)
