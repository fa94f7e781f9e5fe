"""Refuses steps with gradients that nothing has weighed or averaged."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from elasticrun.checkpoint.states.parameter_names import parameters_of
from elasticrun.errors import ElasticRunError
from elasticrun.job.loop import Loop, MicroBatch


class StepCheck:
    """Looks, before an optimizer steps, at where its gradients come from.

    Those of a model's parameters come through the model: else replicas would drift
    apart, which one process alone does not notice. Gradients that a program sets by
    hand are its own affair, so it is autograd that tells of one, at the first parameter
    that is trained: most losses reach it.

    Args:
        optimizer: Of the model.
        module: That the model is being made of.

    Attributes:
        has_forward: Whether a forward pass with gradients went through the model since
            the last step.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self.has_forward = False
        self._optimizer = optimizer
        self._module = module
        # Kept, so that none that comes later gets the id of one.
        self._wrapped = list(module.parameters())
        self._group_sizes = _group_sizes(optimizer)
        self._is_watching = False
        self._has_gradient = False  # Whether one came since the last step.
        self._forward_in: MicroBatch | None = None  # Of the last step that had one.
        self._watch()

    def look(self, loop: Loop | None) -> None:
        """Refuse a step, in a loop or (None) outside, that would train past the model.

        A step with a closure has its gradients behind it.
        """
        if (sizes := _group_sizes(self._optimizer)) != self._group_sizes:
            self._check_wrapped()
            self._group_sizes = sizes
        micro_batch = None if loop is None else loop.current
        if self.has_forward:
            self._forward_in = micro_batch
        elif self._has_gradient and (
            micro_batch is None or micro_batch is not self._forward_in
        ):
            name = type(self._module).__name__
            raise ElasticRunError(
                f"{type(self._optimizer).__name__}.step() found gradients of {name} "
                "that came by a way around its AdaptiveDataParallel: no forward pass "
                "went through that since the last step. Such gradients are neither "
                "weighed nor averaged over the replicas, so each replica would train a "
                "model of its own. Call the model, model(x), and compute the loss from "
                "what it returns, or in the module's forward(). Neither a call of the "
                "module, nor a method that calls self(x), as in model.loss(x, y), goes "
                "through the model."
            )
        self.has_forward = self._has_gradient = False
        if not self._is_watching:
            self._watch()

    def _watch(self) -> None:
        """Let autograd tell of gradients, once any of the parameters is trained."""
        wrapped = {id(each) for each in self._wrapped}
        for parameter in parameters_of(self._optimizer):
            if parameter.requires_grad and id(parameter) in wrapped:
                register: Any = parameter.register_post_accumulate_grad_hook
                register(self._on_gradient)
                self._is_watching = True
                return

    def _on_gradient(self, _: Tensor) -> None:
        self._has_gradient = True

    def _check_wrapped(self) -> None:
        """Refuse parameters that the module has got since it was wrapped."""
        wrapped = {id(each) for each in self._wrapped}
        own = {id(each) for each in parameters_of(self._optimizer)}
        for name, parameter in self._module.named_parameters():
            if id(parameter) in own and id(parameter) not in wrapped:
                raise ElasticRunError(
                    f"{type(self._optimizer).__name__} was given the parameter "
                    f"`{name}`, which {type(self._module).__name__} has got after it "
                    "was wrapped in an AdaptiveDataParallel. Its gradients would be "
                    "neither weighed nor averaged over the replicas. Add layers before "
                    "the module is wrapped; what is to be trained only later is frozen "
                    "until then (requires_grad_(False))."
                )


def _group_sizes(optimizer: Optimizer) -> list[int]:
    return [len(group["params"]) for group in optimizer.param_groups]
