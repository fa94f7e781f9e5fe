"""Writes a replica's events: generations, positions, checkpoints."""

from __future__ import annotations

import threading
from typing import Any

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.events import EventLog, local_directory
from elasticrun.checkpoint.position import Position, unit_of
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.storage.place import Place
from elasticrun.job.progress import Progress

_PATIENCE = 5.0
# Seconds between two positions: few at first, so that short jobs have a history, too.
_SHORTEST, _LONGEST, _GROWTH = 0.5, 30.0, 0.02


class EventWriter:
    """Appends to the job's events on rank 0, without any cost for training.

    A survivor appends the checkpoint of a rescue.

    Args:
        checkpoint_dir: Of the job.
        progress: Tells where the program is.
        states: Of which the values that are numbers are noted.
        generation: The number of the running one.
    """

    def __init__(
        self,
        checkpoint_dir: Place,
        *,
        progress: Progress,
        states: Registry,
        generation: int,
        rank: int,
    ) -> None:
        self._progress = progress
        self._states = states
        self._generation = generation
        self._is_first = rank == 0
        self._log = EventLog(local_directory(checkpoint_dir))
        self._captured: tuple[int, dict[str, float]] = 0, {}
        self._has_closed = threading.Event()
        self._thread = threading.Thread(
            target=self._run, name="elasticrun-history", daemon=True
        )

    def begin(self, **values: Any) -> None:
        """Note that the generation begins, and from now on where it is; on rank 0."""
        if self._is_first:
            self._write("begin", **values, **_where(self._progress.position))
            self._thread.start()

    def keep_captured(self, position: dict[str, Any]) -> None:
        """Remember what the next checkpoint holds; in the training thread."""
        progress = self._progress
        num_passed = progress.num_passed
        if progress.position.place == Position.decode(position).place:
            num_passed -= progress.index - position["index"]  # In a rescue.
        self._captured = num_passed, self._states.numbers()

    def write_checkpoint(
        self, checkpoint: Checkpoint, paused: float, seconds: float
    ) -> None:
        """Note a checkpoint; in the thread that has written it."""
        manifest = checkpoint.manifest
        num_passed, values = self._captured
        self._write(
            "checkpoint",
            checkpoint=checkpoint.number,
            samples=num_passed,
            bytes=sum(record.size for record in manifest.files),
            paused=round(paused, 4),
            seconds=round(seconds, 4),
            values=values,
            rescue=manifest.rescue,
            **_where(Position.decode(dict(manifest.position))),
        )

    def close(self, *, code: int | None) -> None:
        """Note how far the program has come, and no more.

        Args:
            code: With which the job has stopped; None if it has not.
        """
        self._has_closed.set()
        if self._is_first:
            self._thread.join(_PATIENCE)  # It may be in a write to a disk that hangs.
            self._write_position("leave", code=code)

    def _run(self) -> None:
        seconds, num_passed = _SHORTEST, 0
        while not self._has_closed.wait(min(seconds, _LONGEST)):
            seconds *= 1 + _GROWTH
            if self._progress.num_passed != num_passed:
                num_passed = self._progress.num_passed
                self._write_position("progress")

    def _write_position(self, kind: str, **values: Any) -> None:
        where = _where(self._progress.position)
        where["num_epochs"] = self._progress.num_epochs
        self._write(kind, samples=self._progress.num_passed, **where, **values)

    def _write(self, kind: str, **values: Any) -> None:
        own = {"generation": self._generation, **values}
        self._log.write(kind, may_rotate=self._is_first, **own)


def _where(position: Position) -> dict[str, Any]:
    return {
        "position": str(position),
        "epoch": position.finished_epochs,
        "unit": f"{unit_of(position.loader)}s",
    }
