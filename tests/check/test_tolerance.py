"""How far apart values are, and how far they may be."""

from __future__ import annotations

import torch

from elasticrun.check.replica.fields import fields_of_state
from elasticrun.check.tolerance import distance, is_within
from elasticrun.checkpoint.states.stateful import StatefulState


def test_the_distance_of_sketches_is_that_of_tensors() -> None:
    generator = torch.Generator().manual_seed(3)
    first = torch.randn(50_000, generator=generator)
    moved = first + 1e-3 * torch.randn(50_000, generator=generator)
    nets = []
    for values in (first, moved):
        net = torch.nn.Linear(50_000, 1, bias=False)
        net.weight.data.copy_(values[None])
        nets.append(fields_of_state(StatefulState("net", net))["net.weight"])
    true = float((first.double() - moved.double()).norm())
    assert true / 2 < distance(*nets) < true * 2
    assert distance(nets[0], nets[0]) == 0.0


def test_tolerance_grows_with_what_rounding_did() -> None:
    assert is_within(1.0, 1.003, 0.001)
    assert not is_within(1.0, 1.01, 0.001)
    assert not is_within(0.1, 0.1000001, 0.0)
    assert is_within(0.1, 0.1 + 1e-16, 0.0)
    assert not is_within(3, 4, 0.0)
    assert not is_within("a", "b", 1.0)
