"""Scales learning rates with the global batch size, for one step at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from torch.optim import SGD, Optimizer

from elasticrun.adaptive.noise import is_measured
from elasticrun.job.current import loader_if_any
from elasticrun.job.noise_record import NoiseRecord
from elasticrun.job.stepping import is_between_micro_batches

Scaling = Literal["auto", "adascale", "sqrt", "linear"] | Callable[[float], float]

_BY_SIZE = {"sqrt": math.sqrt, "linear": float}


def needs_gain(scaling: Scaling | None, optimizers: Sequence[Any]) -> bool:
    """Return whether any rate follows the gain, for which noise is to be measured."""
    names = ("auto", "adascale", *_BY_SIZE)
    if scaling is not None and not callable(scaling) and scaling not in names:
        raise ValueError(
            f"scaling={scaling!r} must be one of {', '.join(map(repr, names))}, or a "
            "function from the gain to what rates are multiplied with."
        )
    rules = [_rule_for(scaling, optimizer) for optimizer in optimizers]
    return any(rule is not None and rule not in _BY_SIZE for rule in rules)


def _rule_for(scaling: Scaling | None, optimizer: Any) -> Scaling | None:
    """Return the rule by which an optimizer's rates are scaled.

    Those that divide by the size of gradients, as Adam, need the square root (Malladi
    et al. 2022, arXiv 2205.10287); AdaScale is for plain gradients.
    """
    if scaling != "auto":
        return scaling
    return "adascale" if isinstance(optimizer, SGD) else "sqrt"


class Rates:
    """Multiplies the rates of optimizers for one step, and counts what that is worth.

    The size of a global batch is that of the plan, also of a last one that is shorter.

    Attributes:
        record: What is known of the noise, and the progress, where the gain is needed.
    """

    def __init__(self, scaling: Scaling, record: NoiseRecord | None) -> None:
        self._scaling = scaling
        self.record = record
        self._batch: object = None  # The last one that was counted,
        self._num_scheduled = 1  # and how many steps it is worth to a scheduler.

    @contextmanager
    def scaled(self, optimizer: Optimizer) -> Iterator[None]:
        """Let the optimizer have scaled rates in the block, however that ends."""
        factor = self._factor(optimizer)
        groups = [] if factor == 1.0 else list(optimizer.param_groups)
        before = [group["lr"] for group in groups]
        for group in groups:
            group["lr"] = group["lr"] * factor
        try:
            yield
        finally:
            for group, rate in zip(groups, before, strict=True):
                group["lr"] = rate

    def end_step(self) -> None:
        """Count a step, and learn what was measured in it. Collective in those."""
        loader, record = loader_if_any(), self.record
        if loader is None or record is None:
            return
        loop = loader.running_loop
        if self._batch != (loop, loop.current.number):
            self._batch = (loop, loop.current.number)
            before = record.progress
            record.progress += self._gain(record)
            self._num_scheduled = math.floor(record.progress) - math.floor(before)
        if is_measured(loop.current.number):
            # Not only when the job saves: that depends on the time.
            record.sum_parts()

    def step_scheduler(
        self, method: Any, scheduler: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Step a scheduler as often as the last step is worth, if it counts steps."""
        counts_steps = loader_if_any() is not None and not (args or kwargs)
        is_once = not counts_steps or is_between_micro_batches()
        for _ in range(1 if is_once else self._num_scheduled):
            method(scheduler, *args, **kwargs)

    def _factor(self, optimizer: Optimizer) -> float:
        rule = _rule_for(self._scaling, optimizer)
        if isinstance(rule, str) and rule in _BY_SIZE:
            size, base = _sizes()
            return _BY_SIZE[rule](size / base)
        assert self.record is not None
        gain = self._gain(self.record)
        return float(rule(gain)) if callable(rule) else gain

    def _gain(self, record: NoiseRecord) -> float:
        size, base = _sizes()
        return 1.0 if size == base else float(record.noise.gain(size, base=base))


def _sizes() -> tuple[int, int]:
    """Return the planned size of the running global batch, and the plan's first."""
    loader = loader_if_any()
    return (1, 1) if loader is None else loader.planned_sizes
