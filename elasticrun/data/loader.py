"""`AdaptiveDataLoader`: a DataLoader whose loops resume at the next sample.

What is counted, of a loop over N samples in global batches of size B, on W replicas:

index     samples of the loop that all replicas have consumed, from 0 to N; it is in
          checkpoints (of one's own lists it counts batches)
number    k, of a global batch: it begins at index start(k), which is kB, and has
          size(k) samples, B or what is left (order/batches.py)
position  p, in the loop's order, which gives each an index of the data set, a sample:
          batch k has the positions from start(k) to start(k + 1) (order/plan.py)
place     of a sample in its batch: p - start(k)
share     the places of a batch that are one replica's: a run of size(k) / W, up or
          down; the replica's local batch (order/shares.py)
micro     the number of a micro-batch: a share is cut if it is above
          max_local_batch_size, and all replicas have equally many
lane      of streams, each position is in one; lane l is read by replica l mod W, so
          that is what a share is there (order/lanes.py)
"""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils.data import DataLoader, IterableDataset

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.data.arguments import (
    check_dataset,
    check_in_order,
    check_made_again,
    check_progress_bar,
    check_seed,
    check_seed_each,
    check_sizes,
    refuse_virtual,
)
from elasticrun.data.autoscale import Autoscaler
from elasticrun.data.order.batches import (
    Batches,
    ListedOrder,
    SampleOrder,
    SizedBatches,
)
from elasticrun.data.order.lanes import DealtLanes
from elasticrun.data.order.maps import NoBatchSampler, as_map, check_sampler
from elasticrun.data.order.plan import (
    NO_BATCH,
    LoopPlan,
    RunningLoop,
    Seeding,
    delivered,
)
from elasticrun.data.order.shares import (
    BatchSplit,
    CountsForNoise,
    EvenShares,
    LaneShares,
    MicroBatchCounts,
)
from elasticrun.data.resumable import ResumableLoader
from elasticrun.data.step_times import StepTimes
from elasticrun.data.streams.in_lanes import InLanes, lanes_of
from elasticrun.data.streams.mixed import Mixed
from elasticrun.data.streams.uncounted import Uncounted, need_lengths, with_lanes
from elasticrun.data.streams.uncounted_batches import (
    Delivery,
    all_batches,
)
from elasticrun.data.workers.changes import Seen, changed, seen
from elasticrun.data.workers.device import is_read_ahead, moved, on_device
from elasticrun.data.workers.lanes import reader_of_lanes
from elasticrun.data.workers.reader import BatchReader, reader_of
from elasticrun.job.current import current_job
from elasticrun.job.loop import NOTHING, LoopStart, MicroBatch
from elasticrun.job.remaining import whole_number
from elasticrun.job.trace import Trace
from elasticrun.logger import Logger

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    Sample = TypeVar("Sample", covariant=True, default=Any)
else:  # Python has defaults from 3.13 on, and has no use for them.
    Sample = typing.TypeVar("Sample", covariant=True)


logger = Logger(__name__)


