"""Refuses steps with gradients that nothing has weighed or averaged."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.errors import ElasticRunError
from elasticrun.job.loop import Loop, MicroBatch


class StepCheck:
    """Refuses the steps of an optimizer that would train past its model.

    Replicas would drift apart, which one process alone does not notice. Autograd tells
    of gradients at the first parameter that is trained, which most losses reach; so
    those that a program sets by hand are its own affair.

    Attributes:
        has_forward: Whether a forward pass with gradients went through the model since
            the last step.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self.has_forward = False
        self._optimizer = optimizer
        self._module = module
        # Kept, so that none that comes later gets the id of one.
        self._wrapped = {id(each): each for each in module.parameters()}
        self._group_sizes: list[int] = []
        self._has_gradient = False  # Whether one came since the last step.
        self._forward_in: MicroBatch | None = None  # Of the last step that had one.
        for parameter in parameters_of(optimizer):
            if parameter.requires_grad and id(parameter) in self._wrapped:
                register: Any = parameter.register_post_accumulate_grad_hook
                register(self._on_gradient)
                break

    def look(self, loop: Loop | None) -> None:
        """Look at what has come since the last step, in a loop or (None) outside."""
        sizes = [len(group["params"]) for group in self._optimizer.param_groups]
        if sizes != self._group_sizes:
            self._check_wrapped()
            self._group_sizes = sizes
        micro_batch = None if loop is None else loop.current
        if self.has_forward:
            self._forward_in = micro_batch
        elif self._has_gradient and (
            loop is None or micro_batch is not self._forward_in
        ):
            raise ElasticRunError(
                f"{type(self._optimizer).__name__}.step() came to gradients of "
                f"{type(self._module).__name__} without a forward pass through its "
                "AdaptiveDataParallel since the last step. They are neither weighed "
                "nor averaged over the replicas, so each would train a model of its "
                "own. Call the model, model(x), and compute the loss from what it "
                "returns, or in the module's forward(). A call of the bare module goes "
                "past it, and so does a method that calls self(x): model.loss(x, y)."
            )
        self.has_forward = self._has_gradient = False

    def _on_gradient(self, _: Tensor) -> None:
        self._has_gradient = True

    def _check_wrapped(self) -> None:
        """Refuse parameters that the module has got since it was wrapped."""
        given = {id(each) for each in parameters_of(self._optimizer)}
        for name, parameter in self._module.named_parameters():
            if id(parameter) in given and id(parameter) not in self._wrapped:
                raise ElasticRunError(
                    f"{type(self._optimizer).__name__} was given the parameter "
                    f"`{name}`, which {type(self._module).__name__} has got after it "
                    "was wrapped in an AdaptiveDataParallel. Its gradients would be "
                    "neither weighed nor averaged over the replicas. Add layers before "
                    "the module is wrapped; what is to be trained only later is frozen "
                    "until then (requires_grad_(False))."
                )
