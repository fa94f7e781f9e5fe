"""The checkpoint directory, as the launcher sees it: how far it is, moving it aside."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from pathlib import Path

from elasticrun.checkpoint import files
from elasticrun.checkpoint.counter import read_counter
from elasticrun.launcher.claim import claimed
from elasticrun.launcher.options import OptionError, Program

_CHECKPOINT = re.compile("checkpoint-([0-9]{8,})")
_FINISHED = "finished.json"
_OWN = re.compile(
    r"checkpoint-[0-9]{8,}|generation|(launcher\.)?lock|finished\.json|logs"
    r"|\w+(\.json)?\.tmp"
)


def newest_checkpoint(directory: Path) -> int:
    """Return the number of the newest committed checkpoint, 0 without any."""
    try:
        names = os.listdir(directory)
    except OSError:
        return 0
    numbers = [
        int(match[1])
        for name in names
        if (match := _CHECKPOINT.fullmatch(name))
        and (directory / name / "manifest.json").exists()
    ]
    return max(numbers, default=0)


def next_generation(directory: Path) -> int:
    """Return the number that the directory's next generation will get."""
    return read_counter(directory / "generation") + 1


def note_finished(directory: Path, program: Program) -> None:
    """Remember that this program has come to its end with the newest checkpoint."""
    newest = newest_checkpoint(directory)
    if newest:
        note = {
            "program": _fingerprint(program),
            "checkpoint": newest,
            "time": time.time(),
        }
        files.write_atomically(directory / _FINISHED, json.dumps(note).encode())


def finished_at(directory: Path, program: Program) -> float | None:
    """Return when the same program ended here with what is the newest checkpoint."""
    try:
        note = json.loads((directory / _FINISHED).read_bytes())
        is_same = note["program"] == _fingerprint(program)
        is_newest = note["checkpoint"] == newest_checkpoint(directory)
        return float(note["time"]) if is_same and is_newest else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def move_aside(directory: Path) -> Path | None:
    """Give the directory another name, so that the job starts anew.

    Returns:
        The new name, or None if there was nothing.

    Raises:
        OptionError: It is in use, or holds what is not the job's.
    """
    if not directory.exists():
        return None
    strange = sorted(name for name in os.listdir(directory) if not _OWN.fullmatch(name))
    if strange:
        raise OptionError(
            f"--fresh would move {directory} aside, but it holds {strange[0]!r}, which "
            "is not elasticrun's. Move it yourself, or give another --checkpoint-dir."
        )
    with claimed(directory, is_shared=False):
        number = 1
        while (target := _aside(directory, number)).exists():
            number += 1
        directory.rename(target)
    return target


def _aside(directory: Path, number: int) -> Path:
    return directory.with_name(f"{directory.name}.old-{number}")


def _fingerprint(program: Program) -> str:
    """Return what differs when the program or its arguments do."""
    digest = hashlib.sha256(
        json.dumps([program.kind, program.target, program.arguments]).encode()
    )
    if program.kind == "script":
        digest.update(Path(program.target).read_bytes())
    return digest.hexdigest()
