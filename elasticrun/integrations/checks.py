"""Checks for all frameworks: private names, numbers of processes, samplers."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from torch.utils.data import DistributedSampler, RandomSampler, SequentialSampler

from elasticrun.errors import ElasticRunError
from elasticrun.job.current import current_job


def check_internals(framework: str, owner: Any, names: str, *, tested: str) -> None:
    """Refuse a version of a framework that lacks something that is not public of it."""
    for name in names.split():
        try:
            attrgetter(name)(owner)
        except AttributeError:
            raise ElasticRunError(
                f"{framework} has no {name}, which is not public, and is needed here. "
                f"This has been tested with {tested}: install one of these."
            ) from None


def check_num_processes(owner: str, num_processes: int, advice: str) -> None:
    """Refuse a framework that trains in other processes than the job."""
    world_size = current_job().world_size
    if num_processes != world_size:
        raise ElasticRunError(
            f"{owner} has {num_processes} processes, but the job {world_size} "
            f"replicas, so it would not train all of a global batch. {advice}"
        )


def is_shuffled(sampler: Any) -> bool | None:
    """Return whether a sampler of torch's shuffles; None if it has another order."""
    if type(sampler) is SequentialSampler:
        return False
    if type(sampler) is DistributedSampler:
        return bool(sampler.shuffle)
    if type(sampler) is RandomSampler and not (
        sampler.replacement or sampler._num_samples
    ):
        return True
    return None
