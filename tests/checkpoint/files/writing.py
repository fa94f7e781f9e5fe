"""Files written, and read back by the record of that."""

from __future__ import annotations

from pathlib import Path

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import FileRecord


def write_bytes(path: Path, data: bytes) -> FileRecord:
    return durable.write_file(path, lambda file: file.write(data))


def read(path: Path, record: FileRecord) -> bytes:
    with durable.open_checked(path, record) as file:
        return file.read()
