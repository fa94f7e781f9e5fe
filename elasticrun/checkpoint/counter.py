"""A count kept in a file, which knows when it is damaged."""

from __future__ import annotations

import zlib

from elasticrun.checkpoint.storage import Storage, StoreUnreachableError


def write_counter(storage: Storage, name: str, value: int) -> None:
    """Replace the count that a file keeps, durably."""
    storage.replace(name, _encode_counter(value))


def read_counter(storage: Storage, name: str) -> int:
    """Return the count that a file keeps, -1 if it is missing, damaged, unreadable.

    Raises:
        StoreUnreachableError: It may be there, but its store cannot be asked.
    """
    try:
        data = storage.read(name)
        value = int(data.split()[0])
    except StoreUnreachableError:
        raise
    except (OSError, IndexError, ValueError):
        return -1
    return value if data == _encode_counter(value) else -1


def _encode_counter(value: int) -> bytes:
    text = str(value).encode()
    return text + b" %08x\n" % zlib.crc32(text)
