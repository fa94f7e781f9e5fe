"""Making what steps act once per global batch, however many micro-batches that has."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticrun.errors import ElasticRunError
from elasticrun.job.current import note_step, running_loader

# Takes (target, *args, **kwargs), and returns what the method of that target would.
Method = Callable[..., Any]

_STEPS = ("step", "update", "update_parameters")


def act_once_per_global_batch(target: Any) -> None:
    """Let what an object steps with do nothing between micro-batches.

    Optimizers, `GradScaler`, `AveragedModel` and other modules are changed on the
    object itself, as torch's schedulers change `step`. Of what torch does not know,
    those calls of `step` and `update` are left out that are given a model or nothing,
    as of averages of parameters; those with data, as of metrics, belong to each
    micro-batch.
    """
    if isinstance(target, Optimizer):
        _act_once(target, "step", _stepping_optimizer)
    elif isinstance(target, LRScheduler):
        _become(target, ("step",), _acting)
    elif isinstance(target, torch.amp.GradScaler):
        _act_once(target, "unscale_", _acting)
        _act_once(target, "step", _stepping_scaler)
        _act_once(target, "update", _acting)
    elif isinstance(target, torch.optim.swa_utils.AveragedModel):
        _act_once(target, "update_parameters", _acting)
    else:
        names = tuple(
            name for name in _STEPS if callable(getattr(type(target), name, None))
        )
        if isinstance(target, torch.nn.Module):
            for name in names:
                _act_once(target, name, _acting_on_models)
        elif names and hasattr(target, "__dict__"):
            _become(target, names, _acting_on_models)


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


def _acting_on_models(method: Method) -> Method:
    def act(target: Any, *args: Any, **kwargs: Any) -> Any:
        if is_between_micro_batches() and not _has_data(*args, *kwargs.values()):
            return None
        return method(target, *args, **kwargs)

    return act


def _has_data(*args: Any) -> bool:
    """Return whether something is given that is no model and no parameters."""
    given = args[0] if args else None
    if isinstance(given, list | tuple):
        given = given[0] if given else None
    of_model = (torch.nn.Module, torch.nn.Parameter, Iterator)
    return given is not None and not isinstance(given, of_model)


def _stepping_optimizer(method: Method) -> Method:
    def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if is_between_micro_batches():
            return step_between_micro_batches(optimizer, *args, **kwargs)
        note_step()
        return method(optimizer, *args, **kwargs)

    return step


def _stepping_scaler(method: Method) -> Method:
    def step(scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if not is_between_micro_batches():
            return method(scaler, optimizer, *args, **kwargs)
        if _acts_once(optimizer.step):
            optimizer.step()  # Now it only notes that its gradients are due.
        return None

    return step


class _ActsOnce:
    """Marks the classes that `_become` makes."""


def _become(
    target: Any, names: tuple[str, ...], make: Callable[[Method], Method]
) -> None:
    """Make the object one of a class like its own whose methods act once.

    A scheduler's state is its whole `__dict__`, so that a wrapper there would be saved.
    """
    if not isinstance(target, _ActsOnce):
        kind: Any = type(target)
        target.__class__ = _acting_once(kind, names, make)


@functools.cache
def _acting_once(
    kind: type[Any], names: tuple[str, ...], make: Callable[[Method], Method]
) -> type[Any]:
    """Return a class like this one that does not step too often."""
    methods = {
        name: functools.wraps(method)(make(method))
        for name, method in ((name, getattr(kind, name)) for name in names)
    }
    names_of_kind = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (_ActsOnce, kind), {**methods, **names_of_kind})
