"""Loads an optimizer's state without the casts of `Optimizer.load_state_dict`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

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
