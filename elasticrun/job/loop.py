"""What a job, and a model that is trained in it, know of the loader looped over."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol


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
        """What to multiply a mean loss with before replicas are averaged.

        Raises:
            ElasticRunError: There is more than one.
        """
        ...

    @property
    def has_one_weight(self) -> bool:
        """Whether all losses over its batches have that weight."""
        ...

    @property
    def running_loop(self) -> Turns:
        """The running loop over the loader: a new object for each loop."""
        ...

    def batch_at(self, index: int) -> int:
        """Return the number of the global batch that begins at an index of the loop."""
        ...

    def __len__(self) -> int:
        """Return the number of global batches in the whole loop."""
        ...


class Turns(Protocol):
    """One loop over a loader, which turns once for each micro-batch."""

    @property
    def current(self) -> tuple[int, Any, Share]:
        """The current turn: its global batch's number, its indices, and its share.

        A new tuple for each turn, so that two turns are told apart by identity.
        """
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


class _Whole(NamedTuple):
    """A step of which each replica's part counts as much as any other's."""

    micro: int
    num_valid: int
    global_batch_size: int
    is_step: bool


class LoopOfSteps:
    """A loop whose index counts steps: one without a loader, or one of somebody else's.

    Attributes:
        current: The step's number and what is trained in it: all of it, until a foreign
            loop takes micro-batches one by one.
    """

    even_batches = has_one_weight = True

    def __init__(
        self, name: str, num_steps: int, where: str, *, step: int, world_size: int
    ) -> None:
        self.name = name
        self.num_samples = num_steps
        self.where = where
        self._world_size = world_size
        self._whole = _Whole(0, 1, world_size, is_step=True)
        self.begin_step(step)

    def begin_step(self, number: int) -> None:
        """Be at another step."""
        self.batch_index = number
        self.current: tuple[int, Any, Share] = (number, [], self._whole)

    @property
    def running_loop(self) -> Turns:
        return self

    @property
    def is_step(self) -> bool:
        return self.current[2].is_step

    @property
    def loss_weight(self) -> float:
        share = self.current[2]
        return share.num_valid * self._world_size / share.global_batch_size

    def batch_at(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return self.num_samples
