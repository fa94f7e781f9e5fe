"""The gradients of a module while their global batch is incomplete."""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from elasticrun.accumulation import is_between_micro_batches, wrap_method
from elasticrun.current import current_job
from elasticrun.errors import ElasticRunError

if TYPE_CHECKING:
    from elasticrun.data.loader import AdaptiveDataLoader


_STEP_BEFORE_LOSS = (
    "a loss was computed after an optimizer had stepped the same model in one turn of "
    "the loop. Where max_local_batch_size cuts a global batch into micro-batches, the "
    "step is taken at the last one, so the losses before that see the parameters of "
    "before the step. To get what whole batches would give, compute all losses before "
    "the first step, or leave out max_local_batch_size."
)


class PartialGradients:
    """Weighs the gradients of some parameters, and hides them until all have come.

    A gradient that reaches a parameter is first multiplied with its micro-batch's
    weight. Before the last micro-batch the sum is then taken out of sight, so that a
    program that clips, unscales or zeroes gradients after each micro-batch finds none.
    In the last one the sums come back before the first gradient is added, so that DDP
    reduces them, also for parameters that have no gradient there.

    A program may also accumulate what no step is to see: in a GAN the generator's loss
    reaches the discriminator, which is zeroed before its own loss. So partial gradients
    are fresh until an optimizer steps; then they count, and what `zero_grad` had taken
    from the fresh ones is dropped. Counted ones stay until the optimizer has really
    stepped. Without a step between micro-batches (the loop asks for `is_step` itself)
    nothing is dropped.

    The hooks sit on the graph's nodes that add to `.grad`: `torch.autograd.grad` passes
    them by, and the user's own hooks on parameters see the gradients of their loss.

    Args:
        parameters: Those of one module.
        ddp: What reduces them over replicas.
    """

    def __init__(
        self, parameters: Iterable[Tensor], ddp: DistributedDataParallel | None
    ) -> None:
        self._parameters = list(parameters)
        self._ddp = ddp
        self._searches_unused = ddp is not None and ddp.find_unused_parameters
        self._awaits_backward = False
        self._hooked: list[bool] = []
        self._hooks: list[Any] = []
        self._lock = threading.Lock()  # Autograd has one thread for each device.
        self._stepped: set[Tensor] = set()
        self._global_batch: object = None
        self._micro_batch: object = None
        self._counted_in: object = None
        self._has_warned = False
        self._fresh: dict[Tensor, Tensor] = {}
        self._zeroed: dict[Tensor, Tensor] = {}
        self._counted: dict[Tensor, Tensor] = {}
        self._shown: set[Tensor] = set()  # Counted ones that `.grad` contains.
        self._has_strays = False

    def prepare(self) -> bool:
        """Get ready for a forward pass; return whether it is the global batch's last.

        Where nothing is to be weighed or hidden, no hooks are left.
        """
        loader = current_job().loader
        is_step = loader is None or loader.is_step
        self._drop_abandoned()
        if (
            not is_step
            or (loader is not None and loader.loss_weight != 1.0)
            or self._has_hidden()
        ):
            self._hook()
        elif self._hooks:
            self.unhook()
        if self._searches_unused:
            self._make_ddp_forget(is_step=is_step)
        return is_step

    def follow(self, optimizer: Optimizer) -> None:
        """Let what an optimizer steps and zeroes decide which gradients count."""
        self._stepped.update(_parameters_of(optimizer))
        counted_in: object = None

        def step(
            _: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            nonlocal counted_in
            if is_between_micro_batches():
                result = method(*args, **kwargs)
                self._count(optimizer, is_again=counted_in is _running_micro_batch())
                counted_in = self._counted_in = _running_micro_batch()
                return result
            if not args and not kwargs:  # A closure has its backward pass yet to come.
                self._show_the_rest()
            result = method(*args, **kwargs)
            self._drop_counted(optimizer)
            return result

        def zero_grad(
            _: Optimizer, method: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> None:
            self._zero(_parameters_of(optimizer))
            method(*args, **kwargs)

        wrap_method(optimizer, "step", step)
        wrap_method(optimizer, "zero_grad", zero_grad)

    def zero_grad(self) -> None:
        """Zero what has been accumulated since the last step."""
        self._zero(self._stepped)

    def unhook(self) -> None:
        """Remove the hooks; `prepare` puts them back if it finds a need."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._hooked = [], []

    # The hooks.

    def _hook(self) -> None:
        hooked = [parameter.requires_grad for parameter in self._parameters]
        if hooked == self._hooked:
            return
        self.unhook()
        for parameter in self._parameters:
            if parameter.requires_grad:
                self._hook_one(parameter)
        self._hooked = hooked

    def _hook_one(self, parameter: Tensor) -> None:
        node = get_gradient_edge(parameter).node
        before = functools.partial(self._before_adding, parameter)
        after = functools.partial(self._after_adding, parameter)
        self._hooks += [_Held(node), node.register_prehook(before)]
        if self._searches_unused:
            # After DDP's, which takes a parameter for unused if it sees no gradient.
            self._hooks.append(node.register_hook(after))
        else:
            # Before DDP's: if that still waits for the backward pass of an earlier
            # forward pass, it would reduce what it sees.
            register: Any = parameter.register_post_accumulate_grad_hook
            self._hooks.append(register(after))

    def _make_ddp_forget(self, *, is_step: bool) -> None:
        """Let DDP wait no more for the backward pass of an earlier forward pass.

        It would reduce the first partial gradients instead, and forget what was used.
        """
        assert self._ddp is not None
        if is_step:
            self._awaits_backward |= self._ddp.require_backward_grad_sync
        elif self._awaits_backward:
            self._awaits_backward = False
            self._ddp.reducer._reset_state()

    def _before_adding(
        self, parameter: Tensor, gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor] | None:
        gradient = gradients[0]
        loader = current_job().loader
        with self._lock:
            if loader is None or loader.is_step:
                self._awaits_backward = False
                self._show()
            else:
                self._hide_earlier(loader)
                self._hide(parameter, is_own=False)
        weight = 1.0 if loader is None else loader.loss_weight
        if gradient is None or weight == 1.0:
            return None
        if weight == 0.0:  # A padding sample's, which may be infinite.
            return (torch.zeros_like(gradient),)
        return (gradient * weight,)

    def _after_adding(self, parameter: Tensor, *_: Any) -> None:
        if is_between_micro_batches():
            self._hide(parameter)

    # Between fresh, counted, and what `.grad` shows.

    def _has_hidden(self) -> bool:
        has_uncounted = bool(self._fresh or self._zeroed)
        return has_uncounted or len(self._counted) > len(self._shown)

    def _hide_earlier(self, loader: AdaptiveDataLoader) -> None:
        """Hide what `.grad` held before this micro-batch's first gradient."""
        micro_batch = _micro_batch_of(loader)
        if self._counted_in is micro_batch and not self._has_warned:
            self._has_warned = True
            warnings.warn(_STEP_BEFORE_LOSS, stacklevel=2)
        if self._micro_batch is not micro_batch:
            self._micro_batch = micro_batch
            for parameter in self._parameters:
                self._hide(parameter, is_own=False)

    def _hide(self, parameter: Tensor, *, is_own: bool = True) -> None:
        gradient = parameter.grad
        if gradient is None:
            return
        self._drop_abandoned()
        self._global_batch = _running_global_batch()
        parameter.grad = None
        gradient = gradient.detach()
        # Memory that is not ours may be a view of DDP's, which will write to it.
        _add(self._fresh, parameter, gradient if is_own else gradient.clone())

    def _show(self) -> None:
        """Put what is hidden back where the step looks for it."""
        self._drop_abandoned()
        if not self._has_hidden():
            return
        for hidden in (self._zeroed, self._fresh):
            for parameter, gradient in hidden.items():
                self._show_one(parameter, gradient)
        for parameter, gradient in self._counted.items():
            if parameter not in self._shown:
                keep = gradient.clone() if self._has_strays else gradient
                self._show_one(parameter, keep)
        self._fresh, self._zeroed = {}, {}
        if self._has_strays:  # It may be zeroed with them, and then be due once more.
            self._shown = set(self._counted)
        else:
            self._counted = {}

    def _show_one(self, parameter: Tensor, gradient: Tensor) -> None:
        previous = parameter.grad
        with torch.no_grad():
            parameter.grad = gradient if previous is None else _sum(previous, gradient)

    def _show_the_rest(self) -> None:
        self._drop_abandoned()
        if not self._has_hidden():
            return
        if self._ddp is not None:
            raise ElasticRunError(
                "an optimizer stepped at the last micro-batch of a global batch, but "
                "that had no backward pass through the model, in which the gradients "
                "of the earlier ones are reduced over the replicas. Let each "
                "micro-batch have one; a loss to leave out can be multiplied with 0."
            )
        self._show()

    def _count(self, optimizer: Optimizer, *, is_again: bool) -> None:
        """Keep what the optimizer would step with now until it really steps."""
        for parameter in _parameters_of(optimizer):
            if parameter not in self._stepped:
                continue
            if self._zeroed.pop(parameter, None) is not None:
                self._has_strays = True
            self._hide(parameter, is_own=False)
            gradient = self._fresh.pop(parameter, None)
            if gradient is None:
                continue
            if is_again:
                raise ElasticRunError(
                    f"{type(optimizer).__name__}.step() was called twice in one "
                    "micro-batch. A global batch is one step, taken at its last "
                    "micro-batch, and gradients for another would have to be computed "
                    "after that. Leave out max_local_batch_size, or step once in each "
                    "turn of the loop."
                )
            _add(self._counted, parameter, gradient)

    def _drop_counted(self, optimizer: Optimizer) -> None:
        if self._counted:
            for parameter in _parameters_of(optimizer):
                self._counted.pop(parameter, None)
                self._shown.discard(parameter)

    def _zero(self, parameters: Iterable[Tensor]) -> None:
        if not self._fresh and not self._shown:
            return
        for parameter in parameters:
            self._shown.discard(parameter)
            gradient = self._fresh.pop(parameter, None)
            if gradient is None:
                continue
            if parameter in self._counted:
                self._has_strays = True
            else:
                _add(self._zeroed, parameter, gradient)

    def _drop_abandoned(self) -> None:
        """Drop what is left of a global batch that its loop did not complete."""
        if not (self._fresh or self._zeroed or self._counted):
            return
        if self._global_batch != _running_global_batch():
            self._fresh, self._zeroed, self._counted = {}, {}, {}
            self._shown = set()


class _Held:
    """Keeps a node alive, of which a parameter itself has a weak reference only."""

    def __init__(self, node: Any) -> None:
        self._node = node

    def remove(self) -> None:
        self._node = None


def _add(sums: dict[Tensor, Tensor], parameter: Tensor, gradient: Tensor) -> None:
    previous = sums.get(parameter)
    sums[parameter] = gradient if previous is None else _sum(previous, gradient)


def _sum(first: Tensor, second: Tensor) -> Tensor:
    """Return the sum, in the memory of the first where that is dense."""
    return second + first if first.is_sparse else first.add_(second)


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]


def _running_global_batch() -> object:
    """Return what equals itself in one global batch only, or None outside of loops."""
    loader = current_job().loader
    return None if loader is None else (loader._loop, loader.batch_index)


def _running_micro_batch() -> object:
    loader = current_job().loader
    return None if loader is None else _micro_batch_of(loader)


def _micro_batch_of(loader: AdaptiveDataLoader) -> object:
    return loader._loop.current
