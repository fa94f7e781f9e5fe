"""Making what steps act once per global batch, however many micro-batches that has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from elasticrun.current import current_job

_STEPPING_METHODS: tuple[tuple[type, tuple[str, ...]], ...] = (
    (torch.optim.Optimizer, ("step",)),
    (torch.optim.lr_scheduler.LRScheduler, ("step",)),
    (torch.amp.GradScaler, ("unscale_", "step", "update")),
    (torch.optim.swa_utils.AveragedModel, ("update_parameters",)),
)


def act_once_per_global_batch(target: Any) -> None:
    """Let a known torch object's stepping methods rest between micro-batches.

    They are wrapped on the object itself, as torch's own schedulers wrap `step`. Other
    objects stay as they are.
    """
    for kind, names in _STEPPING_METHODS:
        if isinstance(target, kind):
            for name in names:
                setattr(target, name, _only_at_step(getattr(target, name)))


def is_between_micro_batches() -> bool:
    """Return whether the running micro-batch leaves its global batch incomplete."""
    loader = current_job().loader
    return loader is not None and not loader.is_step


def _only_at_step(method: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(method, "_elasticrun_acts_once", False):
        return method

    @functools.wraps(method)
    def act(*args: Any, **kwargs: Any) -> Any:
        if is_between_micro_batches():
            return None
        return method(*args, **kwargs)

    act._elasticrun_acts_once = True  # type: ignore[attr-defined]
    return act
