"""Chooses the global batch size of loaders anew, whenever a checkpoint is due."""

from __future__ import annotations

from elasticrun.adaptive.goodput import next_size
from elasticrun.data.fingerprint import LoaderState
from elasticrun.data.step_times import StepTimes
from elasticrun.errors import ElasticRunError, LoopOrderError
from elasticrun.job.job import Job
from elasticrun.job.loop import LoopStart
from elasticrun.job.noise import NoiseRecord
from elasticrun.logger import Logger
from elasticrun.replicas.gathering import gather

logger = Logger(__name__)


class Autoscaler:
    """Decides what size the global batches of a loader's loops are to have.

    Rank 0 decides, at a boundary where a checkpoint is written anyway. All note the
    decision, so that it is in that checkpoint, and use it once that is committed.
    """

    def __init__(
        self, job: Job, state: LoaderState, times: StepTimes, *, largest: int
    ) -> None:
        self._job = job
        self._state = state
        self._times = times
        self._largest = largest
        self._last_loop: LoopStart | None = None

    # The loops over the loader.

    def begin_loop(self, start: LoopStart) -> None:
        """Check that places in the plan of sizes come in their order, each once."""
        last, self._last_loop = self._last_loop, start
        self._noise_record()
        if last is not None and not _may_follow(last, start):
            raise LoopOrderError(
                f"`{self._state.loader_name}` decides its batch sizes itself "
                "(autoscale), by the number of samples seen, and this is its second "
                "loop over the same samples. Loop over it once in each epoch of "
                "remaining_epochs_until, or over its batches(n) only."
            )

    # Decisions.

    def decide(self) -> bool:
        """Decide at this boundary; return whether sizes are to change. Collective."""
        place = self._place()
        if place is None:
            return False
        self._noise_record().sum_parts()
        size: int | None = gather(self.choose() if self._job.rank == 0 else None)[0]
        if size is None:
            return False
        if self._job.rank == 0:
            logger.info(
                "global batches of `%s` have %d samples from sample %d on",
                self._state.loader_name,
                size,
                place,
            )
        self._state.pending = (place, size)
        return True

    def choose(self) -> int | None:
        """Return another size for global batches, or None if this one is right."""
        return next_size(
            self._times.steps,
            self._noise_record().noise,
            base=self._state.sizes[0][1],
            size=self._state.sizes[-1][1],
            largest=self._largest,
            num_nodes=self._times.num_nodes,
            num_replicas=self._job.world_size,
            max_local_batch_size=self._times.max_local_batch_size,
            min_efficiency=self._times.min_efficiency,
        )

    def _place(self) -> int | None:
        """Return how many samples were seen, by the plan; None if sizes cannot change.

        They may in a loop over the loader, and where an epoch has ended.
        """
        job, last = self._job, self._last_loop
        if last is None or job.progress.is_replaying:
            return None
        if job.loader is not None:
            is_own = job.loader.name == self._state.loader_name
            return self._seen_before(last) + job.progress.index if is_own else None
        if job.is_in_epoch:
            return None
        if last.offset is not None:
            return self._state.cursor.end
        return job.progress.finished_epochs * self._state.num_samples

    def _seen_before(self, start: LoopStart) -> int:
        if start.offset is not None:
            return start.offset
        return start.epoch * self._state.num_samples

    def _noise_record(self) -> NoiseRecord:
        records = [each for each in self._job.states if isinstance(each, NoiseRecord)]
        if len(records) != 1:
            raise ElasticRunError(
                f"`{self._state.loader_name}` decides its batch sizes itself "
                "(autoscale), so exactly one model must measure its noise, not "
                f"{len(records)}. Make one with AdaptiveDataParallel(..., "
                "measure_noise=True)."
            )
        return records[0]


def _may_follow(last: LoopStart, start: LoopStart) -> bool:
    """Return whether a loop may come after another one over the same loader."""
    if last.offset is None and start.offset is None:
        is_same_place = last[:2] == start[:2]  # After an exception.
        return is_same_place or start.epoch > last.epoch
    return last.offset is not None and start.offset is not None
