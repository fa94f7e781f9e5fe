"""Loads states into torch's objects without two mistakes of theirs.

Torch's schedulers and scalers take any entry, and crash with it in a step: it is
refused. Torch's optimizers round what they load to their parameters' dtype: they are
given it as it was saved. An object of the program's own is not looked at: only its
`load_state_dict` knows what its entries may be.
"""

from __future__ import annotations

import inspect
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from elasticrun.checkpoint.states.expected import (
    COUNT,
    FLAG,
    NUMBER,
    WHOLE,
    Kind,
    check_values,
    misfit,
)
from elasticrun.checkpoint.states.parameter_names import BUILD_AS_SAVED
from elasticrun.errors import CheckpointError
from elasticrun.logger import Logger
from elasticrun.replicas.gathering import own_rank

logger = Logger(__name__)

_INT32 = Kind(
    "a whole number from 0 to 2**31 - 1",
    lambda value: COUNT.fits(value) and value < 1 << 31,
)
_OF_SCALER = {
    **dict.fromkeys(("scale", "growth_factor", "backoff_factor"), NUMBER),
    **dict.fromkeys(("growth_interval", "_growth_tracker"), _INT32),
}
_PLAN_OF_ONE_CYCLE = ("total_steps", "_schedule_phases")
# What torch's own optimizers keep in the shape of the parameter.
SHAPED_LIKE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "exp_inf", "momentum_buffer"),
    *("square_avg", "grad_avg", "acc_delta", "sum", "ax", "prev"),
}
# What they keep in its dtype, and compute with nothing else in: a program may load it
# for parameters of another dtype than it had before.
_LIKE_PARAMETER = SHAPED_LIKE_PARAMETER | {
    *("step_size", "row_var", "col_var", "variance"),  # Adafactor's
    *("d", "prev_flat_grad", "old_dirs", "old_stps", "ro", "al", "H_diag"),  # LBFGS's
}


def refuse_other_kinds(name: str, target: Any, values: Any) -> None:
    """Refuse entries of other kinds than those that one of torch's objects has."""
    if not type(target).__module__.startswith("torch."):
        return
    if isinstance(target, GradScaler) and target.is_enabled():
        _check(values, {**target.state_dict(), **_OF_SCALER}, name=name)
    elif isinstance(target, LRScheduler):
        _check(values, target.state_dict(), name=name)
        _compare_plans(name, target, values)


def _compare_plans(name: str, target: Any, values: Mapping[str, Any]) -> None:
    """Refuse the state of another kind of scheduler, and name what differs of a plan.

    A plan is what a constructor was given. Without `last_epoch`, where training is, and
    `verbose`, which other versions of torch have.
    """
    for number, inner in enumerate(getattr(target, "_schedulers", ())):
        if "_schedulers" in values:
            saved = values["_schedulers"][number]
            _compare_plans(f"{name}._schedulers[{number}]", inner, saved)
    own = target.state_dict()
    given = inspect.signature(type(target)).parameters.keys() | {"_milestones"}
    plan = own.keys() & given - {"last_epoch", "verbose"}
    where = "as an attribute of the scheduler"
    if is_one_cycle := isinstance(target, OneCycleLR):
        plan, where = plan | {"base_lrs"}, "(max_lr) in the optimizer's groups"
    foreign, lacking = values.keys() - own.keys(), plan - values.keys()
    if foreign and lacking:
        raise CheckpointError(
            f"the saved state {name!r} is not that of a {type(target).__name__}: it "
            f"has {', '.join(sorted(foreign))}, and lacks "
            f"{', '.join(sorted(lacking))}. {BUILD_AS_SAVED}"
        )
    # By the saved plan, it would raise behind the last step of that.
    if is_one_cycle and any(
        key in values and values[key] != own[key] for key in _PLAN_OF_ONE_CYCLE
    ):
        raise CheckpointError(
            f"the saved state {name!r} is that of a OneCycleLR with total_steps = "
            f"{values.get('total_steps')}, but it was made with {own['total_steps']} "
            "here, or with another pct_start. All its rates follow from these, so it "
            f"cannot go on by another plan. {BUILD_AS_SAVED}"
        )
    for key in sorted(plan - lacking):
        if values[key] != own[key] and own_rank() == 0:
            logger.warning(
                "%r goes on with %s = %s, as it was saved, not with %s, as it was made "
                "here. To have the new value, set it %s after it is registered, or "
                "start anew with another checkpoint directory.",
                name,
                "max_lr / div_factor" if key == "base_lrs" else key,
                values[key],
                own[key],
                where,
            )


