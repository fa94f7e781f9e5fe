"""Making a global batch of several micro-batches one step: whole gradients, single acts."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from elasticrun.current import current_job
from elasticrun.errors import ElasticRunError

if TYPE_CHECKING:
    from elasticrun.data.loader import AdaptiveDataLoader


def is_between_micro_batches() -> bool:
    """Return whether the running micro-batch leaves its global batch incomplete."""
    loader = current_job().loader
    return loader is not None and not loader.is_step


# Acting once per global batch.


def act_once_per_global_batch(target: Any) -> None:
    """Let the stepping methods of a known torch object do nothing between micro-batches.

    Optimizers, their schedulers, `GradScaler` and `AveragedModel` are changed on the
    object itself, as torch's schedulers change `step`. Other objects stay as they are.
    """
    if isinstance(target, Optimizer):
        _wrap(target, "step", _step_optimizer, mark="_acts_once")
    elif isinstance(target, LRScheduler):
        # Its state is its whole __dict__, in which a wrapper would be saved.
        if not isinstance(target, _ActsOnce):
            target.__class__ = _acting_once(type(target))
    elif isinstance(target, torch.amp.GradScaler):
        _wrap(target, "step", _step_scaler, mark="_acts_once")
        for name in ("unscale_", "update"):
            _wrap(target, name, _act, mark="_acts_once")
    elif isinstance(target, torch.optim.swa_utils.AveragedModel):
        _wrap(target, "update_parameters", _act, mark="_acts_once")


def _act(_: Any, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return None if is_between_micro_batches() else method(*args, **kwargs)


def _step_optimizer(
    optimizer: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if not is_between_micro_batches():
        return method(*args, **kwargs)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ElasticRunError(
            "LBFGS stepped between two micro-batches. It evaluates its closure at several "
            "points, and the gradients of earlier micro-batches hold for the first one "
            "only. Leave out max_local_batch_size, or use another optimizer."
        )
    closure = args[0] if args else kwargs.get("closure")
    if closure is None:
        return None
    with torch.enable_grad():  # For its gradients; they accumulate as any other.
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
    if hasattr(optimizer.step, "_acts_once"):
        optimizer.step()  # It only notes that what was accumulated counts.
    return None


class _ActsOnce:
    """Marks the classes that `_acting_once` makes."""


@functools.cache
def _acting_once(kind: type[LRScheduler]) -> type[LRScheduler]:
    """Return a scheduler class whose `step` does nothing between micro-batches."""

    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        if not is_between_micro_batches():
            kind.step(self, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(
        kind.__name__,
        (_ActsOnce, kind),
        {"step": functools.wraps(kind.step)(step)} | names,
    )


def _wrap(
    target: Any, name: str, around: Callable[..., Any], *, mark: str | None = None
) -> None:
    """Let `around(target, method, ...)` stand for a method, on the object itself.

    As a bound method of the target it can be copied and pickled with it, and torch's
    schedulers, which look for `__func__`, can wrap `step` once more.
    """
    inner = getattr(target, name)
    if mark is not None and hasattr(inner, mark):
        return
    is_patched = name in vars(target)
    function = inner if is_patched else getattr(type(target), name)

    @functools.wraps(function)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = function if is_patched else MethodType(function, self)
        return around(self, bound, *args, **kwargs)

    if mark is not None:
        setattr(method, mark, True)
    setattr(target, name, MethodType(method, target))


# Whole gradients.


class Accumulation:
    """The gradients of some parameters while their global batch is incomplete.

    A gradient that reaches a parameter is first multiplied with its micro-batch's weight.
    Before the last micro-batch the sum is then taken out of sight, so that a program that
    clips, unscales or zeroes gradients after each micro-batch finds none. In the last one
    the sums come back before the first gradient is added, so that DDP reduces them, also
    for parameters without a gradient there.

    A program may also accumulate what no step shall see: in a GAN, the generator's loss
    reaches the discriminator, which zeroes that before its own loss. Therefore partial
    gradients are fresh until an optimizer steps, and `zero_grad` drops those; counted
    ones stay until the optimizer has really stepped.

    The hooks sit on the nodes that add to `.grad`: `torch.autograd.grad` passes them by,
    and hooks of the user's own on the parameters see the gradients of their loss.

    Args:
        parameters: Those of one module.
        is_reduced: Whether a reduction over replicas follows in the last micro-batch.
    """

    def __init__(self, parameters: Iterable[Tensor], *, is_reduced: bool) -> None:
        self._parameters = list(parameters)
        self._is_reduced = is_reduced
        self._is_hooked: list[bool] = []
        self._hooks: list[Any] = []
        self._lock = threading.Lock()  # Autograd has one thread for each device.
        self._global_batch: object = None
        self._micro_batch: object = None
        self._fresh: dict[Tensor, Tensor] = {}
        self._counted: dict[Tensor, Tensor] = {}
        self._shown: set[Tensor] = set()
        self._steps_of: set[Tensor] = set()
        self._has_strays = False

    def prepare(self) -> bool:
        """Get ready for a forward pass; return whether it is a global batch's last.

        Without weights and partial gradients no hooks are left.
        """
        loader = current_job().loader
        is_step = loader is None or loader.is_step
        if self._fresh or self._counted:
            self._drop_if_abandoned()
        is_needed = (
            not is_step
            or (loader is not None and loader.loss_weight != 1.0)
            or bool(self._fresh or self._counted)
        )
        if is_needed:
            self._hook()
        elif self._hooks:
            self.unhook()
        return is_step

    def follow(self, optimizer: Optimizer) -> None:
        """Let what the optimizer steps and zeroes decide which partial gradients count."""
        self._steps_of.update(_parameters_of(optimizer))
        counted_in: object = None

        def step(
            _: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            nonlocal counted_in
            if not is_between_micro_batches():
                self._before_step()
                result = method(*args, **kwargs)
                self._after_step(_parameters_of(optimizer))
                return result
            result = method(*args, **kwargs)
            micro_batch = _running_micro_batch()
            self._count(optimizer, is_again=counted_in is micro_batch)
            counted_in = micro_batch
            return result

        def zero_grad(
            _: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> None:
            self._drop_fresh(_parameters_of(optimizer))
            method(*args, **kwargs)

        _wrap(optimizer, "step", step)
        _wrap(optimizer, "zero_grad", zero_grad)

    def zero_grad(self) -> None:
        """Drop what has been accumulated since the last step, as `zero_grad` does."""
        self._drop_fresh(self._steps_of)

    def unhook(self) -> None:
        """Remove the hooks until `prepare` finds a need for them."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._is_hooked = []

    def _hook(self) -> None:
        is_hooked = [parameter.requires_grad for parameter in self._parameters]
        if is_hooked == self._is_hooked:
            return
        self.unhook()
        for parameter in self._parameters:
            if parameter.requires_grad:
                node = get_gradient_edge(parameter).node
                before = functools.partial(self._before_adding, parameter)
                after = functools.partial(self._after_adding, parameter)
                self._hooks += [
                    node.register_prehook(before),
                    # After DDP's, which notes a parameter as used by its gradient.
                    node.register_hook(after),
                    _Held(node),
                ]
        self._is_hooked = is_hooked

    def _before_adding(
        self, parameter: Tensor, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor] | None:
        gradient = gradients[0]
        loader = current_job().loader
        with self._lock:
            if loader is None or loader.is_step:
                self._show()
            else:
                self._hide_earlier(loader)
        weight = 1.0 if loader is None else loader.loss_weight
        if gradient is None or weight == 1.0:
            return None
        if weight == 0.0:  # A padding sample, whose gradient may be NaN.
            return (torch.zeros_like(gradient),)
        return (gradient * weight,)

    def _after_adding(
        self, parameter: Tensor, _: Any, gradients: tuple[Tensor | None, ...]
    ) -> None:
        if gradients[0] is not None and is_between_micro_batches():
            self._hide(parameter)

    def _hide_earlier(self, loader: AdaptiveDataLoader) -> None:
        """Hide gradients from before the global batch, at a micro-batch's first one."""
        micro_batch = _micro_batch_of(loader)
        if self._micro_batch is micro_batch:
            return
        self._micro_batch = micro_batch
        for parameter in self._parameters:
            if parameter.grad is not None:
                # May be a view of memory that DDP will write to.
                parameter.grad = parameter.grad.clone()
                self._hide(parameter)

    def _hide(self, parameter: Tensor) -> None:
        self._drop_if_abandoned()
        self._global_batch = _running_global_batch()
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        _add_to(self._fresh, parameter, gradient.detach())

    def _show(self) -> None:
        """Put hidden gradients back where the step will look for them."""
        if not self._fresh and len(self._counted) == len(self._shown):
            return
        self._drop_if_abandoned()
        with torch.no_grad():
            for parameter, gradient in self._fresh.items():
                _add_to_gradient(parameter, gradient)
            self._fresh = {}
            for parameter in self._counted.keys() - self._shown:
                gradient = self._counted[parameter]
                keep = gradient.clone() if self._has_strays else gradient
                _add_to_gradient(parameter, keep)
        if self._has_strays:  # A zero_grad may come before the step: then show again.
            self._shown = set(self._counted)
        else:
            self._counted = {}

    def _count(self, optimizer: Optimizer, *, is_again: bool) -> None:
        """Keep what an optimizer would step with now until it really steps."""
        for parameter in _parameters_of(optimizer):
            if parameter not in self._steps_of:
                continue
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
                self._hide(parameter)
            gradient = self._fresh.pop(parameter, None)
            if gradient is None:
                continue
            if is_again:
                raise ElasticRunError(
                    f"{type(optimizer).__name__}.step() was called twice in one "
                    "micro-batch. The global batch is one step, taken at its last "
                    "micro-batch, so the gradients of a second one would have to be "
                    "computed after it. Leave out max_local_batch_size, or step once in "
                    "each turn of the loop."
                )
            _add_to(self._counted, parameter, gradient)

    def _before_step(self) -> None:
        if not self._fresh and len(self._counted) == len(self._shown):
            return
        self._drop_if_abandoned()
        if self._is_reduced and (self._fresh or self._counted):
            raise ElasticRunError(
                "the optimizer stepped in the last micro-batch of a global batch, through "
                "which no gradient came. The gradients of the earlier ones are reduced "
                "over the replicas in its backward pass, so they would be lost. Let each "
                "micro-batch have a forward and a backward pass through the model; a "
                "loss to leave out can be multiplied with 0."
            )
        self._show()

    def _after_step(self, parameters: list[Tensor]) -> None:
        if self._counted:
            self._shown.difference_update(parameters)
            for parameter in parameters:
                self._counted.pop(parameter, None)

    def _drop_fresh(self, parameters: Iterable[Tensor]) -> None:
        if not self._fresh and not self._shown:
            return
        parameters = list(parameters)
        for parameter in parameters:
            if self._fresh.pop(parameter, None) is not None:
                self._has_strays = True
        self._shown.difference_update(parameters)

    def _drop_if_abandoned(self) -> None:
        """Drop what a global batch left behind that a loop did not complete."""
        if (self._fresh or self._counted) and (
            self._global_batch != _running_global_batch()
        ):
            self._fresh, self._counted, self._shown = {}, {}, set()


class _Held:
    """Keeps a node alive: a parameter has only a weak reference to it."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def remove(self) -> None:
        self._node = None


def _add_to(sums: dict[Tensor, Tensor], parameter: Tensor, gradient: Tensor) -> None:
    previous = sums.get(parameter)
    sums[parameter] = gradient if previous is None else _sum(previous, gradient)


def _add_to_gradient(parameter: Tensor, gradient: Tensor) -> None:
    previous = parameter.grad
    parameter.grad = gradient if previous is None else _sum(previous, gradient)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum, in the memory of the first where both are dense."""
    return second + first if first.is_sparse else first.add_(second)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]


def _running_global_batch() -> object:
    """Return what is equal for, and only for, micro-batches of one global batch."""
    loader = current_job().loader
    return None if loader is None else (loader._loop, loader.batch_index)


def _running_micro_batch() -> object:
    loader = current_job().loader
    return None if loader is None else _micro_batch_of(loader)


def _micro_batch_of(loader: AdaptiveDataLoader) -> object:
    return loader._loop.current
