"""Tar shards that are torn, or hold what no shard holds."""

from __future__ import annotations

import io
import logging
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elasticrun import AdaptiveDataLoader, ElasticRunError, TarShards

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


def test_a_pipe_is_no_data(job: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    with pytest.raises(ElasticRunError, match="is no plain file, but a pipe"):
        read(tmp_path / "a.tar")
