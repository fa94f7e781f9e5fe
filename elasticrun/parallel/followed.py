"""What an optimizer's `step` and `zero_grad` do about gradients that are hidden."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.job.current import note_step, running_loader
from elasticrun.job.loop import Loop
from elasticrun.job.pace import Pace
from elasticrun.job.stepping import replace_method, step_between_micro_batches
from elasticrun.parallel.partial_gradients import PartialGradients
from elasticrun.parallel.unstepped import Unstepped
from elasticrun.parallel.weighing import Weighing


class FollowedOptimizer:
    """Lets an optimizer step once in a global batch, with the gradients of all of it.

    Args:
        optimizer: Whose methods are replaced.
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
        replace_method(optimizer, "step", self._step, acts_once=True)
        replace_method(optimizer, "zero_grad", self._zero_grad)

    def _step(
        self, method: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> Any:
        loop = None
        loader = running_loader()
        if loader is not None:
            loop = loader.running_loop
            if not loop.current[2].is_step:
                return self._put_off(optimizer, loop.current, *args, **kwargs)
            if self._pace is not None:
                self._pace.begin(loop)
        note_step()
        partial = self._partial
        hides = partial.hides
        has_closure = bool(args or kwargs)  # Then the backward pass is in that.
        self.unstepped.note_step(loop, has_closure=has_closure)
        if hides and not has_closure:
            partial.correct(self._weighing)
            partial.show_the_rest()
        result = method(optimizer, *args, **kwargs)
        if hides:
            partial.drop_due(optimizer)
        return result

    def _put_off(
        self, optimizer: Optimizer, turn: object, *args: Any, **kwargs: Any
    ) -> Any:
        """Note that gradients are due: the global batch is incomplete."""
        result = step_between_micro_batches(optimizer, *args, **kwargs)
        self._partial.make_due(optimizer, is_again=self.put_off_in is turn)
        self.put_off_in = turn
        return result

    def _zero_grad(
        self, method: Any, optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        if self.unstepped.loop is not None:
            self.unstepped.note_zeroed(running_loop())
        if self._partial.hides:
            self._partial.zero(parameters_of(optimizer))
        method(optimizer, *args, **kwargs)


def running_loop() -> Loop | None:
    """Return the loop that is running, None outside of loops."""
    loader = running_loader()
    return None if loader is None else loader.running_loop
