"""Remembers a module at each boundary, at the cost of a look at its tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from elasticrun.checkpoint.states.state import CannotRescueError


class ModuleMemory:
    """A module's parameters and buffers as they were at a boundary.

    Parameters change when an optimizer steps, so of these only torch's count of changes
    in place is remembered. Buffers, such as the statistics of a BatchNorm, change in
    each forward pass: they are copied, if they have changed since the last copy.

    Args:
        name: What the module is called in checkpoints.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self._module = module
        self._parameters: list[Tensor] | None = None
        self._buffers: list[Tensor] = []
        self._copies: list[Tensor] = []
        self._copied: list[int] = []  # The buffers' counts of changes.
        self._num_copied = 0

    def remember(self) -> Callable[[], None]:
        """Return what puts the module back.

        Raises:
            CannotRescueError: Its state is more than its tensors. When it is put back:
                a parameter has changed.
        """
        if self._parameters is None:
            self._check()
            self._parameters = list(self._module.parameters())
            self._buffers = list(self._module.buffers())
            self._copies = [each.detach().clone() for each in self._buffers]
            self._copied = _versions(self._buffers)
        if self._buffers:
            self._copy()
        versions = _versions(self._parameters)
        return partial(self._put_back, versions, self._copied, self._num_copied)

    def _check(self) -> None:
        for part in self._module.modules():
            if type(part).get_extra_state is not nn.Module.get_extra_state:
                raise CannotRescueError(
                    f"{type(part).__name__} in {self._name!r} has a state of its own "
                    "(get_extra_state)"
                )

    def _copy(self) -> None:
        now = _versions(self._buffers)
        if now != self._copied:
            with torch.no_grad():
                torch._foreach_copy_(self._copies, self._buffers)
            self._copied = now
            self._num_copied += 1

    def _put_back(self, versions: list[int], buffers: list[int], number: int) -> None:
        assert self._parameters is not None
        tensors = [*self._parameters, *self._buffers]
        now = [*self._module.parameters(), *self._module.buffers()]
        is_same = len(now) == len(tensors) and all(map(_is, now, tensors))
        if not is_same or _versions(self._parameters) != versions:
            raise CannotRescueError(f"parameters of {self._name!r} have changed since")
        if _versions(self._buffers) == buffers:
            return
        if self._num_copied != number:
            raise CannotRescueError(f"buffers of {self._name!r} have changed since")
        with torch.no_grad():
            torch._foreach_copy_(self._buffers, self._copies)


def _versions(tensors: list[Tensor]) -> list[int]:
    return [tensor._version for tensor in tensors]


def _is(one: object, other: object) -> bool:
    return one is other