class AdaptiveDataLoader(ResumableLoader, DataLoader[Sample]):  # type: ignore[misc]
    """A DataLoader that resumes at the sample, at any world size.

    Each iteration delivers this replica's part of a global batch, or a micro-batch of
    it. The samples of global batch k depend on (seed, epoch, loop, k) alone. Other
    arguments are torch's (num_workers, collate_fn, pin_memory, timeout,
    worker_init_fn, multiprocessing_context, generator, prefetch_factor,
    persistent_workers); `in_order=False` is accepted, but batches keep their order.
    Tensors of up to 128 KiB come from workers by value, not in shared memory.

    Collective: make and iterate it on every replica, in the same order.
    Replay: a loop that was finished before the restart yields nothing; the interrupted
    one continues at its index; the random generators come back then.

    Args:
        dataset: A map-style data set: it has `len` and takes an index (or, with
            `__getitems__`, a list of them). Or one that is read in streams: `Streams`,
            `Mixed`, an `IterableDataset` of torch's or of Hugging Face's.
        batch_size: Samples in a global batch, over all replicas. Or a plan from samples
            seen to size, for example {0: 64, 100_000: 128}. Samples seen are those of
            the epochs before and of the loop; with `batches`, of all passes.
        shuffle: Deliver each loop in another order.
        seed: What orders and the random draws of workers depend on.
        drop_last: Leave out a last global batch that is not full.
        even_batches: Every replica takes part in every step. One without a sample in a
            short batch gets a padding sample of weight 0. With False (for evaluation)
            there is no padding, and a replica may see fewer batches.
        max_local_batch_size: The most samples in one forward pass. A larger share of a
            batch is cut into micro-batches, and optimizers step after the last one.
        seed_each: "batch" seeds the random generators in DataLoader workers once a
            batch; "sample" before each sample, so that augmentation depends on neither
            world size nor worker count (and with `num_workers=0` too).
        sampler: The order to deliver in: a list or an array of indices, which is read
            now; or something with a length and `take`, which gets an array of positions
            and returns one of indices. `WeightedDraws`, `RandomWindows` and
            `LengthGroups` have another order in each loop.
        batch_sampler: Global batches of any sizes, as a map from a batch's number to
            its indices: something with a length and `__getitem__`. With `shuffle` they
            come in another order in each loop. An empty one is a step of padding.
        device: Where to deliver the batches. A GPU gets the next one while the program
            computes with this one (`pin_memory=True` makes the copy a fast one); it
            counts as consumed when the program has used it. What reading draws is
            seeded by batch then, also without workers.
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
        # Look at all that was given, before anything is made of it.
        job = current_job()
        self.shuffle, drop_last = bool(shuffle), bool(drop_last)
        if isinstance(dataset, (InLanes, IterableDataset)):
            dataset = with_lanes(dataset)
        if not isinstance(dataset, Uncounted):
            check_dataset(dataset)
        plan, max_local_batch_size = check_sizes(batch_size, max_local_batch_size)
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
        check_made_again(job, name)
        check_in_order(dataloader_kwargs.pop("in_order", True))

        # Torch is told how samples are read, but of no batches: its own batch sampler
        # could not begin in the middle.
        DataLoader.__init__(self, dataset, sampler=sampler, **dataloader_kwargs)
        self.seed_each = seed_each
        self.device = None if device is None else torch.device(device)
        self._is_ahead = is_read_ahead(self.device)

        # How a global batch is shared out. Streams are shared out by their lanes.
        num_virtual = None if job.virtual is None else job.virtual.number
        self.shares = BatchSplit(
            rank=job.rank,
            world_size=job.world_size,
            max_local_batch_size=max_local_batch_size,
            is_padded=bool(even_batches),
            num_virtual=num_virtual,
        )
        self._lanes: DealtLanes | None = None
        if isinstance(dataset, InLanes):
            if num_virtual is not None:  # A share would wait for all lanes of a batch.
                need_lengths(dataset, "a job with virtual_replicas")
            if len(plan) > 1:  # It counts the samples of epochs before.
                need_lengths(dataset, "a plan of batch sizes")
            if drop_last:
                need_lengths(dataset, "drop_last=True")
            self._lanes = lanes_of(
                dataset,
                sampler,
                batch_sampler,
                shuffle=self.shuffle,
                rank=job.rank,
                world_size=job.world_size,
                num_shares=self.shares.num_shares,
            )

        # The order of a loop's samples, and its global batches: lists of the user's
        # own, or what a plan of sizes cuts from the order.
        by_size: SampleOrder | None = None
        self._order: SampleOrder | ListedOrder
        if batch_sampler is not None:
            num_batches = job.samples_of(len(batch_sampler), 1)
            self._order = ListedOrder(batch_sampler, num_batches, shuffle=self.shuffle)
        else:
            ordered: Any = dataset if self._lanes is None else self._lanes
            if sampler is not None:
                ordered = sampler = as_map(sampler)
            length = len(ordered)
            self._order = by_size = SampleOrder(
                length,
                job.samples_of(length, plan[0][1]),
                plan,
                shuffle=self.shuffle,
                drop_last=drop_last,
                sampler=sampler,
                lanes=self._lanes,
            )

        # A state of the job, which loads what the checkpoint has of it now.
        ResumableLoader.__init__(
            self,
            job,
            name=name,
            seed=seed,
            plan=plan,
            fingerprint={
                "num_samples": self._order.num_samples,
                "shuffle": self.shuffle,
                "seed": seed,
                "drop_last": drop_last,
                "order": self._order.checksum,
            },
            contents=dataset.contents if isinstance(dataset, InLanes) else (),
            made={
                "even_batches": self.shares.is_padded,
                "seed_each": seed_each,
                "virtual_replicas": num_virtual,
                "the beginning of the data": (
                    dataset.beginning if isinstance(dataset, InLanes) else ""
                ),
            },
            progress=progress,
            order=by_size,
            times=None if by_size is None else StepTimes(job, max_local_batch_size),
        )

        # Others ask a DataLoader for these. Torch was given none, and guards them
        # against being set.
        is_one_size = batch_sampler is None and len(plan) == 1
        object.__setattr__(self, "batch_size", plan[0][1] if is_one_size else None)
        object.__setattr__(self, "drop_last", drop_last)
        object.__setattr__(self, "batch_sampler", NoBatchSampler())

        # Workers that outlive a loop, and what they have copies of.
        self._persistent: BatchReader | None = None
        self._copied = Seen()
        self._has_told_of_change = False

    # What the loop body may ask, beside what `ResumableLoader` says.

    has_one_weight = True

    def __len__(self) -> int:
        """Return the number of global batches in a whole loop, resumed or not."""
        need_lengths(self.dataset, "len() of a loader")
        return super().__len__()

    @property
    def has_length(self) -> bool:
        return not isinstance(self.dataset, Uncounted)

    @property
    def global_batch_size(self) -> int:
        """Samples of all replicas in this global batch; before any, in a full one."""
        current = self.running_loop.current
        if current is NO_BATCH:
            return self._order.batches(0).size(0)
        return current.part.global_batch_size

    @property
    def planned_sizes(self) -> tuple[int, int]:
        """The planned size of this global batch, and the first size of the plan.

        The last batch of a loop may be smaller. (1, 1) with `batch_sampler`.
        """
        batches = self.running_loop.batches
        if not isinstance(batches, SizedBatches):
            return 1, 1
        number = self.running_loop.current.number
        return batches.planned_size(number), batches.plan[0][1]

    @property
    def local_batch_size(self) -> int:
        """Samples of this replica in the current global batch, without padding."""
        return self.running_loop.current.part.local_batch_size

    @property
    def num_valid(self) -> int:
        """How many samples of the current micro-batch are real, and not padding."""
        return self.running_loop.current.part.num_valid

    @property
    def sources(self) -> list[Any]:
        """The key of the source of each sample of the current micro-batch, of `Mixed`.

        Raises:
            TypeError: The data set is no `Mixed`.
        """
        if not isinstance(self.dataset, Mixed):
            raise TypeError(f"`{self.name}` reads no Mixed, whose sources have keys.")
        indices = self.running_loop.current.indices
        return [self.dataset.source_of(index) for index in indices]

    @property
    def even_batches(self) -> bool:
        """Whether every replica takes part in every step, by padding if need be."""
        return self.shares.is_padded

    # Batch sizes that the job decides.

    def autoscale(self, max_batch_size: int, *, min_efficiency: float = 0.9) -> None:
        """Let the job decide how large global batches are, by noise and time.

        Where a checkpoint is due, rank 0 takes the size with which the training comes
        furthest in a second: throughput, by a model of the step's time that is fitted
        to the steps so far, times what a sample is worth in a batch of that size, by
        the noise of gradients (goodput; Qiao et al. 2021, Pollux). It lies between
        `batch_size` and `max_batch_size`, and at most twice above the size until then;
        a change must promise 5 %. The decision is written into that checkpoint, and is
        used, from the same boundary on, only once that is committed.

        So batches are a function of (seed, epoch, loop, number, recorded plan).
        `elasticrun checkpoints show` prints that plan, which another job can be given
        as `batch_size`. `len(loader)` follows it. Without checkpoints nothing changes.
        Learning rates follow with `AdaptiveDataParallel(..., scaling="auto")`.

        Collective: call it on every replica, once, before the first loop.
        Replay: called again in each generation; sizes that were decided hold.

        Args:
            max_batch_size: The most samples in a global batch.
            min_efficiency: The least that a sample may be worth, of one in a batch of
                the first size: with 0.9, training takes at most about 1 / 0.9 of the
                samples. With 0, time alone counts.

        Raises:
            ValueError: The largest size is below the first, or `min_efficiency` not
                from 0 to 1; or sizes follow a plan
                already, or from `batch_sampler`; or `drop_last` is set.
            ElasticRunError: Another loader has called it; or, when a loop begins, not
                exactly one model measures its noise.
            LoopOrderError: When a loop begins: it is in another one's body, or the
                second over the same samples; or the loader is a member of another one.
        """
        job = current_job()
        if job.virtual is not None:
            refuse_virtual("autoscale, which decides by measured times,")
        need_lengths(self.dataset, "autoscale")
        self._autoscaler = Autoscaler(
            job, self._state, max_batch_size, min_efficiency=min_efficiency
        )
        job.boundary.decide_by(self._autoscaler.decide)
        object.__setattr__(self, "batch_size", None)  # As with any plan.

    # Loops that others own.

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
        if current_job().virtual is not None:
            refuse_virtual("a loop that somebody else owns")
        self.refuse_autoscale("it is read for a loop that somebody else owns")
        need_lengths(self.dataset, "a loop that somebody else owns")
        epoch = whole_number(epoch, "read", "epochs")
        first_batch = whole_number(first_batch, "read", "batches")
        batches = self._order.batches(epoch)
        if first_batch > len(batches):
            raise ValueError(
                f"read(first_batch={first_batch}): an epoch of `{self.name}` has "
                f"{len(batches)} global batches."
            )
        start = LoopStart(epoch, number, (), batches.start(first_batch), None)
        return self._for_others(self._running("read", start, None))

    def _for_others(self, loop: RunningLoop) -> Iterator[tuple[Any, MicroBatch]]:
        self._compare(current_job())
        batches = self._start(loop)
        try:
            for batch in batches:
                if batch is not NOTHING:
                    yield batch, loop.current
        finally:
            loop.end_reading()
            del batches

    # How loops are read.

    def _batches_in(self, epoch: int, key: int = 0) -> Batches:
        return self._order.batches(epoch, key)

    def _batches_of_passes(self, key: int = 0) -> Batches:
        return self._order.endless_batches(key)

    def _start(self, loop: RunningLoop) -> Iterator[Any]:
        dataset, order = self.dataset, self._order
        if isinstance(dataset, InLanes) and not (dataset.has_end or loop.is_endless):
            raise ValueError(
                f"a loop over `{self.name}` would never end, since "
                f"{type(dataset).__name__} has no end. Loop over its batches(n), in "
                "each epoch if you want epochs; or give a Mixed num_samples."
            )
        by_key = order.endless_order if loop.is_endless else order.order
        loop.order = by_key(loop.key)
        cuts = None
        if current_job().cuts_for_noise():
            cuts = CountsForNoise(loop.batches, self._shares_of(loop))
        return self._read(loop, cuts)

    def _shares_of(
        self, loop: RunningLoop, cuts: MicroBatchCounts | None = None
    ) -> EvenShares | LaneShares:
        """Return what this replica reads of each global batch of a loop."""
        if self._lanes is None:
            return EvenShares(loop.batches, self.shares, cuts)
        lanes: Any = loop.order  # A `LanesOrder`.
        return LaneShares(loop.batches, self.shares, cuts, lanes)

    def _read(self, loop: RunningLoop, cuts: MicroBatchCounts | None) -> Iterator[Any]:
        """Start to read a loop's batches.

        Args:
            cuts: Of the batches, if they do not follow from their sizes alone.
        """
        # The plan says what this replica is to read, in which order; the reader reads
        # it, here or in workers; and each batch is handed out when it has become the
        # loop's current one.
        assert loop.order is not None
        reader = self._reader()
        seeding = None
        if reader.is_seeded:
            each_sample = self.seed_each == "sample" or reader.names_lanes
            seeding = Seeding(derive_seed(loop.key, 2), each_sample)
        is_uncounted = isinstance(self.dataset, Uncounted)
        plan = LoopPlan(
            loop.batches,
            self._shares_of(loop, cuts),
            loop.order,
            first=loop.begin,
            end=loop.end,
            seeding=seeding,
            split=reader.split,
            names_lanes=reader.names_lanes,
            asks_for_nothing=is_uncounted,
        )
        batches = reader.start(plan, loop.key)
        loop.end_reading = partial(reader.end, batches)
        if is_uncounted:
            return self._read_uncounted(loop, plan, batches)
        if self.device is not None:
            batches = on_device(batches, self.device, is_ahead=self._is_ahead)
        return delivered(loop, plan.in_flight, batches)

    def _read_uncounted(
        self, loop: RunningLoop, plan: LoopPlan, batches: Iterator[Any]
    ) -> Iterator[Any]:
        """Deliver the batches of streams that nobody has counted."""
        streams: Any = self.dataset

        def padding() -> Any:
            batch = self.collate_fn([streams.padding()])
            return batch if self.device is None else moved(batch, self.device)

        how = Delivery(self.shares, streams.lanes.num_lanes, padding)
        if self.device is not None:
            batches = on_device(batches, self.device, is_ahead=self._is_ahead)
        return all_batches(loop, plan.in_flight, batches, how)

    def _reader(self) -> BatchReader:
        """Return what reads the next loop, by the workers of the last one if it can."""
        if not self.persistent_workers:
            return self._new_reader()
        # Workers have a copy of the data set. After a restart they would have one of
        # what it is then, so they are made anew once it has changed.
        copied = ("dataset", "collate_fn", "worker_init_fn")
        now = seen(**{name: getattr(self, name) for name in copied})
        if self._persistent is not None:
            path = changed(self._copied, now)
            if path is None:
                return self._persistent
            if not self._has_told_of_change and current_job().rank == 0:
                logger.warning(
                    "%s has changed since the workers of `%s` began, which have a copy "
                    "of it: they are made anew, as at each loop before which something "
                    "changes, so persistent_workers=True may save nothing here",
                    path,
                    self.name,
                )
            self._has_told_of_change = True
            self._persistent = None  # Which ends them.
        self._persistent, self._copied = self._new_reader(), now
        return self._persistent

    def _new_reader(self) -> BatchReader:
        # What is read before the program asks for it must not draw on the program's own
        # generators: they would be ahead in the checkpoint of the batch before.
        has_virtual = self.shares.num_virtual is not None
        is_seeded = self.seed_each == "sample" or self._is_ahead or has_virtual
        if self._lanes is not None:
            return reader_of_lanes(
                self,
                is_shuffled=self.shuffle,
                is_seeded=is_seeded,
                has_virtual=has_virtual,
            )
        return reader_of(
            self, self.dataset, is_seeded=is_seeded, has_virtual=has_virtual
        )

    def _trace(self, trace: Trace) -> None:
        loop, dataset = self.running_loop, self.dataset
        _, indices, part, places = loop.current
        if isinstance(indices, torch.Tensor):
            indices = indices.tolist()
        streams: list[tuple[str, int]] = []
        if isinstance(dataset, InLanes):
            streams = [dataset.place(index) for index in indices]
        assert loop.start is not None
        trace.write(
            epoch=loop.start.epoch,
            loop=loop.start.num_loops,
            inside=loop.start.inside,
            batch=self.batch_index,
            micro=part.micro,
            indices=indices,
            num_valid=part.num_valid,
            places=places,
            streams=streams,
            member=self.name if loop.part_of else None,
        )

    def _check_endless(self) -> None:
        need_lengths(self.dataset, "a loop over several passes (batches)")
        self._order.endless_order(0)
