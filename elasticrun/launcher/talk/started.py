"""Notes which jobs this user started, so that ended ones are found by name."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from dataclasses import asdict, dataclass

from elasticrun.checkpoint.storage.place import Place
from elasticrun.launcher import environment

_MOST = 20


@dataclass(frozen=True)
class Started:
    """A job as its launcher noted it at its start.

    Attributes:
        checkpoint_dir: Its directory or URL.
        started_in: The working directory of its launcher.
    """

    job: str
    pid: int
    checkpoint_dir: str
    started_in: str = ""


def note_start(name: str, checkpoint_dir: Place) -> None:
    """Note that a job starts; where that cannot be written, it starts all the same.

    The notes lie beside the sockets, one for each checkpoint directory.
    """
    note = Started(name, os.getpid(), str(checkpoint_dir), os.getcwd())
    digest = hashlib.sha256(note.checkpoint_dir.encode()).hexdigest()[:16]
    folder = environment.socket_directory()
    with contextlib.suppress(OSError):
        (folder / f"{digest}.job").write_text(json.dumps(asdict(note)))
        notes = sorted(folder.glob("*.job"), key=os.path.getmtime)
        for old in notes[:-_MOST]:
            old.unlink(missing_ok=True)


def started_lately() -> list[Started]:
    """Return the last jobs, the newest first."""
    found = []
    with contextlib.suppress(OSError):
        notes = environment.socket_directory().glob("*.job")
        for path in sorted(notes, key=os.path.getmtime, reverse=True):
            with contextlib.suppress(ValueError, TypeError):  # Half written.
                found.append(Started(**json.loads(path.read_bytes())))
    return found
