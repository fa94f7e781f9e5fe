"""`AdaptiveDataLoader`: its loops continue at the sample after a restart."""

from __future__ import annotations

import sys
import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader

from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.alike import check_alike, publish
from elasticrun.data.arguments import (
    check_dataset,
    check_seed,
    check_seed_each,
    check_sizes,
    keep_in_order,
)
from elasticrun.data.fingerprint import (
    Fingerprint,
    LoaderState,
    Run,
    decode_state,
    encode_state,
)
from elasticrun.data.loop import (
    Ending,
    LoopStart,
    RunningLoop,
    check_place,
    trace_batch,
)
from elasticrun.data.order.batches import Batches
from elasticrun.data.order.of_loader import (
    EveryPosition,
    ListedOrder,
    SampleOrder,
    check_sampler,
    checksum_of_batches,
    checksum_of_map,
)
from elasticrun.data.order.plan import (
    NOTHING,
    LoopPlan,
    MicroBatch,
    Part,
    Seeding,
    Shares,
    loop_key,
    passes_key,
)
from elasticrun.data.progress_bar import check_progress_bar, open_progress_bar
from elasticrun.data.workers.device import on_device
from elasticrun.data.workers.reader import BatchReader, Source
from elasticrun.errors import CheckpointError
from elasticrun.job.current import current_job
from elasticrun.job.epochs import whole_number
from elasticrun.job.job import Job
from elasticrun.job.leaving import describe, is_asked_by_for, is_left_on_purpose

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Sample = TypeVar("Sample", covariant=True, default=Any)
else:  # Python has defaults from 3.13 on, and has no use for them.
    Sample = typing.TypeVar("Sample", covariant=True)


