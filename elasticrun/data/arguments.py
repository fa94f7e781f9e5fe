"""Checks the arguments of loaders, whose docstrings list the errors."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from operator import index
from typing import Any, NoReturn

from elasticrun.data.order.batches import SizePlan, check_size
from elasticrun.errors import (
    ElasticRunError,
    LoopOrderError,
    StateNameError,
    warn_at_program,
)
from elasticrun.job.job import Job

_WHAT_A_PLAN_IS = (
    "a plan maps numbers of samples seen, beginning with 0, to the size from then on: "
    "{0: 64, 100_000: 128}."
)


def check_dataset(dataset: Any) -> None:
    """Refuse a data set that cannot be read at a position, or is empty."""
    has_items = hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")
    if not (hasattr(dataset, "__len__") and has_items):
        raise TypeError(
            f"{type(dataset).__name__} has no __len__ or no __getitem__. To resume at "
            "a sample, a data set must have a length and be read by index, or be read "
            "in streams: see `Streams`."
        )
    if len(dataset) == 0:
        raise ValueError(
            f"the data set ({type(dataset).__name__}) is empty, so no loop over it can "
            "deliver anything. Look at how it was built."
        )


def check_sizes(
    batch_size: Any, max_local_batch_size: Any
) -> tuple[SizePlan, int | None]:
    """Return the plan of global batches, and the largest local one."""
    if batch_size is None:
        raise ValueError(
            "batch_size=None turns batching off in torch, but a global batch needs a "
            "size. Give a batch_size; collate_fn can undo the batching."
        )
    if callable(batch_size):
        raise ValueError(
            f"batch_size={batch_size!r} is a function, which cannot be compared with "
            f"the one in a checkpoint: {_WHAT_A_PLAN_IS}"
        )
    if isinstance(batch_size, Mapping):
        plan = _check_plan(batch_size)
    else:
        plan = ((0, check_size("batch_size", batch_size)),)
    if max_local_batch_size is not None:
        max_local_batch_size = check_size("max_local_batch_size", max_local_batch_size)
    return plan, max_local_batch_size


def _check_plan(sizes: Mapping[Any, Any]) -> SizePlan:
    are_counts = all(
        hasattr(samples, "__index__") and not isinstance(samples, bool) and samples >= 0
        for samples in sizes
    )
    if not are_counts or 0 not in sizes:
        raise ValueError(f"batch_size={dict(sizes)!r}: {_WHAT_A_PLAN_IS}")
    checked = {
        index(samples): check_size(f"batch_size[{samples}]", size)
        for samples, size in sizes.items()
    }
    return tuple(sorted(checked.items()))


def check_seed(seed: Any) -> int:
    """Return the seed as a plain integer, as the checkpoint keeps it."""
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed={seed!r} must be a whole number.")
    return index(seed)


def check_progress_bar() -> None:
    """Refuse to promise a bar that cannot be shown."""
    if importlib.util.find_spec("tqdm") is None:
        raise ImportError(
            "progress=True needs tqdm: pip install 'elasticrun[progress]'."
        )


def check_seed_each(seed_each: str) -> None:
    """Refuse anything but "batch" and "sample"."""
    if seed_each not in ("batch", "sample"):
        raise ValueError(f"seed_each={seed_each!r} must be 'batch' or 'sample'.")


def check_in_order(in_order: bool) -> None:
    """Warn of what is not followed."""
    if not in_order:
        warn_at_program(
            "in_order=False has no effect: batches keep their order, because the "
            "position of a job depends on it."
        )


def check_made_again(job: Job, name: str | None) -> None:
    """Refuse a loader that a restart would not make again under the same name."""
    if name is not None and not name:
        raise StateNameError(
            "name='' cannot name a loader. Give a name that says what it is for, or "
            "leave name= out."
        )
    if job.loader is not None:
        raise LoopOrderError(
            f"a loader is being made inside the loop over `{job.loader.name}` "
            f"({job.loader.where}). After a restart that loop continues in the middle, "
            "so a loader made earlier in it would be missing. Make all loaders before "
            "the epoch loop."
        )
    if job.is_in_epoch and name is None:
        raise LoopOrderError(
            f"a loader without a name is being made in epoch "
            f"{job.progress.finished_epochs}. Loaders without a name are known by the "
            "order in which they are made, which differs after a restart, when earlier "
            "epochs are skipped. Make it before the epoch loop, or give it a name= of "
            "its own in each epoch."
        )


def refuse_virtual(what: str) -> NoReturn:
    """Refuse what would depend on the number of replicas with virtual ones, too."""
    raise ElasticRunError(
        f"{what} cannot be used in a job with virtual_replicas: it would not end with "
        "the same bits at any number of replicas. Leave it out, or virtual_replicas."
    )
