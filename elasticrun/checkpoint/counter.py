"""A count kept in a file, which knows when it is damaged."""

from __future__ import annotations

import zlib
from pathlib import Path

from elasticrun.checkpoint import files


def write_counter(path: Path, value: int) -> None:
    """Replace the count that a file keeps, durably."""
    files.write_atomically(path, _encode_counter(value))


def read_counter(path: Path) -> int:
    """Return the count that a file keeps, -1 if it is missing, damaged, unreadable."""
    try:
        data = path.read_bytes()
        value = int(data.split()[0])
    except (OSError, IndexError, ValueError):
        return -1
    return value if data == _encode_counter(value) else -1


def _encode_counter(value: int) -> bytes:
    text = str(value).encode()
    return text + b" %08x\n" % zlib.crc32(text)
