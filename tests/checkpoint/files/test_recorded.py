"""Files are checked: what is read is what was written, or an error."""

from __future__ import annotations

import os
import zlib
from pathlib import Path

import pytest

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import DamagedFileError, FileRecord
from tests.checkpoint.files.writing import read, write_bytes


def test_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model"
    with pytest.raises(DamagedFileError) as caught:
        durable.open_checked(path, FileRecord("model", 12, 0))
    assert str(caught.value) == f"{path} is missing; it had 12 bytes."


def test_other_size_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model"
    record = write_bytes(path, b"parameters")
    os.truncate(path, 4)
    with pytest.raises(DamagedFileError) as caught:
        durable.open_checked(path, record)
    assert str(caught.value) == f"{path} has 4 bytes, but 10 were written."


def test_other_content_is_named(tmp_path: Path) -> None:
    path = tmp_path / "model"
    record = write_bytes(path, b"parameters")
    path.write_bytes(b"Parameters")
    with pytest.raises(DamagedFileError) as caught:
        durable.open_checked(path, record)
    assert str(caught.value) == (
        f"{path} has the checksum {zlib.crc32(b'Parameters'):08x}, "
        f"but {zlib.crc32(b'parameters'):08x} was written."
    )


def test_content_beyond_one_block_is_checked(tmp_path: Path) -> None:
    path = tmp_path / "model"
    data = bytearray(os.urandom(durable.BLOCK_SIZE * 2 + 5))
    record = write_bytes(path, bytes(data))
    assert read(path, record) == data
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedFileError, match="has the checksum"):
        durable.open_checked(path, record)
