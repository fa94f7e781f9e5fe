"""The base class of all loaders: where their loops continue."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import FrameType
from typing import Any

from elasticrun.checkpoint.position import Position, unit_of
from elasticrun.data.autoscale import Autoscaler
from elasticrun.data.loader_state import (
    Fingerprint,
    LoaderState,
    check_same_on_replicas,
    passes_with,
)
from elasticrun.data.order.batches import Batches, SampleOrder, SizePlan
from elasticrun.data.order.plan import (
    RunningLoop,
    end_nothing,
    loop_key,
    passes_key,
)
from elasticrun.data.step_times import StepTimes
from elasticrun.data.streams.index import Contents
from elasticrun.errors import CheckpointError, LoopOrderError
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.loop import NOTHING, LoopEnd, LoopStart
from elasticrun.job.open_loop import OpenLoop, is_called_by_for_loop, iterate, line_of
from elasticrun.job.remaining import say_finished, whole_number
from elasticrun.job.trace import Trace
from elasticrun.job.virtual import VirtualReplicas
from elasticrun.replicas.exchange import loader_made


class ResumableLoader(ABC):
    """A loader whose loops have a place in the job's position.

    There are two kinds, `AdaptiveDataLoader` and `CombinedLoader`. Each says which
    batches its loops have, and how these are read (`_start`); all else is here.

    Args:
        name: What the loader is called; without one it is known by its number.
        plan: The sizes of its global batches; None of a loader of loaders.
        fingerprint: What a restart may not change.
        made: What else all replicas must give alike.
        progress: Whether rank 0 shows a bar.
        order: Is given other sizes of batches, where the job decides them.
        times: Of the steps of its loops, where batches have planned sizes.
    """

    def __init__(
        self,
        job: Job,
        *,
        name: str | None,
        seed: int,
        plan: SizePlan | None,
        fingerprint: Fingerprint,
        made: dict[str, Any],
        progress: bool,
        order: SampleOrder | None = None,
        times: StepTimes | None = None,
        contents: Contents = (),
    ) -> None:
        self.name = name if name is not None else f"loader-{job.num_loaders}"
        job.num_loaders += name is None
        self.seed = seed
        self.progress = progress
        self._state = LoaderState(
            name=name,
            default=self.name,
            fingerprint=fingerprint,
            plan=plan,
            order=order,
            times=times,
            contents=contents,
        )
        self._autoscaler: Autoscaler | None = None
        job.register(self._state)
        self._made = self._state.fingerprint | made
        job.exchange.report(loader_made(self.name), self._made)
        self._is_compared = False
        self.running_loop = RunningLoop()
        # Where `break` left its last loop, and how many loops had begun by then.
        self._left: tuple[int, Position] | None = None

    # What its kind says.

    @property
    @abstractmethod
    def even_batches(self) -> bool:
        """Whether every replica takes part in every step, by padding if need be."""

    @property
    @abstractmethod
    def has_one_weight(self) -> bool:
        """Whether all losses over its batches have that weight."""

    @property
    @abstractmethod
    def planned_sizes(self) -> tuple[int, int]:
        """The planned size of this global batch, and the first size of the plan."""

    @abstractmethod
    def _batches_in(self, epoch: int, key: int = 0) -> Batches:
        """Return the global batches of a loop over one pass, in an epoch."""

    @abstractmethod
    def _batches_of_passes(self, key: int = 0) -> Batches:
        """Return the global batches of passes without end."""

    @abstractmethod
    def _start(self, loop: RunningLoop) -> Iterator[Any]:
        """Start to read a loop's batches; return them as `delivered` does."""

    @abstractmethod
    def _trace(self, trace: Trace) -> None:
        """Write which micro-batch is delivered now."""

    @abstractmethod
    def _check_endless(self) -> None:
        """Refuse passes without end that deliver nothing."""

    @property
    def has_length(self) -> bool:
        """Whether it is known how many batches a loop has, before it ends."""
        return True

    @property
    def place_name(self) -> str:
        """What the position calls it: tells there what its index counts."""
        return self.name

    # What the loop body may ask.

    @property
    def where(self) -> str:
        """Where the running loop stands in the program, as "file.py:line"."""
        return self.running_loop.where

    @property
    def index(self) -> int:
        """Samples of the loop consumed before this global batch, by all replicas.

        Batches, with `batch_sampler` and of a `CombinedLoader`; slots, of streams of
        unknown lengths.
        """
        return self.running_loop.index

    @property
    def num_samples(self) -> int:
        """Samples in a whole loop, over all replicas; in one of `batches(n)`, in that.

        Batches, where `index` counts these. 0 in one of `batches()`, which has no end,
        and of streams of unknown lengths.
        """
        loop = self.running_loop
        if loop.start is None and self.has_length:
            batches = self.batches_of_epoch()
            return batches.start(len(batches))
        if loop.num_batches is None:
            return 0
        return loop.batches.start(loop.end) - loop.batches.start(loop.first)

    @property
    def batch_index(self) -> int:
        """Number of the current global batch within the loop."""
        return self.running_loop.current.number - self.running_loop.first

    @property
    def first_batch(self) -> int:
        """Number of the global batch with which the next loop begins.

        Above 0 if that is the one to continue, as progress bars need to know:
        `tqdm(train, initial=train.first_batch)`.
        """
        progress = current_job().progress
        index = progress.next_index(self.place_name)
        cursor = self._state.cursor
        if cursor.place != progress.place:
            batches = self.batches_of_epoch()
            number = batches.number_at(index)
            # Of unknown lengths, a batch's first slots may have been delivered before.
            is_within = not self.has_length and batches.start(number) != index
            return number - is_within
        batches = self._batches_of_passes()
        first = batches.number_at(cursor.start)
        return batches.number_at(cursor.start + index) - first

    @property
    def finished_batches(self) -> int:
        """Global batches that `batches` has delivered in the whole job, before this."""
        if self.running_loop.is_endless:
            return int(self.running_loop.current.number)
        return self._batches_of_passes().number_at(self._state.cursor.end)

    @property
    def loss_weight(self) -> float:
        """What to multiply a mean loss with under a DDP or FSDP of the program's own.

        The share of this micro-batch in the global batch, times the world size, by
        which those divide. `AdaptiveDataParallel` does this by itself. 1.0 outside a
        loop.
        """
        return self.running_loop.current.part.weight

    @property
    def is_step(self) -> bool:
        """Whether this micro-batch completes a global batch; True outside a loop."""
        return self.running_loop.current.part.is_step

    @property
    def is_first(self) -> bool:
        """Whether this micro-batch is its global batch's first; True outside a loop."""
        return self.running_loop.current.part.micro == 0

    def __len__(self) -> int:
        """Return the number of global batches in a whole loop, resumed or not."""
        return len(self.batches_of_epoch())

    def batches_of_epoch(self) -> Batches:
        """Return the global batches of a loop over all data, in the running epoch."""
        return self._batches_in(current_job().progress.finished_epochs)

    # Loops.

    def __iter__(self) -> Iterator[Any]:
        return iterate(partial(self._begin, None, False))

    def enumerate(self) -> Iterator[tuple[int, Any]]:
        """Yield (number of the global batch in the loop, batch), resumed or not."""
        for batch in self:
            yield self.batch_index, batch

    def batches(self, num_batches: int | None = None) -> NextBatches:
        """Return the next global batches of passes over the data that never end.

        For programs that count steps, and not epochs. Each pass has an order of its
        own; batches lie across the ends of passes, or with `drop_last` each pass ends
        with its last full batch. The loader remembers how many batches it has
        delivered so in the whole job (`finished_batches`), and goes on from there.

            for x, y in train.batches(100_000):
                ...

        Collective: iterate it on every replica.
        Replay: as a loop over the loader. Outside of epochs, the end of the loop writes
        a checkpoint.

        Args:
            num_batches: How many; without a number, the loop ends by `break`.

        Raises:
            ValueError: The number is below 0, or no pass would deliver anything.
        """
        if num_batches is not None:
            num_batches = whole_number(num_batches, "batches", "global batches")
        self._check_endless()
        return NextBatches(self, current_job().limit_steps(num_batches))

    def _compare(self, job: Job) -> None:
        """Raise, in the first loop, if other replicas have made another loader."""
        if job.world_size > 1 and not self._is_compared:
            check_same_on_replicas(job, self.name, self._made)
            self._is_compared = True

    def _begin(
        self, num_batches: int | None, is_endless: bool, frame: FrameType
    ) -> OpenLoop | None:
        """Begin a loop that a frame asks for; return None if it is to be skipped."""
        job = current_job()
        self._compare(job)
        where = line_of(frame)
        self._check_free(where)
        state, offset = self._state, None
        cursor = state.cursor if is_endless else None

        if job.loader is None:
            # A loop of its own: it has a place in the job's position, and was finished
            # before the restart, goes on where that stopped, or is new.
            is_by_hand = not is_called_by_for_loop(frame)
            if is_by_hand and state.run is not None:
                state.run.skip(job.progress)
            position = job.begin_loop(self, where)
            if position is None:
                if num_batches is not None:
                    say_finished(job, f"batches({num_batches}) of `{self.name}`")
                return None
            state.run = passes_with(state.run, position) if is_by_hand else None
            if cursor is not None:
                offset = cursor.begin(position.place)
            epoch, num_loops = position.finished_epochs, position.finished_loops
            start = LoopStart(epoch, num_loops, (), position.index, offset)
        else:
            # In the body of another loop it belongs to that one's batch: it always
            # begins anew, and its order depends on the place of that batch.
            self.refuse_autoscale("its loop began in the body of another one")
            outer = job.loader.running_loop
            inside = job.begin_inside(self, where)
            body = job.progress.body
            if cursor is not None:
                offset = cursor.begin_inside(body, outer)
            start = LoopStart(body[0], body[1], inside, 0, offset)

        return OpenLoop(
            job,
            self,
            start,
            cursor=cursor,
            read=lambda: self._read_loop(job, where, start, num_batches),
            stop=self._stop_loop,
            times=state.times if job.boundary.decides else None,
        )

    def _check_free(self, where: str) -> None:
        """Refuse to loop over what is being looped over as part of another loop."""
        loop = self.running_loop
        if loop.part_of:
            raise LoopOrderError(
                f"a loop over `{self.name}` ({where}) began while that over "
                f"`{loop.part_of}` ({loop.where}), of which it is a member, goes on. A "
                "loader is at one place at a time. Leave that loop first, or make "
                "another loader."
            )

    def _running(
        self, where: str, start: LoopStart, num_batches: int | None
    ) -> RunningLoop:
        offset = start.offset
        if offset is None:
            key = loop_key(self.seed, start.epoch, start.num_loops, start.inside)
            batches = self._batches_in(start.epoch, key)
            num_batches = len(batches) if self.has_length else None
        else:
            key = passes_key(self.seed, self.name)
            batches = self._batches_of_passes(key)
        at = (offset or 0) + start.at
        begin = batches.number_at(at)
        if batches.start(begin) != at and not self.has_length:
            begin -= 1  # Of its slots the first ones were delivered before.
        elif batches.start(begin) != at:
            raise CheckpointError(
                f"`{self.name}` should continue at {unit_of(self.place_name)} "
                f"{start.at} of {batches.start(len(batches))}, where no global batch "
                "begins. Give it the batch size that it had."
            )
        return RunningLoop(
            where,
            start,
            batches,
            first=batches.number_at(offset or 0),
            begin=begin,
            num_batches=num_batches,
            key=key,
        )

    def _read_loop(
        self, job: Job, where: str, start: LoopStart, num_batches: int | None
    ) -> Iterator[Any]:
        """Start to read a loop that has begun."""
        loop = self.running_loop = self._running(where, start, num_batches)
        autoscaler = self._autoscaler
        if autoscaler is None:
            batches = self._start(loop)
        else:
            autoscaler.begin_loop(start)
            batches = self._autoscaled(loop)
        # What few jobs ask for lies around the batches.
        if job.virtual is not None:
            batches = _by_share(job.virtual, loop, batches)
        if job.trace is not None:
            batches = self._traced(job.trace, batches)
        if self.progress and job.rank == 0 and not start.inside:
            batches = _with_bar(self.name, loop, batches)
        return batches

    def _autoscaled(self, loop: RunningLoop) -> Iterator[Any]:
        """Yield a loop's batches; after another size was decided, read on with that."""
        assert loop.start is not None
        while True:
            sizes = self._state.sizes
            for batch in self._start(loop):
                yield batch
                if loop.current.part.is_step and self._state.sizes != sizes:
                    break
            else:
                return
            # The size holds from the boundary on that was just passed: what was read
            # ahead is dropped, and the loop goes on behind its current batch.
            loop.end_reading()
            at = loop.batches.start(loop.current.number + 1)
            if loop.is_endless:
                loop.batches = self._batches_of_passes(loop.key)
            else:
                loop.batches = self._batches_in(loop.start.epoch, loop.key)
                loop.num_batches = len(loop.batches)
            loop.begin = loop.batches.number_at(at)

    def refuse_autoscale(self, why: str) -> None:
        """Refuse a loop in which batch sizes cannot change.

        Raises:
            LoopOrderError: They are to, by `autoscale`.
        """
        if self._autoscaler is not None:
            raise LoopOrderError(
                f"`{self.name}` decides its batch sizes itself (autoscale), but {why}. "
                "They change at boundaries of its own loops only. Leave autoscale out, "
                "or give it a plan of sizes, as batch_size={0: 64, 100_000: 128}."
            )

    def _traced(self, trace: Trace, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if batch is not NOTHING:
                self._trace(trace)
            yield batch

    def _stop(self) -> None:
        """End what reads the running loop's batches."""
        loop = self.running_loop
        loop.end_reading()
        loop.end_reading = end_nothing  # Models know the loop for longer.

    def _stop_loop(self, ending: LoopEnd) -> None:
        """End what reads the running loop."""
        if ending == "break" and (position := self._position_in_loop()) is not None:
            # Where that was is what `state_dict` says until another loop begins.
            self._left = (current_job().progress.num_begun_loops, position)
        try:
            self._stop()
        finally:
            self.running_loop = RunningLoop()

    def _position_in_loop(self) -> Position | None:
        """Return where the running loop is once its batch is complete, if it has one.

        A loop in the body of another one has no position.
        """
        loop = self.running_loop
        if loop.start is None or loop.start.inside:
            return None
        position, part = current_job().progress.position, loop.current.part
        return replace(position, index=position.index + part.advance * part.is_step)

    # Checkpoints of one's own.

    def state_dict(self) -> dict[str, Any]:
        """Return position and fingerprint, for people who keep checkpoints themselves.

        In a loop's body the current batch counts as consumed once it is complete; after
        a `break` the place is that of the break, until another loop begins. Batches
        that workers have fetched ahead never count.

        Raises:
            LoopOrderError: A combined loader is looped over of which it is a member.
        """
        if self.running_loop.part_of:
            raise LoopOrderError(
                f"`{self.name}` has no place of its own in the loop over "
                f"`{self.running_loop.part_of}`. Take that loader's state_dict()."
            )
        progress = current_job().progress
        position = self._position_in_loop()
        if position is None and self._left is not None:
            num_begun, left = self._left
            position = left if num_begun == progress.num_begun_loops else None
        if position is not None:
            return self._state.encode(position, position.index)
        position = progress.position
        is_own = position.loader == self.place_name
        return self._state.encode(position, position.index if is_own else None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop continue where `state_dict` was taken, at any world size.

        Raises:
            CheckpointError: It is not such a state, or one of another data set, batch
                size, order or seed.
            LoopOrderError: A loop is running, or another loader is to be continued.
        """
        position, cursor = self._state.decode(state_dict)
        if position.loader:
            position = replace(position, loader=self.place_name)
        batches = self._batches_in(position.finished_epochs)
        end = batches.start(len(batches))
        if position.index > end and cursor.place != position.place:
            raise CheckpointError(
                f"the state of `{self.name}` is at {unit_of(self.place_name)} "
                f"{position.index}, but a loop has {end}. It was not written by this "
                "loader."
            )
        current_job().progress.resume_at(position)
        self._state.cursor = cursor


class NextBatches:
    """The next global batches of a loader's endless passes; iterated once."""

    def __init__(self, loader: ResumableLoader, num_batches: int | None) -> None:
        self._loader = loader
        self._num_batches = num_batches

    def __len__(self) -> int:
        """Return how many there are, resumed or not."""
        if self._num_batches is None:
            raise TypeError(
                "batches() without a number never ends, so it has no length."
            )
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return iterate(partial(self._loader._begin, self._num_batches, True))


def _by_share(
    virtual: VirtualReplicas, loop: RunningLoop, batches: Iterator[Any]
) -> Iterator[Any]:
    """Yield the batches, each when what the body draws depends on its share alone."""
    for batch in batches:
        virtual.begin_share(loop.key, loop.current)
        yield batch


def _with_bar(name: str, loop: RunningLoop, batches: Iterator[Any]) -> Iterator[Any]:
    """Yield the batches, and show a bar that begins where the loop does."""
    from tqdm.auto import tqdm

    with tqdm(
        total=loop.num_batches,
        initial=loop.begin - loop.first,
        desc=name,
        unit="batch",
    ) as bar:
        for batch in batches:
            try:
                yield batch
            finally:  # Also if the loop ends with it.
                bar.total = loop.num_batches  # Which sizes that are decided change.
                bar.update(loop.current.part.is_step)
