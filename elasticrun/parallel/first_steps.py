"""Telling one replica, in its first steps, what several replicas would refuse."""

from __future__ import annotations

from torch import nn
from torch.optim import Optimizer

from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.errors import warn_at_program
from elasticrun.parallel.late import LateGradients

_NUM_FORWARDS = 8  # After so many forward passes a program has shown what it does.
_MOST_NAMES = 5


class FirstSteps:
    """Watches the first steps of a module that one replica trains.

    Args:
        may_be_unused: Whether DDP is to look for parameters without a gradient.

    Attributes:
        is_over: Whether it has seen enough.
    """

    def __init__(self, module: nn.Module, *, may_be_unused: bool) -> None:
        self.is_over = False
        self._module = module
        self._may_be_unused = may_be_unused
        self._num_forwards = 0
        self._late = LateGradients([*module.parameters()], self._warn_of_late)

    def note_forward(self, *, is_step: bool) -> None:
        """Note a forward pass, and whether its global batch is complete with it."""
        self._num_forwards += 1
        self._late.expect(is_reduced=is_step)
        if self._num_forwards >= _NUM_FORWARDS:
            self.is_over = True
            self._late.close()

    def note_step(self, optimizer: Optimizer) -> None:
        """Warn if an optimizer is about to step without all of its gradients."""
        if self._may_be_unused or not self._num_forwards:
            return
        own = set(parameters_of(optimizer))
        missing = [
            name
            for name, parameter in self._module.named_parameters()
            if parameter in own and parameter.requires_grad and parameter.grad is None
        ]
        if missing:
            self._may_be_unused = True  # Once is enough.
            more = f" and {len(missing) - _MOST_NAMES} more"
            warn_at_program(
                f"{type(optimizer).__name__} steps without a gradient of "
                f"{', '.join(missing[:_MOST_NAMES])}"
                f"{more if len(missing) > _MOST_NAMES else ''}, on which the loss does "
                "not depend. One replica does not mind; several fail in the next "
                "step, since they average all gradients. Freeze what is not trained "
                "(requires_grad_(False)), or give AdaptiveDataParallel "
                "find_unused_parameters=True."
            )

    def _warn_of_late(self) -> None:
        self._num_forwards = _NUM_FORWARDS  # The next one is the last.
        warn_at_program(
            f"{type(self._module).__name__} has had two backward passes after one "
            "forward pass. One replica does not mind; several refuse it, since they "
            "average gradients in the first. Add the losses and call backward() once, "
            "or let each loss have its forward pass and then at once its backward pass."
        )