def try_rates(target: Any) -> None:
    """Compute the rates with which a loaded scheduler of torch's goes on."""
    if not type(target).__module__.startswith("torch."):
        return
    for inner in getattr(target, "_schedulers", ()):
        try_rates(inner)
    has_rates = isinstance(target, LRScheduler) and (
        type(target).get_lr is not LRScheduler.get_lr
    )
    if not has_rates:
        return
    # Some set momentum besides, and step would not be asked within one.
    groups = [dict(group) for group in target.optimizer.param_groups]
    before = dict(vars(target))
    target._get_lr_called_within_step = True
    target.last_epoch = max(target.last_epoch, 0)  # A sequence has not begun it.
    try:
        target.get_lr()
        # A function of the program's may end with the schedule, and so does one cycle.
        if not isinstance(target, LambdaLR | OneCycleLR):
            target.last_epoch += 1
            target.get_lr()
    finally:
        vars(target).update(before)
        for group, options in zip(target.optimizer.param_groups, groups, strict=True):
            group.update(options)


def _check(values: Any, own: Any, *, name: str) -> None:
    """Refuse values that are not like the object's own.

    Keys that are missing or more are torch's of another version; a None of its own may
    become anything.
    """
    if isinstance(own, Kind):
        check_values(values, own, name=name)
    elif isinstance(own, dict):
        if not isinstance(values, Mapping):
            raise misfit(name, values, "a dictionary")
        if isinstance(own, Counter):  # Milestones: its keys are data.
            check_values(list(values.items()), [(WHOLE, COUNT)], name=name)
            return
        for key, inner in own.items():
            if key in values:
                _check(values[key], inner, name=f"{name}.{key}")
    elif isinstance(own, list | tuple):
        if not isinstance(values, list | tuple) or len(values) != len(own):
            raise misfit(name, values, f"a list of {len(own)}")
        for number, (value, inner) in enumerate(zip(values, own, strict=True)):
            _check(value, inner, name=f"{name}[{number}]")
    else:
        _check_leaf(values, own, name=name)


def _check_leaf(values: Any, own: Any, *, name: str) -> None:
    if isinstance(own, bool):
        check_values(values, FLAG, name=name)
    elif isinstance(own, str):
        if values != own:
            raise misfit(name, values, f"{own!r}, as here")
    elif isinstance(own, Real | Tensor) and not _is_number(values, like=own):
        raise misfit(name, values, "a number")


def _is_number(value: Any, *, like: Real | Tensor) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    if isinstance(value, int) and not COUNT.fits(abs(value)):
        return False
    return math.isfinite(value) or not isinstance(like, int)


@contextmanager
def keeping_dtypes(target: object) -> Iterator[None]:
    """Let an optimizer load a state without rounding it to its parameters' dtype.

    `Optimizer.load_state_dict` casts all but `step`: weights that are kept in float32
    for parameters in bfloat16 would lose 16 bits at each start. An optimizer with a
    `load_state_dict` of its own is left alone.
    """
    if (
        not isinstance(target, Optimizer)
        or type(target).load_state_dict is not Optimizer.load_state_dict
    ):
        yield
        return
    found: list[dict[str, Any]] = []
    # The last of the hooks before and the first of those after, so that the program's
    # own may change what is loaded, and see it as it was saved.
    handles = [
        target.register_load_state_dict_pre_hook(
            lambda _, values: found.append(values)
        ),
        target.register_load_state_dict_post_hook(
            lambda optimizer: _restore(optimizer, found[-1]), prepend=True
        ),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _restore(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    for own, group in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        # Torch's fused and capturable steps need their count in a dtype of their own.
        kept = {"step"} if own.get("fused") or own.get("capturable") else set()
        if _has_torchs_step(type(optimizer)):
            kept |= _LIKE_PARAMETER
        for parameter, number in zip(own["params"], group["params"], strict=True):
            state, values = optimizer.state.get(parameter), saved["state"].get(number)
            if not (isinstance(state, dict) and isinstance(values, Mapping)):
                continue
            for key in (state.keys() & values.keys()) - kept:
                state[key] = _in_its_dtype(values[key], state[key])


def _has_torchs_step(kind: type[Optimizer]) -> bool:
    """Return whether one of torch's own is what computes, perhaps for a subclass."""
    bases = kind.__mro__[: kind.__mro__.index(Optimizer)]
    # Muon and Adafactor say "torch.optim", the others "torch.optim.adam" and the like.
    return any(f"{base.__module__}.".startswith("torch.optim.") for base in bases)


def _in_its_dtype(saved: Any, now: Any) -> Any:
    """Return `now`, with what is a tensor of another dtype in `saved` like there."""
    if isinstance(saved, torch.Tensor) and isinstance(now, torch.Tensor):
        has_changed = saved.dtype != now.dtype and saved.shape == now.shape
        return saved.to(now.device, copy=True) if has_changed else now
    if isinstance(saved, Mapping) and type(now) is dict:
        return {
            key: _in_its_dtype(saved[key], value) if key in saved else value
            for key, value in now.items()
        }
    is_row = isinstance(saved, (list, tuple)) and type(now) in (list, tuple)
    if is_row and len(saved) == len(now):
        return type(now)(map(_in_its_dtype, saved, now))
    return now