class AdaptiveDataLoader(DataLoader[Sample]):
    """A DataLoader that resumes at the sample, at any world size.

    Each turn of a loop delivers this replica's part of a global batch, or of a
    micro-batch of it. The samples of global batch k depend on (seed, epoch, loop, k)
    alone. Other arguments are torch's (num_workers, collate_fn, pin_memory, timeout,
    worker_init_fn, multiprocessing_context, generator, prefetch_factor,
    persistent_workers); `in_order=False` is taken but batches keep their order, without
    which a position would mean nothing. Tensors of up to 128 KiB come from workers by
    value, not in shared memory.

    Collective: make and iterate it on every replica, in the same order.
    Replay: a loop that was finished before the restart yields nothing; the interrupted
    one continues at its index; the random generators come back then.

    Args:
        dataset: A map-style data set: it has `len` and takes an index (or, with
            `__getitems__`, a list of them).
        batch_size: Samples in a global batch, over all replicas; or a plan of it, from
            samples seen to size, as {0: 64, 100_000: 128}. Samples seen are those of
            the epochs before, and of the loop; with `batches`, of all passes.
        shuffle: Deliver each loop in an order of its own.
        seed: What orders and the random draws of workers depend on.
        drop_last: Leave out a last global batch that is not full.
        even_batches: Every replica takes part in every step: one without a sample of
            its own in a short batch gets a padding sample of weight 0. Without it (for
            evaluation) there is no padding, and a replica may see fewer batches.
        max_local_batch_size: Samples that fit into one forward pass; a larger local
            batch is cut into micro-batches, between which nothing is stepped.
        seed_each: "batch" seeds the random generators in DataLoader workers once a
            batch; "sample" before each sample, so that augmentation depends on neither
            world size nor worker count (and with `num_workers=0` too).
        sampler: The order to deliver in, as a map from position to index: something
            with a length and `__getitem__`, or `take`, which gets an array of positions
            and returns one of indices. `WeightedDraws`, `RandomWindows` and
            `LengthGroups` have another order in each loop.
        batch_sampler: Global batches of any sizes, as a map from a batch's number to
            its indices: something with a length and `__getitem__`. With `shuffle` they
            come in another order in each loop.
        device: Where to deliver the batches. A GPU gets the next one while the program
            computes with this one (`pin_memory=True` makes the copy a fast one); it
            counts as consumed when the program has used it.
        name: What the loader is called in checkpoints and messages; without one,
            loaders are known by the order in which the program makes them.
        progress: Show a tqdm bar on rank 0.

    Raises:
        ImportError: `progress` needs tqdm.
        TypeError: The data set or sampler cannot be read at a position.
        ValueError: An argument is out of range, or excludes another; or, when the first
            loop begins, other replicas have made the loader with other ones.
        LoopOrderError: It is made inside a loop, or unnamed inside an epoch.
        StateNameError: The name is taken.
        CheckpointError: The checkpoint's data set, batch size, shuffle or seed differ.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | Mapping[int, int] = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        even_batches: bool = True,
        max_local_batch_size: int | None = None,
        seed_each: Literal["batch", "sample"] = "batch",
        sampler: Any = None,
        batch_sampler: Any = None,
        device: torch.device | str | int | None = None,
        name: str | None = None,
        progress: bool = False,
        **dataloader_kwargs: Any,
    ) -> None:
        job = current_job()
        check_dataset(dataset)
        size, max_local_batch_size = check_sizes(batch_size, max_local_batch_size)
        check_sampler(
            sampler,
            batch_sampler,
            shuffle=shuffle,
            batch_size=batch_size,
            drop_last=drop_last,
        )
        seed = check_seed(seed)
        check_seed_each(seed_each)
        if progress:
            check_progress_bar()
        check_place(job, name)
        dataloader_kwargs["in_order"] = keep_in_order(dataloader_kwargs)
        super().__init__(
            dataset,
            sampler=EveryPosition(dataset) if sampler is None else sampler,
            **dataloader_kwargs,
        )
        self.seed = seed
        self.shuffle = bool(shuffle)
        self.seed_each = seed_each
        self.progress = progress
        self.device = None if device is None else torch.device(device)
        self._order: SampleOrder | ListedOrder
        if batch_sampler is not None:
            num_samples = job.samples_of(len(batch_sampler), 1)
            self._order = ListedOrder(batch_sampler, num_samples, shuffle=self.shuffle)
        else:
            length = len(dataset) if sampler is None else len(sampler)
            first_size = size if isinstance(size, int) else size.steps[0][1]
            num_samples = job.samples_of(length, first_size)
            self._order = SampleOrder(
                length,
                num_samples,
                size,
                shuffle=self.shuffle,
                drop_last=bool(drop_last),
                sampler=sampler,
            )
        self._shares = Shares(
            rank=job.rank,
            world_size=job.world_size,
            max_local_batch_size=max_local_batch_size,
            is_padded=bool(even_batches),
        )
        order = None
        if batch_sampler is not None:
            order = checksum_of_batches(batch_sampler)
        elif sampler is not None:
            order = checksum_of_map(sampler)
        fingerprint = Fingerprint(
            num_samples,
            size if isinstance(size, int) else size.encode(),
            self.shuffle,
            seed,
            bool(drop_last),
            order=order,
        )
        self.name = name if name is not None else f"loader-{job.num_loaders}"
        job.num_loaders += name is None
        self._state = LoaderState(name=name, default=self.name, fingerprint=fingerprint)
        job.register(self._state)
        made = {"even_batches": self._shares.is_padded, "seed_each": seed_each}
        self._made = fingerprint.encode() | made
        publish(job, self.name, self._made)
        self._is_compared = False
        # Set past torch's guard against changing them: torch itself was given none.
        is_one_size = batch_sampler is None and isinstance(size, int)
        object.__setattr__(self, "batch_size", size if is_one_size else None)
        object.__setattr__(self, "drop_last", bool(drop_last))
        self.running_loop = RunningLoop()
        self._left: tuple[int, Position] | None = None
        self._batch_reader = BatchReader(each_sample=seed_each == "sample")

    # What the loop body may ask.

    @property
    def index(self) -> int:
        """Samples of the loop consumed before this global batch, by all replicas.

        Batches, with `batch_sampler`.
        """
        loop = self.running_loop
        if loop.start is None:
            return 0
        batches = self._batches(loop.start)
        return batches.start(loop.current[0]) - batches.start(loop.first)

    @property
    def num_samples(self) -> int:
        """Samples in a whole loop, over all replicas; in one of `batches(n)`, in that.

        Batches, with `batch_sampler`. 0 in one of `batches()`, which has no end.
        """
        loop = self.running_loop
        if loop.start is None or loop.start.offset is None:
            batches = self._order.batches(current_job().progress.finished_epochs)
            return batches.start(len(batches))
        if loop.num_batches is None:
            return 0
        batches = self._batches(loop.start)
        return batches.start(loop.first + loop.num_batches) - loop.start.offset

    @property
    def batch_index(self) -> int:
        """Number of the current global batch within the loop."""
        return self.running_loop.current[0] - self.running_loop.first

    @property
    def first_batch(self) -> int:
        """Number of the global batch with which the next loop begins.

        Above 0 if that is the one to continue, as progress bars need to know:
        `tqdm(train, initial=train.first_batch)`.
        """
        progress = current_job().progress
        index = progress.next_index(self.name)
        cursor = self._state.cursor
        if cursor.place != progress.place:
            return self.batch_at(index)
        batches = self._order.endless_batches()
        first = batches.number_at(cursor.start)
        return batches.number_at(cursor.start + index) - first

    def batch_at(self, index: int) -> int:
        """Return the number of the global batch that begins at an index of a loop."""
        epoch = current_job().progress.finished_epochs
        return self._order.batches(epoch).number_at(index)

    @property
    def finished_batches(self) -> int:
        """Global batches that `batches` has delivered in the whole job, before this."""
        loop = self.running_loop
        if loop.start is not None and loop.start.offset is not None:
            return int(loop.current[0])
        return self._order.endless_batches().number_at(self._state.cursor.end)

    @property
    def global_batch_size(self) -> int:
        """Samples of all replicas in this global batch; before any, in a full one."""
        size = self.running_loop.part.global_batch_size
        return size or self._order.batches(0).size(0)

    @property
    def local_batch_size(self) -> int:
        """Samples of this replica in the current global batch, without padding."""
        return self.running_loop.part.local_batch_size

    @property
    def num_valid(self) -> int:
        """How many samples of the current micro-batch are real, and not padding."""
        return self.running_loop.part.num_valid

    @property
    def loss_weight(self) -> float:
        """What to multiply a mean loss with under a DDP or FSDP of the program's own.

        The share of this micro-batch in the global batch, times the world size, by
        which those divide. `AdaptiveDataParallel` does this by itself. 1.0 outside a
        loop.
        """
        part = self.running_loop.part
        if not part.global_batch_size:
            return 1.0
        return part.num_valid * self._shares.world_size / part.global_batch_size

    @property
    def is_step(self) -> bool:
        """Whether this micro-batch completes a global batch; True outside a loop."""
        return self.running_loop.part.is_step

    @property
    def is_first(self) -> bool:
        """Whether this micro-batch is its global batch's first; True outside a loop."""
        return self.running_loop.part.micro == 0

    @property
    def even_batches(self) -> bool:
        """Whether every replica takes part in every step, by padding if need be."""
        return self._shares.is_padded

    @property
    def where(self) -> str:
        """Where the running loop stands in the program, as "file.py:line"."""
        return self.running_loop.where

    def __len__(self) -> int:
        """Return the number of global batches in a whole loop, resumed or not."""
        return len(self._order.batches(current_job().progress.finished_epochs))

    # Loops.

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._deliver()

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
        self._order.endless_order(0)
        return NextBatches(self, current_job().turns_of(num_batches))

    def read(
        self, epoch: int, first_batch: int = 0, *, number: int = 0
    ) -> Iterator[tuple[Any, MicroBatch]]:
        """Read an epoch for a loop that elasticrun does not own; see `ForeignLoop`.

        Yields each of this replica's micro-batches with its share in the global batch,
        which `ForeignLoop.take` is given when the program comes to train with it; the
        program may read as far ahead as it likes. They are those of a loop over the
        loader, the `number`-th one of the epoch, from global batch `first_batch` on.
        Nothing here has a position or a boundary.

        Collective: of a loader, the first batch of all is asked for on every replica.

        Raises:
            ValueError: There is no such batch in the epoch.
        """
        epoch = whole_number(epoch, "read", "epochs")
        first_batch = whole_number(first_batch, "read", "batches")
        batches = self._order.batches(epoch, loop_key(self.seed, epoch, number))
        if first_batch > len(batches):
            raise ValueError(
                f"read(first_batch={first_batch}): an epoch of `{self.name}` has "
                f"{len(batches)} global batches."
            )
        at = batches.start(first_batch)
        start = LoopStart(epoch, number, (), at, None)
        loop = self._running("read", start, None)
        return self._read_ahead(loop)

    def _read_ahead(self, loop: RunningLoop) -> Iterator[tuple[Any, MicroBatch]]:
        self._compare(current_job())
        plan, batches = self._open(loop)
        in_flight = plan.in_flight
        try:
            for batch in batches:
                while in_flight[0][1] is NOTHING:
                    in_flight.popleft()
                yield batch, in_flight.popleft()
        finally:
            self._batch_reader.end(loop.reading)
            del batches

    def _deliver(
        self, num_batches: int | None = None, *, is_endless: bool = False
    ) -> Iterator[Any]:
        job = current_job()
        self._compare(job)
        start = self._begin(job, sys._getframe(1), is_endless=is_endless)
        if start is None:
            return
        ending: Ending = "failed"
        batches: Iterator[Any] = iter(())
        try:
            where = describe(sys._getframe(1))
            loop = self.running_loop = self._running(where, start, num_batches)
            plan, batches = self._read(job, loop)
            in_flight, trace, counter = plan.in_flight, job.trace, loop.counter
            reach = loop.reach
            for batch in batches:
                if in_flight[0][1] is NOTHING:
                    loop.pass_empty(in_flight)
                loop.current = in_flight.popleft()
                if trace is not None:
                    trace_batch(trace, loop)
                yield batch
                if job.loader is not self:
                    raise job.loops.overlap(self)
                part = loop.current[2]
                if part.is_step:
                    counter.advance(part.advance)
                    reach()
            loop.pass_empty(in_flight)
            ending = "over"
        except GeneratorExit:
            is_break = is_left_on_purpose(sys._getframe().f_back)
            ending = "break" if is_break else "exception"
            raise
        finally:
            try:
                self._batch_reader.end(self.running_loop.reading)
            finally:
                # An exception may keep this frame, and with it persistent workers; the
                # garbage collector takes 5 s to end each of them.
                del batches
                self._end(job, start, ending)
        if is_endless and not (start.inside or job.is_in_epoch):
            job.boundary.finish_epochs()

    def _compare(self, job: Job) -> None:
        """Raise, in the first loop, if other replicas have made another loader."""
        if not self._is_compared:
            check_alike(job, self.name, self._made)
            self._is_compared = True

    def _begin(
        self, job: Job, frame: FrameType, *, is_endless: bool
    ) -> LoopStart | None:
        """Begin a loop; return where, or None if it is to be skipped."""
        where = describe(frame)
        cursor = self._state.cursor
        if job.loader is not None:
            outer = job.loader.running_loop
            inside = job.begin_inside(self, where)
            body = job.progress.body
            offset = cursor.begin_inside(body, outer) if is_endless else None
            return LoopStart(body[0], body[1], inside, 0, offset)
        is_by_hand = not is_asked_by_for(frame)
        run = self._state.run if is_by_hand else None
        is_replaying = job.progress.is_replaying
        if (
            run
            and is_replaying
            and job.progress.place == (run.epoch, run.first, run.in_epoch)
        ):
            # It would be told as often as before that a pass is over; but who has just
            # been told so, and asks for the next pass, cannot be told again.
            job.progress.pass_loops(run.last)
        position = job.begin_loop(self, where)
        if position is None:
            return None
        self._state.run = _run_with(run, position) if is_by_hand else None
        offset = cursor.begin(position.place) if is_endless else None
        return LoopStart(*position.place[:2], (), position.index, offset)

    def _read(self, job: Job, loop: RunningLoop) -> tuple[LoopPlan, Iterator[Any]]:
        """Start to read a loop's batches, and enter it."""
        plan, batches = self._open(loop)
        if loop.start is not None and not loop.start.inside:
            bar = None
            if self.progress and job.rank == 0:
                first = plan.first_batch - loop.first
                bar = open_progress_bar(self.name, first, loop.num_batches)
            loop.enter(job, bar)
            job.continue_loop()
        return plan, batches

    def _open(self, loop: RunningLoop) -> tuple[LoopPlan, Iterator[Any]]:
        """Start to read a loop's batches."""
        start = loop.start
        assert start is not None
        source = self._batch_reader.source(self)
        key = self._key(start)
        plan = self._plan(loop, start, key, source)
        batches = self._batch_reader.start(self, source, plan, key)
        loop.reading = batches
        if self.device is not None:
            batches = on_device(batches, self.device)
        return plan, batches

    def _end(self, job: Job, start: LoopStart, ending: Ending) -> None:
        """Leave a loop."""
        loop, self.running_loop = self.running_loop, RunningLoop()
        behind = loop.part.advance if ending in ("break", "exception") else 0
        if start.offset is not None:
            end = start.offset + loop.counter.index + behind
            self._state.cursor.leave(end, is_complete=ending == "over")
        if start.inside:
            job.end_inside(self)
        else:
            if ending == "break":
                self._note_break(job, loop.part)
            job.end_loop(is_finished=ending in ("over", "break"))
        if loop.bar is not None:
            loop.bar.close()

    def _note_break(self, job: Job, part: Part) -> None:
        """Remember its place, for who asks for the state before another loop begins."""
        position = job.progress.position
        index = position.index + part.advance * part.is_step
        self._left = (job.progress.num_begun_loops, replace(position, index=index))

    def _key(self, start: LoopStart) -> int:
        if start.offset is None:
            return loop_key(self.seed, start.epoch, start.num_loops, start.inside)
        return passes_key(self.seed, self.name)

    def _batches(self, start: LoopStart, key: int = 0) -> Batches:
        """Return the batches of a loop; those of lists have sizes only with its key."""
        if start.offset is None:
            return self._order.batches(start.epoch, key)
        return self._order.endless_batches(key)

    def _running(
        self, where: str, start: LoopStart, num_batches: int | None
    ) -> RunningLoop:
        batches = self._batches(start)
        if start.offset is None:
            return RunningLoop(where, start, num_batches=len(batches))
        first = batches.number_at(start.offset)
        return RunningLoop(where, start, first=first, num_batches=num_batches)

    def _plan(
        self, loop: RunningLoop, start: LoopStart, key: int, source: Source
    ) -> LoopPlan:
        batches = self._batches(start, key)
        is_endless = start.offset is not None
        index = start.at + (start.offset or 0)
        if batches.start(batches.number_at(index)) != index:
            raise CheckpointError(
                f"`{self.name}` is to continue at sample {start.at} of "
                f"{self.num_samples}, which is not the beginning of a global batch of "
                f"{self.batch_size}. Give it the batch size that it had."
            )
        order = self._order
        end = None if loop.num_batches is None else loop.first + loop.num_batches
        return LoopPlan(
            batches,
            self._shares,
            order.endless_order(key) if is_endless else order.order(key),
            index=index,
            end=end,
            seeding=(
                Seeding(derive_seed(key, 2), self.seed_each == "sample")
                if source.is_seeded
                else None
            ),
            cut=source.cut,
        )

    # Checkpoints of one's own.

    def state_dict(self) -> dict[str, Any]:
        """Return position and fingerprint, for people who keep checkpoints themselves.

        In a loop's body the current batch counts as consumed once it is complete; after
        a `break` the place is that of the break, until another loop begins. Batches
        that workers have fetched ahead never count.
        """
        progress = current_job().progress
        position = progress.position
        index = None
        loop = self.running_loop
        if loop.start is not None and not loop.start.inside:
            index = position.index + loop.part.advance * loop.part.is_step
        elif self._left is not None and self._left[0] == progress.num_begun_loops:
            position = self._left[1]
            index = position.index
        elif position.loader == self.name:
            index = position.index
        return encode_state(self._state, position, index)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop continue where `state_dict` was taken, at any world size.

        Raises:
            CheckpointError: It is not such a state, or one of another data set, batch
                size, order or seed.
            LoopOrderError: A loop is running, or another loader is to be continued.
        """
        position = decode_state(state_dict, self._state, name=self.name)
        current_job().progress.resume_at(position)


def _run_with(run: Run | None, position: Position) -> Run:
    """Return the passes by hand of which this is the last."""
    epoch, loop, in_epoch = position.place
    new = Run(epoch, in_epoch, loop, loop)
    if run is None or run[:2] != new[:2]:
        return new
    # One follows the other if the program has just been told that that is over.
    follows = sys.exc_info()[0] is StopIteration or run.last == loop
    return run._replace(last=loop) if follows else new


class NextBatches:
    """The next global batches of a loader's endless passes; iterated once.

    Args:
        num_batches: How many; None without an end.
    """

    def __init__(
        self, loader: AdaptiveDataLoader[Any], num_batches: int | None
    ) -> None:
        self._loader = loader
        self._num_batches = num_batches

    def __len__(self) -> int:
        """Return how many there are, resumed or not."""
        if self._num_batches is None:
            raise TypeError("batches() without a number has no end, and no length.")
        return self._num_batches

    def __iter__(self) -> Iterator[Any]:
        return self._loader._deliver(self._num_batches, is_endless=True)


def current_dataloader() -> AdaptiveDataLoader | None:
    """Return the loader whose loop is running, or None."""
    loader = current_job().loader
    return loader if isinstance(loader, AdaptiveDataLoader) else None
