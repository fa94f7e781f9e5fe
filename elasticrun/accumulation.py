"""Making what steps act once per global batch, however many micro-batches that has."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticrun.current import running_loader
from elasticrun.errors import ElasticRunError

# Takes (target, *args, **kwargs), and returns what the method of that target would.
Method = Callable[..., Any]


def act_once_per_global_batch(target: Any) -> None:
    """Let what a known torch object steps with do nothing between micro-batches.

    Optimizers, their schedulers, `GradScaler` and `AveragedModel` are changed on the
    object itself, as torch's schedulers change `step`. Other objects stay as they are.
    """
    if isinstance(target, Optimizer):
        _act_once(target, "step", _stepping_optimizer)
    elif isinstance(target, LRScheduler):
        # Its state is its whole __dict__, so that a wrapper there would be saved.
        if not isinstance(target, _ActsOnce):
            kind: Any = type(target)
            target.__class__ = _acting_once(kind)
    elif isinstance(target, torch.amp.GradScaler):
        _act_once(target, "unscale_", _acting)
        _act_once(target, "step", _stepping_scaler)
        _act_once(target, "update", _acting)
    elif isinstance(target, torch.optim.swa_utils.AveragedModel):
        _act_once(target, "update_parameters", _acting)


def is_between_micro_batches() -> bool:
    """Return whether the running micro-batch leaves its global batch incomplete."""
    loader = running_loader()
    return loader is not None and not loader.is_step


def step_between_micro_batches(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Do what of an optimizer's step belongs to each micro-batch: its closure.

    Raises:
        ElasticRunError: The optimizer needs its closure at other points, too.
    """
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


def wrap_method(
    target: Any,
    name: str,
    make: Callable[[Method], Method],
    *,
    acts_once: bool = False,
) -> None:
    """Let what `make` makes of a method stand for it, on the object itself.

    It becomes a bound method of the target: it is copied and pickled with it, and
    torch's schedulers, which look for `__func__`, can wrap it once more.

    Args:
        acts_once: It need not be wrapped again to act once per global batch.
    """
    method = vars(target).get(name)
    if method is None:
        function = getattr(type(target), name)
    else:

        def function(_: Any, *args: Any, **kwargs: Any) -> Any:
            return method(*args, **kwargs)

        functools.update_wrapper(function, method)
    wrapper: Any = functools.wraps(function)(make(function))
    wrapper.acts_once = acts_once or _acts_once(function)
    setattr(target, name, MethodType(wrapper, target))


def _act_once(target: Any, name: str, make: Callable[[Method], Method]) -> None:
    if not _acts_once(getattr(target, name)):
        wrap_method(target, name, make, acts_once=True)


def _acts_once(method: Any) -> bool:
    return getattr(method, "acts_once", False)


def _acting(method: Method) -> Method:
    def act(target: Any, *args: Any, **kwargs: Any) -> Any:
        if is_between_micro_batches():
            return None
        return method(target, *args, **kwargs)

    return act


def _stepping_optimizer(method: Method) -> Method:
    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_between_micro_batches():
            return step_between_micro_batches(optimizer, *args, **kwargs)
        return method(optimizer, *args, **kwargs)

    return step


def _stepping_scaler(method: Method) -> Method:
    def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not is_between_micro_batches():
            return method(scaler, optimizer, *args, **kwargs)
        if _acts_once(optimizer.step):
            optimizer.step()  # Now it only notes that what was accumulated counts.
        return None

    return step


class _ActsOnce:
    """Marks the classes that `_acting_once` makes."""


@functools.cache
def _acting_once(kind: type[Any]) -> type[Any]:
    """Return a class like this scheduler class that does not step too often."""
    step = functools.wraps(kind.step)(_acting(kind.step))
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_ActsOnce, kind), {"step": step, **names})
