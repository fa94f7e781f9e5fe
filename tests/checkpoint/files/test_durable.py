"""Files are durable: what is written is on the disk, whole, once, or an error."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import io
import itertools
import json
import mmap
import os
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import DamagedFileError, FileRecord
from tests.checkpoint.files.writing import read, write_bytes


def test_record_is_of_the_bytes_written(tmp_path: Path) -> None:
    record = write_bytes(tmp_path / "model", b"parameters")
    assert record == FileRecord("model", 10, zlib.crc32(b"parameters"))
    assert (tmp_path / "model").read_bytes() == b"parameters"


@given(chunks=st.lists(st.binary(max_size=20_000), max_size=6))
def test_checksum_does_not_depend_on_how_it_is_written(
    tmp_path_factory: pytest.TempPathFactory, chunks: list[bytes]
) -> None:
    def write(file: BinaryIO) -> None:
        for chunk in chunks:
            assert file.write(memoryview(chunk)) == len(chunk)
            file.flush()

    path = tmp_path_factory.mktemp("files") / "model"
    data = b"".join(chunks)
    record = durable.write_file(path, write)
    assert record == FileRecord("model", len(data), zlib.crc32(data))
    assert read(path, record) == data


@pytest.mark.parametrize("offset", [0, 1], ids=["on a page", "between pages"])
def test_blocks_of_any_length_come_whole(tmp_path: Path, offset: int) -> None:
    """Those that a disk may fetch from memory, and those that it may not."""
    memory = memoryview(mmap.mmap(-1, 5 << 20))
    memory[:] = os.urandom(len(memory))
    ends = [0, 4096, 4096 + (3 << 20), (5 << 20) - 5]
    blocks = [memory[a + offset : b] for a, b in itertools.pairwise(ends)]
    record = durable.write_blocks(tmp_path / "model", blocks)
    data = b"".join(blocks)
    assert record == FileRecord("model", len(data), zlib.crc32(data))
    assert read(tmp_path / "model", record) == data


def test_large_blocks_take_neither_cache_nor_thread_from_training() -> None:
    size = 4 << 20
    memory = memoryview(mmap.mmap(-1, 2 * size))
    memory[:] = os.urandom(len(memory))

    def blocks() -> Iterator[memoryview]:
        threads = threading.enumerate()
        for begin in (0, size):
            yield memory[begin : begin + size]
            assert threading.enumerate() == threads

    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:  # On a disk, mostly.
        path, other = Path(folder, "model"), Path(folder, "other")
        copy = ["dd", "if=/dev/zero", f"of={other}", "bs=1M", "count=1", "oflag=direct"]
        has_failed = subprocess.run(copy, stderr=subprocess.DEVNULL).returncode
        if has_failed or num_cached_pages(other):
            pytest.skip("the file system of /var/tmp writes nothing past its cache")
        durable.write_blocks(path, blocks())
        assert num_cached_pages(path) == 0
        assert path.read_bytes() == memory
        assert num_cached_pages(path) == 2 * size // mmap.PAGESIZE  # It can tell.


def num_cached_pages(path: Path) -> int:
    """Return how many of a file's pages the system has in memory (mincore(2))."""
    with open(path, "r+b") as file, mmap.mmap(file.fileno(), 0) as view:
        flags = (ctypes.c_ubyte * (len(view) // mmap.PAGESIZE))()
        begin = ctypes.addressof(ctypes.c_char.from_buffer(view))
        done = ctypes.CDLL(None).mincore(
            ctypes.c_void_p(begin), ctypes.c_size_t(len(view)), flags
        )
        assert done == 0
        return sum(flag & 1 for flag in flags)


def test_file_system_that_must_cache_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    control = fcntl.fcntl

    def refuse(file: Any, command: int, value: int = 0) -> int:
        if command == fcntl.F_SETFL and value & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return control(file, command, value)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    blocks = [memoryview(os.urandom(2 << 20))]
    record = durable.write_blocks(tmp_path / "model", blocks)
    assert read(tmp_path / "model", record) == blocks[0]


@pytest.mark.parametrize("is_zipfile", [True, False])
def test_torch_saves_into_it(tmp_path: Path, is_zipfile: bool) -> None:
    state: dict[str, Any] = {"weight": torch.arange(70_000.0), "step": 3}
    record = durable.write_file(
        tmp_path / "model",
        lambda file: torch.save(state, file, _use_new_zipfile_serialization=is_zipfile),
    )
    with durable.open_checked(tmp_path / "model", record) as file:
        loaded = torch.load(file, weights_only=True)
    assert torch.equal(loaded["weight"], state["weight"])
    assert loaded["step"] == 3


def test_text_can_be_written_into_it(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        with io.TextIOWrapper(file, encoding="utf-8") as text:
            json.dump({"best": 0.5}, text)

    record = durable.write_file(tmp_path / "best", write)
    assert read(tmp_path / "best", record) == b'{"best": 0.5}'


def test_file_is_never_written_twice(tmp_path: Path) -> None:
    record = write_bytes(tmp_path / "model", b"first")
    with pytest.raises(FileExistsError):
        write_bytes(tmp_path / "model", b"second")
    assert read(tmp_path / "model", record) == b"first"


def test_error_of_the_writer_passes_through(tmp_path: Path) -> None:
    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        durable.write_file(tmp_path / "model", write)


def test_copy_is_another_inode(tmp_path: Path) -> None:
    record = write_bytes(tmp_path / "old", b"parameters")
    copied = durable.copy_file(tmp_path / "old", tmp_path / "new", record=record)
    assert copied == record._replace(name="new")
    assert read(tmp_path / "new", copied) == b"parameters"
    assert (tmp_path / "new").stat().st_ino != (tmp_path / "old").stat().st_ino


def test_copy_of_a_damaged_file_is_refused(tmp_path: Path) -> None:
    record = write_bytes(tmp_path / "old", b"parameters")
    (tmp_path / "old").write_bytes(b"Parameters")
    with pytest.raises(DamagedFileError, match=f"{tmp_path}/old has the checksum"):
        durable.copy_file(tmp_path / "old", tmp_path / "new", record=record)


def test_atomic_write_replaces_and_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "generation"
    path.with_name("generation.tmp").write_bytes(b"a longer rest of a killed process")
    durable.write_atomically(path, b"1")
    durable.write_atomically(path, b"2")
    assert path.read_bytes() == b"2"
    assert os.listdir(tmp_path) == ["generation"]


def test_shared_file_is_overwritten_in_place(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with durable.open_shared(path) as file:
        durable.overwrite(file, b"a long text")
        inode = path.stat().st_ino
        durable.overwrite(file, b"short")
    assert path.read_bytes() == b"short"
    assert path.stat().st_ino == inode
    with durable.open_shared(path) as file:
        assert file.read() == b"short"


def test_lines_are_appended_at_once(tmp_path: Path) -> None:
    path = tmp_path / "traces" / "0-0.jsonl"
    with durable.open_append(path) as first, durable.open_append(path) as second:
        first.write("1\n")
        second.write("2\n")
        first.write("3\n")
        assert path.read_text() == "1\n2\n3\n"
    planted = tmp_path / "planted"
    planted.symlink_to(path)
    with pytest.raises(ValueError, match="planted is a link, not a plain file"):
        durable.open_append(planted)


def test_parents_are_made_too(tmp_path: Path) -> None:
    durable.make_directory(tmp_path / "a" / "b")
    durable.make_directory(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()


def test_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        durable.make_directory(tmp_path / "file" / "a")


def test_size_of_the_unreachable_is_not_none(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "three").write_bytes(b"123")
    assert durable.find_size(tmp_path / "three") == 3
    assert durable.find_size(tmp_path / "none") is None
    with pytest.raises(OSError, match="symbolic links"):
        durable.find_size(tmp_path / "loop")


def test_tree_is_removed_with_the_first_first_and_the_last_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removed: list[str] = []
    unlink = os.unlink

    def record(path: str | Path, *, dir_fd: int | None = None) -> None:
        removed.append(Path(path).name)
        unlink(path, dir_fd=dir_fd)

    directory = tmp_path / "tree"
    (directory / "deeper").mkdir(parents=True)
    for name in ("a", "manifest.json", "z", "deeper/b"):
        (directory / name).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", record)
        durable.remove_tree(directory, first="manifest.json", last="c")
    assert removed[-1] == "c"  # Which was the first.
    assert sorted(removed) == ["a", "b", "c", "z"]
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_file_system_without_directory_sync_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    refuse_fsync(monkeypatch, code)
    durable.fsync_directory(tmp_path)


def test_failed_directory_sync_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_fsync(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output error"):
        durable.fsync_directory(tmp_path)


def refuse_fsync(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def fsync(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fsync)
