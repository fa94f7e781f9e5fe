"""The position: one value for the whole job, committed with everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticrun.checkpoint.states.expected import COUNT, FLAG, TEXT, check_values
from elasticrun.errors import counted

STEPS = "remaining_steps_until"  # In place of a loader's name.
STEPS_OF = "steps of "  # Before the name of another loop whose index counts steps.
_ENCODED = {
    "finished_epochs": COUNT,
    "in_epoch": FLAG,
    "finished_loops": COUNT,
    "index": COUNT,
    "loader": TEXT,
    "breaks": [(COUNT, COUNT)],
}


def unit_of(loader: str, what: str = "sample") -> str:
    """Return `what`, or "step" where the loop over a position's loader counts these."""
    return "step" if loader.startswith((STEPS, STEPS_OF)) else what


@dataclass(frozen=True)
class Position:
    """The job's place in the program; one value for the whole job.

    Attributes:
        finished_epochs: Epochs that ended.
        in_epoch: Whether epoch number `finished_epochs` has begun.
        finished_loops: Loops that ended since the last epoch did, those outside of
            epochs included.
        index: Samples consumed so far in the interrupted loop, by all replicas
            together; or batches, where each has a list of its own; or steps.
        loader: Name of the loader of the interrupted loop, `STEPS`, or `STEPS_OF` and
            the name of a foreign loop or a combined loader; empty between loops.
        breaks: For each epoch loop that `break` has left, its number in the program and
            the epochs that were finished then. Replay would enter it again otherwise.
    """

    finished_epochs: int = 0
    in_epoch: bool = False
    finished_loops: int = 0
    index: int = 0
    loader: str = ""
    breaks: tuple[tuple[int, int], ...] = ()

    @property
    def place(self) -> tuple[int, int, bool]:
        """What orders two positions, but for the index within a loop."""
        return (self.finished_epochs, self.finished_loops, self.in_epoch)

    def encode(self) -> dict[str, Any]:
        """Return the position as plain values for a manifest."""
        return {**vars(self), "breaks": [list(pair) for pair in self.breaks]}

    @classmethod
    def decode(cls, values: Any) -> Position:
        check_values(values, _ENCODED, name="position")
        breaks = tuple((number, epochs) for number, epochs in values["breaks"])
        return cls(**{**values, "breaks": breaks})

    def __str__(self) -> str:
        if self.in_epoch:
            text = f"epoch {self.finished_epochs}, loop {self.finished_loops}"
        elif self.finished_loops or self.loader:
            epochs = counted(self.finished_epochs, "epoch")
            text = f"loop {self.finished_loops} after {epochs}"
        else:
            text = f"the end of epoch {self.finished_epochs - 1}"
        if self.loader:
            text += f", {unit_of(self.loader)} {self.index}"
            if self.loader != STEPS:
                text += f" of `{self.loader.removeprefix(STEPS_OF)}`"
        return text if self != Position() else "the beginning"

    def after_epochs(self, finished_epochs: int) -> Position:
        """Return the end of epoch number `finished_epochs` - 1."""
        return Position(finished_epochs, breaks=self.breaks)
