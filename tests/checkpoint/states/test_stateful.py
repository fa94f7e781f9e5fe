"""What saves compare of a module, which all replicas have alike."""

from __future__ import annotations

import torch
from torch import nn

from elasticrun.checkpoint.states.stateful import StatefulState


def samples(module: nn.Module) -> dict[str, list[float]]:
    return {**StatefulState("model", module).samples()}


def test_what_is_compared_does_not_grow_with_the_model() -> None:
    layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(500))
    sums = samples(layers)
    assert len(sums) == 64
    names = [name for neighbours in sums for name in neighbours.split(", ")]
    assert names == [name for name, _ in layers.named_parameters()]


def test_what_is_read_does_not_grow_with_a_tensor() -> None:
    for size in (10, 4096, 10**6):
        layer = nn.Linear(size, 1, bias=False)
        nn.init.ones_(layer.weight)
        magnitude, total = samples(layer)["weight"]
        assert magnitude == total  # As many as are read.
        assert min(size, 4096) <= total <= 2 * 4096


def test_a_difference_that_one_of_the_sums_does_not_show_is_seen() -> None:
    layer = nn.Linear(2, 1, bias=False)
    seen = []
    for values in ([3.0, -1.0], [2.0, 0.0], [3.0, 1.0]):
        with torch.no_grad():
            layer.weight.copy_(torch.tensor([values]))
        seen.append(samples(layer)["weight"])
    assert seen[0] != seen[1]  # Of the same sum.
    assert seen[0] != seen[2]  # Of the same magnitude.


def test_a_copy_that_is_not_trained_is_not_compared() -> None:
    """One replica alone may follow the model with it."""
    assert samples(nn.Linear(2, 2).requires_grad_(False)) == {}
