"""What a job asks of a loader while it is looped over, and where its loops stand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from elasticrun.checkpoint.states.expected import COUNT, FLAG, Kind, check_values

# Where a loop stands: finished epochs and loops, and whether an epoch is running; of a
# loop inside another one's body also the outer index.
LoopKey = tuple[int, ...]

# How a loop ends: by itself, by `break`, by an exception in its body, or by one in what
# delivers it.
LoopEnd = Literal["over", "break", "exception", "failed"]

_PART = Kind("a number or a flag", lambda part: FLAG.fits(part) or COUNT.fits(part))
_EXPECTED = {"place": [_PART], "start": COUNT, "end": COUNT, "is_complete": FLAG}


class LoopStart(NamedTuple):
    """Where a loop begins.

    Attributes:
        epoch: The epochs that are finished.
        num_loops: The loops that are finished since the last epoch was.
        inside: What tells it from others in the same body; empty outside of loops.
        at: The index at which it goes on, 0 unless it was interrupted.
        offset: Of a loop over endless passes, where in these its index 0 is; None of
            one over a single pass.
    """

    epoch: int
    num_loops: int
    inside: tuple[int, ...]
    at: int
    offset: int | None


class MicroBatchInfo(NamedTuple):
    """A micro-batch's place in its global batch, the same in every batch of that size.

    Attributes:
        micro: Number of the micro-batch in this replica's local batch.
        num_valid: How many of its samples are real, and not padding.
        local_batch_size: Samples of this replica in the global batch.
        global_batch_size: Samples of all replicas in it.
        is_step: Whether the global batch is complete after this one.
        num_read: Samples that are read for it, padding included.
        advance: How far the index goes on after the global batch.
        weight: What a mean loss is multiplied with before replicas are averaged: the
            share of the samples in the global batch, times the number of shares.
        share: Of a virtual replica's share in the global batch, its number; -1 of
            padding for a process that has none.
    """

    micro: int
    num_valid: int
    local_batch_size: int
    global_batch_size: int
    is_step: bool
    num_read: int
    advance: int
    weight: float
    share: int = 0


class MicroBatch(NamedTuple):
    """What of a global batch a replica trains at once.

    Attributes:
        number: Of the global batch in the loop.
        indices: Of its samples in the data set, padding included.
        part: Its place in the global batch.
        places: Where each of its samples is in the global batch, if these are no
            neighbours.
    """

    number: int
    indices: Any
    part: MicroBatchInfo
    places: Sequence[int] = ()


# The indices, and what is delivered, of a global batch without a sample for a replica.
NOTHING: list[int] = []


class LoaderInLoop(Protocol):
    """A loader while it is looped over; `AdaptiveDataLoader` is one."""

    @property
    def name(self) -> str:
        """What checkpoints and messages call the loader."""

    @property
    def place_name(self) -> str:
        """What the position calls it."""

    @property
    def where(self) -> str:
        """Where the loop stands in the program, as "file.py:line"."""

    @property
    def num_samples(self) -> int:
        """Samples in the whole loop, over all replicas."""

    @property
    def batch_index(self) -> int:
        """Number of the current global batch within the loop."""

    @property
    def is_step(self) -> bool:
        """Whether this micro-batch completes a global batch."""

    @property
    def even_batches(self) -> bool:
        """Whether every replica takes part in every step."""

    @property
    def loss_weight(self) -> float:
        """What to multiply a mean loss with before replicas are averaged.

        Raises:
            ElasticRunError: There is more than one.
        """

    @property
    def has_one_weight(self) -> bool:
        """Whether all losses over its batches have that weight."""

    @property
    def planned_sizes(self) -> tuple[int, int]:
        """The planned size of this global batch, and the first size of the plan.

        Raises:
            ElasticRunError: There are several plans.
        """

    @property
    def running_loop(self) -> Loop:
        """The running loop over the loader: a new object for each loop."""

    def __len__(self) -> int:
        """Return the number of global batches in the whole loop."""


class Loop(Protocol):
    """One loop over a loader, with one iteration for each micro-batch."""

    @property
    def current(self) -> MicroBatch:
        """The current micro-batch: a new object each time, compared by identity."""

    @property
    def num_batches(self) -> int | None:
        """How many global batches it has, None if that is not known."""


class StepLoop:
    """A loop whose index counts steps: one without a loader, or one of somebody else's.

    Attributes:
        current: The step's number and what is trained in it: all of it, until a foreign
            loop takes micro-batches one by one.
    """

    even_batches = has_one_weight = True
    planned_sizes = (1, 1)

    def __init__(
        self, name: str, num_steps: int, where: str, *, world_size: int
    ) -> None:
        self.name = self.place_name = name
        self.num_samples = num_steps
        self.where = where
        # Each replica's part of a step counts as much as any other's.
        self._whole = MicroBatchInfo(
            0, 1, 1, world_size, True, 1, advance=1, weight=1.0
        )
        self.begin_step(0)

    def steps_from(self, step: int) -> Iterator[int]:
        """Yield the numbers of the steps from one on, at which the loop then is."""
        for number in range(step, self.num_samples):
            self.begin_step(number)
            yield number

    def begin_step(self, number: int) -> None:
        """Be at another step."""
        self.batch_index = number
        self.current = MicroBatch(number, [], self._whole)

    @property
    def running_loop(self) -> Loop:
        return self

    @property
    def num_batches(self) -> int | None:
        return self.num_samples

    @property
    def is_step(self) -> bool:
        return self.current.part.is_step

    @property
    def loss_weight(self) -> float:
        return self.current.part.weight

    def __len__(self) -> int:
        return self.num_samples


class Cursor:
    """Counts over all loops of one kind, and knows where the one at a place began.

    A loop that comes again at its place, after a restart or after an exception, begins
    where it did before; one at another place begins where the last one ended. So what
    is saved needs no more than the last place, and is right in the middle of a loop as
    well as after it.
    """

    def __init__(self) -> None:
        self.place: LoopKey = ()
        self.start = 0
        self.end = 0
        self.is_complete = False
        self._outer: object = None

    def begin(self, place: LoopKey) -> int:
        """Begin a loop at a place of the program; return the index it starts at."""
        if place != self.place:
            self.place, self.start = place, self.end
        self.end = self.start
        self.is_complete = False
        return self.start

    def begin_inside(self, place: LoopKey, outer: object) -> int:
        """Begin a loop in the body of another one; return the index it starts at.

        Several in one body follow each other. In a body that runs again, after an
        exception, they start where they did before.

        Args:
            outer: The loop whose body it is, which is another object each time.
        """
        if place != self.place:
            self.place, self.start = place, self.end
        elif outer is not self._outer:
            self.end = self.start
        self._outer = outer
        return self.end

    def leave(self, end: int, *, is_complete: bool) -> None:
        """Leave the loop; the next one begins at `end`."""
        self.end = end
        self.is_complete = is_complete

    def remember(self) -> Callable[[], None]:
        """Return what puts it back to where it is now."""
        return partial(vars(self).update, dict(vars(self)))

    def encode(self) -> dict[str, Any]:
        """Return the cursor as plain values for a checkpoint."""
        return {
            "place": list(self.place),
            "start": self.start,
            "end": self.end,
            "is_complete": self.is_complete,
        }

    def decode(self, values: Any, *, resume: LoopKey) -> None:
        """Take what `encode` returned.

        Args:
            resume: The place and the index at which the job goes on: what a body that
                runs again has moved is moved back.
        """
        check_values(values, _EXPECTED, name="place of a loop")
        self.place = tuple(values["place"])
        self.start, self.end = values["start"], values["end"]
        self.is_complete = values["is_complete"]
        if self.place == resume:
            self.end = self.start
