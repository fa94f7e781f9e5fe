"""`AdaptiveDataLoader`: its loops continue at the sample after a restart."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Literal

from torch.utils.data import DataLoader

from elasticrun.current import current_job
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
    decode_state,
    encode_state,
)
from elasticrun.data.order import (
    EveryPosition,
    check_sampler,
    checksum_of_map,
    order_of,
)
from elasticrun.data.plan import (
    LoopPlan,
    Seeding,
    Shares,
    loop_key,
)
from elasticrun.data.progress_bar import (
    ProgressBar,
    check_progress_bar,
    open_progress_bar,
)
from elasticrun.data.running import (
    RunningLoop,
    check_place,
    describe,
    trace_batch,
)
from elasticrun.data.seeding import derive_seed
from elasticrun.data.workers import BatchReader
from elasticrun.errors import CheckpointError
from elasticrun.job import Job
from elasticrun.leaving import is_left_on_purpose
from elasticrun.position import Position


class AdaptiveDataLoader(DataLoader[Any]):
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
        batch_size: Samples in a global batch, over all replicas.
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
            with a length and `__getitem__`.
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
        batch_size: int = 1,
        shuffle: bool = False,
        *,
        seed: int = 0,
        drop_last: bool = False,
        even_batches: bool = True,
        max_local_batch_size: int | None = None,
        seed_each: Literal["batch", "sample"] = "batch",
        sampler: Any = None,
        batch_sampler: None = None,
        name: str | None = None,
        progress: bool = False,
        **dataloader_kwargs: Any,
    ) -> None:
        job = current_job()
        check_dataset(dataset)
        batch_size, max_local_batch_size = check_sizes(batch_size, max_local_batch_size)
        check_sampler(sampler, batch_sampler, shuffle=shuffle)
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
        self._order_length = len(dataset) if sampler is None else len(sampler)
        self._order_sampler = sampler
        num_samples = job.samples_of(self._order_length, batch_size)
        self._shares = Shares(
            num_samples=num_samples,
            batch_size=batch_size,
            drop_last=bool(drop_last),
            rank=job.rank,
            world_size=job.world_size,
            max_local_batch_size=max_local_batch_size,
            is_padded=bool(even_batches),
        )
        self._fingerprint = Fingerprint(
            num_samples,
            batch_size,
            self.shuffle,
            seed,
            self._shares.drop_last,
            order=None if sampler is None else checksum_of_map(sampler),
        )
        self.name = name if name is not None else f"loader-{job.num_loaders}"
        job.num_loaders += name is None
        job.register(
            LoaderState(name=name, default=self.name, fingerprint=self._fingerprint)
        )
        publish(
            job,
            self.name,
            self._fingerprint.encode()
            | {"even_batches": self._shares.is_padded, "seed_each": seed_each},
        )
        self._is_compared = False
        # Set past torch's guard against changing them: torch itself was given none.
        object.__setattr__(self, "batch_size", batch_size)
        object.__setattr__(self, "drop_last", self._shares.drop_last)
        self.running_loop = RunningLoop()
        self._batch_reader = BatchReader(self, each_sample=seed_each == "sample")

    # What the loop body may ask.

    @property
    def index(self) -> int:
        """Samples of the loop consumed before this global batch, by all replicas."""
        job = current_job()
        return job.progress.position.index if job.loader is self else 0

    @property
    def num_samples(self) -> int:
        """Samples in a whole loop, over all replicas."""
        shares = self._shares
        if shares.drop_last:
            return shares.num_batches * shares.batch_size
        return shares.num_samples

    @property
    def batch_index(self) -> int:
        """Number of the current global batch within the loop."""
        return self.running_loop.current[0]

    @property
    def global_batch_size(self) -> int:
        """Samples of all replicas in this global batch; before any, in a full one."""
        return self.running_loop.part.global_batch_size or self._shares.batch_size

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
    def even_batches(self) -> bool:
        """Whether every replica takes part in every step, by padding if need be."""
        return self._shares.is_padded

    @property
    def where(self) -> str:
        """Where the running loop stands in the program, as "file.py:line"."""
        return self.running_loop.where

    def __len__(self) -> int:
        """Return the number of global batches in a whole loop, resumed or not."""
        return self._shares.num_batches

    # Loops.

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        return self._deliver()

    def enumerate(self) -> Iterator[tuple[int, Any]]:
        """Yield (number of the global batch in the loop, batch), resumed or not."""
        for batch in self:
            yield self.running_loop.current[0], batch

    def _deliver(self) -> Iterator[Any]:
        job = current_job()
        where = describe(sys._getframe(1))
        self._compare(job)
        start = job.begin_loop(self, where)
        if start is None:
            return
        is_finished = False
        bar: ProgressBar | None = None
        batches: Iterator[Any] = iter(())
        try:
            loop = self.running_loop = RunningLoop(where)
            plan = self._plan(start)
            if self.progress and job.rank == 0:
                bar = open_progress_bar(self.name, plan.first_batch, len(self))
            key = loop_key(self.seed, start.finished_epochs, start.finished_loops)
            batches = self._batch_reader.start(self, plan, key)
            job.continue_loop()
            in_flight, trace, progress = plan.in_flight, job.trace, job.progress
            for batch in batches:
                if not in_flight[0][1]:
                    self._pass_empty(job, plan)
                loop.current = in_flight.popleft()
                if trace is not None:
                    trace_batch(trace, loop.current, start)
                yield batch
                part = loop.current[2]
                if part.is_step:
                    progress.advance(part.global_batch_size)
                    if bar is not None:
                        bar.update()
                    job.pass_boundary()
            self._pass_empty(job, plan)
            is_finished = True
        except GeneratorExit:
            is_finished = is_left_on_purpose(sys._getframe(1))
            raise
        finally:
            try:
                self._batch_reader.end(batches)
            finally:
                # An exception may keep this frame, and with it persistent workers; the
                # garbage collector takes 5 s to end each of them.
                del batches
                self.running_loop = RunningLoop()
                job.end_loop(is_finished=is_finished)
                if bar is not None:
                    bar.close()

    def _compare(self, job: Job) -> None:
        """Raise, in the first loop, if other replicas have made another loader."""
        if not self._is_compared:
            check_alike(job, self.name)
            self._is_compared = True

    def _pass_empty(self, job: Job, plan: LoopPlan) -> None:
        """Pass the boundaries of global batches that had nothing for this replica."""
        while plan.in_flight and not plan.in_flight[0][1]:
            _, _, part = plan.in_flight.popleft()
            job.progress.advance(part.global_batch_size)
            job.pass_boundary()

    def _plan(self, start: Position) -> LoopPlan:
        shares = self._shares
        if start.index % shares.batch_size and start.index < self.num_samples:
            raise CheckpointError(
                f"`{self.name}` is to continue at sample {start.index} of "
                f"{self.num_samples}, which is not the beginning of a global batch of "
                f"{shares.batch_size}. Give it the batch size that it had."
            )
        key = loop_key(self.seed, start.finished_epochs, start.finished_loops)
        return LoopPlan(
            shares,
            order_of(
                self._order_length,
                self._order_sampler,
                key=derive_seed(key, 1) if self.shuffle else None,
            ),
            index=start.index,
            seeding=(
                Seeding(derive_seed(key, 2), self.seed_each == "sample")
                if self._batch_reader.is_seeded
                else None
            ),
        )

    # Checkpoints of one's own.

    def state_dict(self) -> dict[str, Any]:
        """Return position and fingerprint, for people who keep checkpoints themselves.

        In a loop's body the current batch counts as consumed once it is complete;
        batches that workers have fetched ahead never do.
        """
        job = current_job()
        position = job.progress.position
        index = None
        if job.loader is self:
            part = self.running_loop.part
            index = position.index + part.global_batch_size * part.is_step
        elif position.loader == self.name:
            index = position.index
        return encode_state(self._fingerprint, position, index)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Let the next loop continue where `state_dict` was taken, at any world size.

        Raises:
            CheckpointError: It is not such a state, or one of another data set, batch
                size, order or seed.
            LoopOrderError: A loop is running, or another loader is to be continued.
        """
        position = decode_state(state_dict, self._fingerprint, name=self.name)
        current_job().progress.resume_at(position)
