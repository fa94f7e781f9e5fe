"""Making what steps act once per global batch, however many micro-batches that has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticrun.current import current_job
from elasticrun.errors import ElasticRunError

Around = Callable[
    ..., Any
]  # (target, method, *args, **kwargs) -> what the method returns


def act_once_per_global_batch(target: Any) -> None:
    """Let what a known torch object steps with do nothing between micro-batches.

    Optimizers, their schedulers, `GradScaler` and `AveragedModel` are changed on the
    object itself, as torch's schedulers change `step`. Other objects stay as they are.
    """
    if isinstance(target, Optimizer):
        _act_once(target, "step", _step_optimizer)
    elif isinstance(target, LRScheduler):
        # Its state is its whole __dict__, so that a wrapper there would be saved.
        if not isinstance(target, _ActsOnce):
            kind: Any = type(target)
            target.__class__ = _acting_once(kind)
    elif isinstance(target, torch.amp.GradScaler):
        _act_once(target, "unscale_", _act)
        _act_once(target, "step", _step_scaler)
        _act_once(target, "update", _act)
    elif isinstance(target, torch.optim.swa_utils.AveragedModel):
        _act_once(target, "update_parameters", _act)


def is_between_micro_batches() -> bool:
    """Return whether the running micro-batch leaves its global batch incomplete."""
    loader = current_job().loader
    return loader is not None and not loader.is_step


def wrap_method(target: Any, name: str, around: Around) -> None:
    """Let `around` stand for a method, on the object itself.

    The wrapper is a bound method of the target: it is copied and pickled with it, and
    torch's schedulers, which look for `__func__`, can wrap it once more.
    """
    is_wrapped = name in vars(target)
    function = getattr(target if is_wrapped else type(target), name)

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        inner = function if is_wrapped else MethodType(function, self)
        return around(self, inner, *args, **kwargs)

    setattr(target, name, MethodType(method, target))


def _act_once(target: Any, name: str, around: Around) -> None:
    if not _acts_once(getattr(target, name)):
        wrap_method(target, name, around)
        getattr(target, name).__func__.acts_once = True


def _acts_once(method: Any) -> bool:
    return getattr(method, "acts_once", False)


def _act(_: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if is_between_micro_batches() else method(*args, **kwargs)


def _step_optimizer(
    optimizer: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not is_between_micro_batches():
        return method(*args, **kwargs)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ElasticRunError(
            "LBFGS was stepped between two micro-batches. It evaluates its closure at "
            "several points, but the gradients of earlier micro-batches hold for the "
            "first of them only. Leave out max_local_batch_size, or use another "
            "optimizer."
        )
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():  # For its gradients, which accumulate as any others.
        return closure()


def _step_scaler(
    _: torch.amp.GradScaler,
    method: Callable[..., Any],
    optimizer: Optimizer,
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not is_between_micro_batches():
        return method(optimizer, *args, **kwargs)
    if _acts_once(optimizer.step):
        optimizer.step()  # Now it only notes that what was accumulated counts.
    return None


class _ActsOnce:
    """Marks the classes that `_acting_once` makes."""


@functools.cache
def _acting_once(kind: type[Any]) -> type[Any]:
    """Return a class like this scheduler class that does not step too often."""

    @functools.wraps(kind.step)
    def step(self: Any, *args: Any, **kwargs: Any) -> None:
        if not is_between_micro_batches():
            kind.step(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_ActsOnce, kind), {"step": step, **names})
