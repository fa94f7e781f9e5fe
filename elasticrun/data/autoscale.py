"""Chooses the global batch size of loaders anew, whenever a checkpoint is due."""

from __future__ import annotations

from elasticrun.adaptive.goodput import next_size
from elasticrun.data.loader_state import LoaderState
from elasticrun.data.order.batches import check_size
from elasticrun.errors import ElasticRunError, LoopOrderError
from elasticrun.job.job import Job
from elasticrun.job.loop import LoopStart
from elasticrun.job.noise_record import NoiseRecord
from elasticrun.logger import Logger
from elasticrun.replicas.gathering import gather

logger = Logger(__name__)


class Autoscaler:
    """Decides what size the global batches of a loader's loops are to have.

    Rank 0 decides, at a boundary where a checkpoint is written anyway. All note the
    decision, so that it is in that checkpoint, and use it once that is committed.
    """

    def __init__(
        self,
        job: Job,
        state: LoaderState,
        max_batch_size: int,
        *,
        min_efficiency: float,
    ) -> None:
        times, what = state.times, None
        if times is None:
            what = "batch_sampler gives batches their sizes"
        elif state.plan is not None and len(state.plan) > 1:
            what = "batch_size is a plan"
        elif state.fingerprint["drop_last"]:
            what = "with drop_last a change of size would change what is left out"
        if times is None or what is not None:
            raise ValueError(
                f"autoscale of `{state.loader_name}`, but {what}. Give the loader one "
                "batch_size to begin with, and nothing that depends on it."
            )
        first = state.sizes[0][1]
        max_batch_size = check_size("max_batch_size", max_batch_size)
        if max_batch_size < first:
            raise ValueError(
                f"max_batch_size={max_batch_size} is below batch_size={first}, with "
                "which it begins."
            )
        if not 0 <= min_efficiency <= 1:
            raise ValueError(f"min_efficiency={min_efficiency} must be from 0 to 1.")
        if job.boundary.has_decider:
            raise ElasticRunError(
                f"autoscale of `{state.loader_name}` was called, but not for the first "
                "time. A job chooses the batch size of one loader, the one it trains "
                "with. Call autoscale once."
            )
        times.max_batch_size = max_batch_size
        times.min_efficiency = min_efficiency
        self._job = job
        self._state = state
        self._times = times
        self._last_loop: LoopStart | None = None

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

    def decide(self) -> bool:
        """Decide at this boundary; return whether sizes are to change. Collective."""
        seen = self._num_seen()
        if seen is None:
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
                seen,
            )
        self._state.pending = (seen, size)
        return True

    def choose(self) -> int | None:
        """Return another size for global batches, or None if this one is right."""
        times, sizes = self._times, self._state.sizes
        assert times.max_batch_size is not None
        return next_size(
            times.steps,
            self._noise_record().noise,
            base=sizes[0][1],
            size=sizes[-1][1],
            largest=times.max_batch_size,
            num_nodes=times.num_nodes,
            num_replicas=self._job.world_size,
            max_local_batch_size=times.max_local_batch_size,
            min_efficiency=times.min_efficiency,
        )

    def _num_seen(self) -> int | None:
        """Return how many samples were seen, by the plan; None if sizes cannot change.

        They may in a loop over the loader, and where an epoch has ended.
        """
        job, last = self._job, self._last_loop
        if last is None or job.progress.is_replaying:
            return None
        if job.loader is not None:
            if job.loader.name != self._state.loader_name:
                return None
            before = last.offset
            if before is None:
                before = last.epoch * self._state.num_samples
            return before + job.progress.index
        if job.is_in_epoch:
            return None
        if last.offset is not None:
            return self._state.cursor.end
        return job.progress.finished_epochs * self._state.num_samples

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
