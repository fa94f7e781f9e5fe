"""What an optimizer's `step` and `zero_grad` do about gradients that are hidden."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.job.current import note_step, running_loader
from elasticrun.job.loop import Loop
from elasticrun.job.pace import Pace
from elasticrun.job.stepping import Method, step_between_micro_batches, wrap_method
from elasticrun.parallel.partial_gradients import PartialGradients
from elasticrun.parallel.unstepped import Unstepped
from elasticrun.parallel.weighing import Weighing


class FollowedOptimizer:
    """Lets an optimizer step once in a global batch, with the gradients of all of it.

    Args:
        optimizer: Whose methods are wrapped.
        partial: The gradients that are hidden before its step.
        weighing: Knows what those are to be corrected by.
        pace: Is told of its steps where there are several replicas, else None.

    Attributes:
        put_off_in: The last turn in which its step was put off, to that of the last
            micro-batch.
        unstepped: Whether gradients wait for its step.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        partial: PartialGradients,
        weighing: Weighing,
        pace: Pace | None,
    ) -> None:
        self.put_off_in: object = None
        self.unstepped = Unstepped()
        self._partial = partial
        self._weighing = weighing
        self._pace = pace
        partial.add_optimizer(optimizer)
        wrap_method(optimizer, "step", self._stepping, acts_once=True)
        wrap_method(optimizer, "zero_grad", self._zeroing)

    def _stepping(self, method: Method) -> Method:
        partial, pace, unstepped = self._partial, self._pace, self.unstepped

        def step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
            loop = None
            loader = running_loader()
            if loader is not None:
                loop = loader.running_loop
                if not loop.current[2].is_step:
                    return self._put_off(optimizer, loop.current, *args, **kwargs)
                if pace is not None:
                    pace.begin(loop)
            note_step()
            if args or kwargs:
                return self._step_by_closure(method, optimizer, loop, *args, **kwargs)
            unstepped.note_step(loop)
            hides = partial.hides
            if hides:
                partial.correct(self._weighing)
                partial.show_the_rest()
            result = method(optimizer)
            if hides:
                partial.drop_due(optimizer)
            return result

        return step

    def _step_by_closure(
        self,
        method: Method,
        optimizer: Optimizer,
        loop: Loop | None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Let the optimizer step; the backward pass is in the closure."""
        self.unstepped.note_step(loop, has_closure=True)
        hides = self._partial.hides
        result = method(optimizer, *args, **kwargs)
        if hides:
            self._partial.drop_due(optimizer)
        return result

    def _put_off(
        self, optimizer: Optimizer, turn: object, *args: Any, **kwargs: Any
    ) -> Any:
        """Note that gradients are due: the global batch is incomplete."""
        result = step_between_micro_batches(optimizer, *args, **kwargs)
        self._partial.make_due(optimizer, is_again=self.put_off_in is turn)
        self.put_off_in = turn
        return result

    def _zeroing(self, method: Method) -> Method:
        partial, unstepped = self._partial, self.unstepped

        def zero_grad(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            if unstepped.loop is not None:
                unstepped.note_zeroed(running_loop())
            if partial.hides:
                partial.zero(parameters_of(optimizer))
            method(optimizer, *args, **kwargs)

        return zero_grad


def running_loop() -> Loop | None:
    """Return the loop that is running, None outside of loops."""
    loader = running_loader()
    return None if loader is None else loader.running_loop
