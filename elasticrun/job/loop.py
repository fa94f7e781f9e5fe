"""What a job, and a model that is trained in it, know of the loader looped over."""

from __future__ import annotations

from typing import Protocol


class Loop(Protocol):
    """A loader while it is looped over; `AdaptiveDataLoader` is one."""

    @property
    def name(self) -> str:
        """What checkpoints and messages call the loader."""
        ...

    @property
    def where(self) -> str:
        """Where the loop stands in the program, as "file.py:line"."""
        ...

    @property
    def num_samples(self) -> int:
        """Samples in the whole loop, over all replicas."""
        ...

    @property
    def batch_index(self) -> int:
        """Number of the current global batch within the loop."""
        ...

    @property
    def is_step(self) -> bool:
        """Whether this micro-batch completes a global batch."""
        ...

    @property
    def even_batches(self) -> bool:
        """Whether every replica takes part in every step."""
        ...

    @property
    def loss_weight(self) -> float:
        """What to multiply a mean loss with before replicas are averaged."""
        ...

    @property
    def running_loop(self) -> Turns:
        """This loop over the loader; another one is another object."""
        ...

    def batch_at(self, index: int) -> int:
        """Return the number of the global batch that begins at an index of the loop."""
        ...

    def __len__(self) -> int:
        """Return the number of global batches in the whole loop."""
        ...


class Turns(Protocol):
    """The turns of one loop."""

    @property
    def current(self) -> tuple[int, list[int], Share]:
        """The current one, a micro-batch; another one is another object."""
        ...


class Share(Protocol):
    """What one micro-batch is within its global batch."""

    @property
    def micro(self) -> int:
        """Its number on this replica, from 0."""
        ...

    @property
    def num_valid(self) -> int:
        """How many of its samples are real, and not padding."""
        ...

    @property
    def global_batch_size(self) -> int:
        """Samples of all replicas in the global batch."""
        ...

    @property
    def is_step(self) -> bool:
        """Whether it completes the global batch."""
        ...
