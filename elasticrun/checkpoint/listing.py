"""Lists and opens the checkpoints in a storage; reads the counter beside them."""

from __future__ import annotations

import errno
import re
import zlib

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files.durable import DamagedFileError
from elasticrun.checkpoint.manifest import MANIFEST_NAME, decode
from elasticrun.checkpoint.storage.storage import Storage, StoreUnreachableError
from elasticrun.errors import CheckpointError

_NAME = re.compile("checkpoint-([0-9]{8,})")


def checkpoint_name(number: int) -> str:
    """Return the name of the folder in which this checkpoint is kept."""
    return f"checkpoint-{number:08d}"


def number_of(name: str) -> int | None:
    """Return the number in a checkpoint's name, None for another name."""
    match = _NAME.fullmatch(name)
    number = int(match[1]) if match else None
    return number if number is None or checkpoint_name(number) == name else None


def list_numbers(storage: Storage) -> list[int]:
    """Return the numbers of what is named like a checkpoint, the newest first.

    In any condition; it may even be somebody else's: see `is_own`.
    """
    found = map(number_of, storage.list_names())
    return sorted((number for number in found if number is not None), reverse=True)


def is_own(storage: Storage, number: int) -> bool:
    """Return whether elasticrun made it: it is a checkpoint or a draft."""
    has_manifest = find_manifest(storage, number) is not None
    return has_manifest or storage.is_draft(checkpoint_name(number))


def read_checkpoint(storage: Storage, number: int) -> Checkpoint:
    """Open a checkpoint by its manifest, without reading its files."""
    name = checkpoint_name(number)
    source = storage.locate(name, MANIFEST_NAME)
    try:
        data = storage.read(name, MANIFEST_NAME)
    except NotADirectoryError as error:  # A file that is named like a checkpoint.
        raise FileNotFoundError(errno.ENOENT, error.strerror, str(source)) from error
    manifest = decode(data, source=str(source))
    if manifest.number != number:
        raise DamagedFileError(f"{source} is that of number {manifest.number}.")
    return Checkpoint.of(storage.locate(name), manifest, storage)


def is_committed(storage: Storage, number: int) -> bool:
    """Return whether it has a manifest, as far as can be told."""
    try:
        return find_manifest(storage, number) is not None
    except OSError:
        return False


def is_uncommitted(storage: Storage, number: int) -> bool:
    """Return whether it was begun and never committed."""
    try:
        return find_manifest(storage, number) is None
    except OSError:  # Unreachable; `find_newest` says what is wrong.
        return False


def find_manifest(storage: Storage, number: int) -> int | None:
    """Return the size of a checkpoint's manifest, None if it has none."""
    folder = checkpoint_name(number)
    return storage.find_sizes(folder, [MANIFEST_NAME])[MANIFEST_NAME]


def write_counter(storage: Storage, name: str, value: int) -> None:
    """Replace the count that a file keeps, durably."""
    storage.replace(name, _encode_counter(value))


def read_counter(storage: Storage, name: str) -> int:
    """Return the count that a file keeps, -1 if it is missing, damaged, unreadable."""
    try:
        data = storage.read(name)
        value = int(data.split()[0])
    except StoreUnreachableError:
        raise
    except (CheckpointError, OSError, IndexError, ValueError):
        return -1
    return value if data == _encode_counter(value) else -1


def _encode_counter(value: int) -> bytes:
    text = str(value).encode()
    return text + b" %08x\n" % zlib.crc32(text)
