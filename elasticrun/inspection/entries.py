"""What a directory holds: each checkpoint with its condition, and finding one by word.

Only names, manifests and sizes are looked at, so that it is quick and needs no torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticrun.checkpoint import files
from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.listing import (
    checkpoint_path,
    is_torn,
    list_paths,
    number_of,
    read_checkpoint,
)
from elasticrun.checkpoint.lock import Owner, find_owner
from elasticrun.errors import CheckpointError

GOOD, BAD, WRITING, TORN = "good", "bad", "being written", "never committed"
NEWEST = "newest"


class InspectionError(Exception):
    """What was asked for cannot be shown; the text says why."""


@dataclass(frozen=True)
class Entry:
    """One checkpoint as it was found.

    Attributes:
        checkpoint: None if there is no manifest that can be read.
        size: The bytes of its files, as they are on the disk.
        condition: GOOD as far as sizes tell, BAD, WRITING or TORN.
        reason: Why it is bad.
    """

    number: int
    path: Path
    checkpoint: Checkpoint | None
    size: int
    condition: str
    reason: str = ""


def find_entries(directory: Path, *, is_used: bool | None = None) -> list[Entry]:
    """Return what the directory holds, the newest first.

    Args:
        is_used: Whether a job uses it, so that the newest may be about to be written;
            None to find out.

    Raises:
        InspectionError: It cannot be read.
    """
    try:
        if is_used is None:
            is_used = owner_of(directory) is not None
        paths = list_paths(directory)
    except OSError as error:
        raise InspectionError(f"{directory} cannot be read: {error}") from error
    found = [
        _look_at(path, may_be_written=is_used and path == paths[0]) for path in paths
    ]
    return [entry for entry in found if entry is not None]


def owner_of(directory: Path) -> Owner | None:
    """Return who uses the directory, None if nobody does or it cannot be told."""
    try:
        return find_owner(directory)
    except OSError:
        return None


def _look_at(path: Path, *, may_be_written: bool) -> Entry | None:
    """Return what is there; None if the job has removed it since it was listed."""
    number, checkpoint = number_of(path), None
    try:
        checkpoint = read_checkpoint(path)
        reason = _find_wrong_size(checkpoint)
        condition = BAD if reason else GOOD
    except FileNotFoundError:
        if not path.is_dir():
            return None
        condition, reason = WRITING if may_be_written else TORN, ""
    except (CheckpointError, OSError) as error:
        condition, reason = BAD, str(error)
    if condition == BAD and is_torn(path):  # It was removed while it was looked at.
        return None
    return Entry(number, path, checkpoint, _size(path), condition, reason)


def _find_wrong_size(checkpoint: Checkpoint) -> str:
    for record in checkpoint.manifest.files:
        path = checkpoint.path / record.name
        size = files.find_size(path)
        if size is None:
            return f"{path} is missing; it had {record.size} bytes."
        if size != record.size:
            return f"{path} has {size} bytes, but {record.size} were written."
    return ""


def _size(path: Path) -> int:
    try:
        with os.scandir(path) as found:
            return sum(each.stat(follow_symlinks=False).st_size for each in found)
    except OSError:
        return 0


def choose_checkpoint(directory: Path, word: str) -> Checkpoint:
    """Return the checkpoint that `word` means: a number, "newest", or a path.

    Raises:
        InspectionError: There is none, or it cannot be read.
    """
    if word == NEWEST:
        return _newest(directory)
    try:
        path = checkpoint_path(directory, int(word))
    except ValueError:
        path = Path(os.path.abspath(word))
    try:
        number_of(path)
        return read_checkpoint(path)
    except FileNotFoundError as error:
        raise InspectionError(
            f"there is no checkpoint {path}. {_say_what_there_is(directory)}"
        ) from error
    except ValueError as error:
        raise InspectionError(
            f"{word!r} means no checkpoint; give its number, {NEWEST!r}, or the path "
            f"of its directory. {_say_what_there_is(directory)}"
        ) from error
    except (CheckpointError, OSError) as error:
        raise InspectionError(str(error)) from error


def _newest(directory: Path) -> Checkpoint:
    for entry in find_entries(directory):
        if entry.checkpoint is not None and entry.condition == GOOD:
            return entry.checkpoint
    raise InspectionError(f"{directory} has no good checkpoint.")


def _say_what_there_is(directory: Path) -> str:
    numbers = [e.number for e in find_entries(directory) if e.checkpoint is not None]
    if not numbers:
        return f"{directory} has none."
    return f"{directory} has {', '.join(map(str, sorted(numbers)))}."


def choose_directory(word: str | None, *, configured: str | None) -> Path:
    """Return the directory that is meant, by a word or without one.

    Args:
        configured: What the job itself would use.

    Raises:
        InspectionError: There is no such directory, or none is known.
    """
    given = word or configured
    if given is not None:
        path = Path(os.path.abspath(given))
        if not path.is_dir():
            raise InspectionError(
                f"{given}: there is no such directory. Give the directory that holds "
                "the checkpoints."
            )
        return path
    here = Path.cwd()
    candidates = [here] if _holds_checkpoints(here) else _directories_below(here)
    if len(candidates) == 1:
        return candidates[0]
    raise InspectionError(_say_which(candidates))


def _directories_below(path: Path) -> list[Path]:
    return sorted(each for each in path.iterdir() if _holds_checkpoints(each))


def _holds_checkpoints(path: Path) -> bool:
    try:
        return bool(list_paths(path))
    except OSError:
        return False


def _say_which(candidates: Sequence[Path]) -> str:
    if not candidates:
        return (
            "there are no checkpoints here. Give the directory that holds them, or set "
            "ELASTICRUN_CHECKPOINT_DIR."
        )
    names = ", ".join(path.name for path in candidates)
    return f"several directories here hold checkpoints: {names}. Give one of them."
