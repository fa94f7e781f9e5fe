"""Gradients that come after those of a forward pass have been averaged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import get_gradient_edge


class LateGradients:
    """Notices a second backward pass after one forward pass.

    DDP takes part in the first only. One parameter is watched, the first that is
    trained: most losses reach it.

    Args:
        parameters: Those of one module.
        on_late: Called when such a gradient is about to be added.
    """

    def __init__(
        self, parameters: Sequence[Tensor], on_late: Callable[[], None]
    ) -> None:
        self._parameters = parameters
        self._on_late = on_late
        self._held: list[Any] = []  # The node, which dies without it, and the hook.
        self._is_awaited = False
        self._is_over = False
        self.watch()

    def watch(self) -> None:
        """Watch a parameter; again when others are trained, or they have moved."""
        self.close()
        first = next((each for each in self._parameters if each.requires_grad), None)
        if first is not None:
            node = get_gradient_edge(first).node
            self._held = [node, node.register_prehook(self._note_gradient)]

    def expect(self, *, is_reduced: bool) -> None:
        """Note a forward pass, and whether its gradients are averaged at once."""
        self._is_awaited = is_reduced
        self._is_over = False

    def close(self) -> None:
        """Watch no longer."""
        if self._held:
            self._held[1].remove()
            self._held = []

    def _note_gradient(self, _: tuple[Tensor | None, ...]) -> None:
        if self._is_over:
            self._on_late()
        self._is_over = self._is_awaited
