"""The checkpoints in a directory, found by their names, read by their manifests."""

from __future__ import annotations

import os
import re
from pathlib import Path

from elasticrun.checkpoint import files
from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files import DamagedFileError
from elasticrun.checkpoint.manifest import MANIFEST_NAME, decode
from elasticrun.errors import CheckpointError

_NAME = re.compile("checkpoint-([0-9]{8,})")


def checkpoint_path(directory: Path, number: int) -> Path:
    """Return where the checkpoint of this number is kept."""
    return directory / f"checkpoint-{number:08d}"


def list_paths(directory: Path) -> list[Path]:
    """Return the checkpoints in any condition, the newest first."""
    names = filter(_NAME.fullmatch, os.listdir(directory))
    return sorted((directory / name for name in names), key=number_of, reverse=True)


def number_of(path: Path) -> int:
    """Return the number in a checkpoint's name.

    Raises:
        ValueError: It is not the name of a checkpoint.
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    return int(match[1])


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint by its manifest, without reading its files.

    Raises:
        FileNotFoundError: It has none, so it was never committed.
        DamagedFileError: The manifest is damaged, or that of another checkpoint.
        CheckpointError: It has another format.
        OSError: It cannot be read.
    """
    source = path / MANIFEST_NAME
    manifest = decode(source.read_bytes(), source=str(source))
    if manifest.number != number_of(path):
        raise DamagedFileError(f"{source} is that of number {manifest.number}.")
    return Checkpoint(path, manifest)


def is_torn(path: Path) -> bool:
    """Return whether it was begun and never committed."""
    try:
        return files.find_size(path / MANIFEST_NAME) is None
    except OSError:  # Unreachable is not torn; `find_newest` says what is wrong.
        return False


def has_right_sizes(path: Path) -> bool:
    """Return whether it is committed and each file has its size; reads no file."""
    try:
        records = read_checkpoint(path).manifest.files
        return all(files.find_size(path / r.name) == r.size for r in records)
    except (CheckpointError, OSError):
        return False
