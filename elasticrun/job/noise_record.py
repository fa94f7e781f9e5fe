"""The measured noise of a model's gradients: saved, and summed over replicas."""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Callable, Sequence
from typing import BinaryIO, NamedTuple

from torch import Tensor

from elasticrun.adaptive.noise import (
    MeasuredStep,
    Noise,
    measure_step,
    summarize_newest,
)
from elasticrun.checkpoint.states.expected import NUMBER, check_values
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.job.current import current_job
from elasticrun.replicas.gathering import gather

_MOST_STEPS = 512  # That are kept.


_Part = tuple[Sequence[float], Sequence[int]]  # Squares and sizes of a StepPart.


class StepPart(NamedTuple):
    """One replica's part in what a step tells; numbers may still be computed.

    Attributes:
        squares: The squared norms of what each chunk adds to the gradient, which is a
            mean over the batch; and after them that of the gradient itself.
        sizes: How many samples each chunk has, of this replica's.
        batch_size: The same on all replicas.
    """

    squares: Tensor
    sizes: tuple[int, ...]
    batch_size: int


class NoiseRecord(BaseState):
    """What the newest measured steps tell, in every checkpoint.

    Replicas keep their parts of steps, which are added up in each save and when the
    program asks: a step communicates nothing for it.

    Args:
        has_shards: Whether each replica knows a part of every gradient, and a chunk is
            what all have in one micro-batch. Else a chunk is one replica's.

    Attributes:
        progress: The steps with batches of the first size that the training is worth.
    """

    def __init__(self, name: str, *, has_shards: bool = False) -> None:
        super().__init__(name)
        self._has_shards = has_shards
        self._steps: deque[MeasuredStep] = deque(maxlen=_MOST_STEPS)
        self._parts: deque[StepPart] = deque(maxlen=_MOST_STEPS)
        self.progress = 0.0

    @property
    def noise(self) -> Noise:
        """The noise, as of the newer half of the steps whose parts were added up."""
        return summarize_newest(list(self._steps))

    def add(self, part: StepPart) -> None:
        """Keep this replica's part of a step. All replicas measure the same steps."""
        self._parts.append(part)

    def sum_parts(self) -> None:
        """Add up the parts of all replicas. Collective."""
        own = [(part.squares.tolist(), part.sizes) for part in self._parts]
        gathered = gather(own, before_reading=current_job().wait_for_gpu)
        for *of_replicas, part in zip(*gathered, self._parts, strict=True):
            step = self._step_of(of_replicas, part.batch_size)
            if step is not None:
                self._steps.append(step)
        self._parts.clear()

    def _step_of(self, parts: list[_Part], batch_size: int) -> MeasuredStep | None:
        """Return what the replicas' parts of one step tell together."""
        if self._has_shards:
            parts = [_joined(parts)]
        chunks = [
            (square, size)
            for (*squares, _), sizes in parts
            for square, size in zip(squares, sizes, strict=True)
            if size > 0
        ]
        return measure_step(
            chunk_squares=math.fsum(
                square * batch_size / size for square, size in chunks
            ),
            total_square=parts[0][0][-1],
            batch_size=batch_size,
            num_chunks=len(chunks),
        )

    def sync(self) -> None:
        self.sum_parts()

    def remember(self) -> Callable[[], None]:
        """Remember it without parts: a rescue knows the noise from fewer steps."""
        steps, progress = tuple(self._steps), self.progress

        def put_back() -> None:
            self._steps = deque(steps, maxlen=_MOST_STEPS)
            self._parts.clear()
            self.progress = progress

        return put_back

    def save(self, fileobj: BinaryIO) -> None:
        values = {"steps": list(self._steps), "progress": self.progress}
        fileobj.write(json.dumps(values).encode())

    def load(self, fileobj: BinaryIO) -> None:
        values = json.loads(fileobj.read())
        expected = {"steps": [(NUMBER, NUMBER)], "progress": NUMBER}
        check_values(values, expected, name=self.name)
        self._steps.extend(MeasuredStep(*step) for step in values["steps"])
        self.progress = float(values["progress"])


def _joined(parts: list[_Part]) -> _Part:
    """Return as one what replicas know of shards."""
    squares, sizes = zip(*parts, strict=True)
    return (
        [math.fsum(each) for each in zip(*squares, strict=True)],
        [sum(each) for each in zip(*sizes, strict=True)],
    )
