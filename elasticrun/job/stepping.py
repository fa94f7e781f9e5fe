"""Makes optimizers and schedulers step once a global batch, not a micro-batch."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from elasticrun.errors import ElasticRunError, warn_at_program
from elasticrun.job.current import (
    forget_boundaries,
    job_if_any,
    loader_if_any,
    note_step,
)

# What is called instead of a method: takes (method, target, *args, **kwargs), of which
# the first is the method as a function of the rest.
Replacement = Callable[..., Any]

_STEPS = ("step", "update", "update_parameters")


def act_once_per_global_batch(target: Any) -> None:
    """Let what an object steps with do nothing between micro-batches.

    Methods are replaced on the object itself, as torch's schedulers replace `step`. Of
    what torch does not know, those calls of `step` and `update` are left out that are
    given a model or nothing, as of averages of parameters; those with data, as of
    metrics, belong to each micro-batch.
    """
    if not hasattr(target, "__dict__"):
        return
    replacements = {
        name: replacement
        for name, replacement in _replacements_for(target).items()
        if not _acts_once(getattr(target, name))
    }
    for name, replacement in replacements.items():
        replace_method(target, name, replacement, acts_once=True)
    keeps_attributes_apart = (Optimizer, torch.nn.Module, torch.amp.GradScaler)
    if replacements and not isinstance(target, keeps_attributes_apart):
        replace_method(target, "state_dict", _state_without_methods)


def is_between_micro_batches() -> bool:
    """Return whether the running micro-batch leaves its global batch incomplete."""
    loader = loader_if_any()
    return loader is not None and not loader.is_step


def step_between_micro_batches(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
    """Do what of an optimizer's step belongs to each micro-batch: its closure."""
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


def replace_method(
    target: Any, name: str, replacement: Replacement, *, acts_once: bool = False
) -> None:
    """Let calls of a method of this object go to a replacement.

    That becomes a bound method of the target: it is copied and pickled with it, and
    torch's schedulers, which look for `__func__`, can wrap it once more.

    Args:
        acts_once: It need not be replaced again to act once per global batch.
    """
    own = vars(target).get(name)
    if own is None:
        method = getattr(type(target), name)
    else:

        def method(_: Any, *args: Any, **kwargs: Any) -> Any:
            return own(*args, **kwargs)

        functools.update_wrapper(method, own)

    @functools.wraps(method)
    def replaced(target: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(method, target, *args, **kwargs)

    replaced.acts_once = acts_once or _acts_once(method)  # type: ignore[attr-defined]
    setattr(target, name, MethodType(replaced, target))


def _acts_once(method: Any) -> bool:
    return getattr(method, "acts_once", False)


def _replacements_for(target: Any) -> dict[str, Replacement]:
    """Return what is to stand for methods of an object, by their names."""
    if isinstance(target, Optimizer):
        return {"step": _step_optimizer}
    if isinstance(target, LRScheduler):
        return {"step": _step_scheduler}
    if isinstance(target, torch.amp.GradScaler):
        return {"unscale_": _act, "step": _step_scaler, "update": _update_scaler}
    if isinstance(target, torch.optim.swa_utils.AveragedModel):
        return {"update_parameters": _act_on_model}
    names = [name for name in _STEPS if callable(getattr(type(target), name, None))]
    return dict.fromkeys(names, _act_on_model)


def _act(method: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if is_between_micro_batches():
        return None
    return method(target, *args, **kwargs)


def _step_scheduler(method: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    if is_between_micro_batches():
        return None
    job = job_if_any()
    if job is not None and job.has_resumed:
        scheduler.optimizer._opt_called = True  # In a process before this one.
    num_given = len(args) + len(kwargs) - isinstance(scheduler, ReduceLROnPlateau)
    if num_given < 1 and getattr(scheduler, "_step_count", 0) != 1:
        return method(scheduler, *args, **kwargs)
    # Torch would show this line as that of its warnings. They are not caught at each
    # step: Python then says again what it has said of other lines.
    with warnings.catch_warnings(record=True) as caught:
        result = method(scheduler, *args, **kwargs)
    for each in caught:
        warn_at_program(str(each.message), each.category)
    return result


def _update_scaler(method: Any, scaler: Any, *args: Any, **kwargs: Any) -> Any:
    if is_between_micro_batches():
        return None
    # The scale changes also where an optimizer has left its step out.
    forget_boundaries()
    return method(scaler, *args, **kwargs)


def _act_on_model(method: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    if _has_data(*args, *kwargs.values()):
        return method(target, *args, **kwargs)
    if is_between_micro_batches():
        return None
    job = job_if_any()
    virtual = None if job is None else job.virtual
    with nullcontext() if virtual is None else virtual.seen_alike():
        return method(target, *args, **kwargs)


def _has_data(*args: Any) -> bool:
    """Return whether something is given that is no model and no parameters."""
    given = args[0] if args else None
    if isinstance(given, list | tuple):
        given = given[0] if given else None
    of_model = (torch.nn.Module, torch.nn.Parameter, Iterator)
    return given is not None and not isinstance(given, of_model)


def _step_optimizer(
    method: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> Any:
    job = job_if_any()
    if job is not None and job.virtual is not None:
        raise ElasticRunError(
            f"a {type(optimizer).__name__} stepped that no AdaptiveDataParallel has, "
            "in a job with virtual_replicas. Its gradients would be added up in an "
            "order that depends on the number of replicas. Give it to the model: "
            "AdaptiveDataParallel(net, optimizer)."
        )
    if is_between_micro_batches():
        return step_between_micro_batches(optimizer, *args, **kwargs)
    note_step()
    return method(optimizer, *args, **kwargs)


def _step_scaler(
    method: Any, scaler: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
) -> Any:
    if not is_between_micro_batches():
        result = method(scaler, optimizer, *args, **kwargs)
        job = job_if_any()
        if job is not None and job.virtual is not None:
            job.virtual.leave_step_out(optimizer)  # If its gradients are not finite.
        return result
    if _acts_once(optimizer.step):
        optimizer.step()  # Now it only notes that its gradients are due.
    return None


def _state_without_methods(method: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the state of an object, whose whole `__dict__` that may be."""
    state = method(target, *args, **kwargs)
    if not isinstance(state, dict):
        return state
    return {
        key: value
        for key, value in state.items()
        if type(value) is not MethodType or value.__self__ is not target
    }
