"""The noise of gradients, measured by several replicas together."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest

from elasticrun.adaptive.noise import MeasuredStep
from elasticrun.testing import run_generation
from tests.support.noise import KINDS, assert_unbiased, measured

Found = dict[tuple[str, int | None], list[MeasuredStep]]


def measure_all(kinds: list[str]) -> Found:
    sizes = {kind: [None, 2] for kind in kinds} | {"adversaries": [None]}
    return {
        (kind, size): measured(kind, size=size)
        for kind in kinds
        for size in sizes[kind]
    }


@pytest.mark.slow(30)
@pytest.mark.wide
@pytest.mark.parametrize("world_size", [pytest.param(2, marks=pytest.mark.soak), 3])
def test_it_is_that_of_exact_gradients(world_size: int) -> None:
    unscaled = [kind for kind in KINDS if kind != "scaled"]
    for kinds in ([*unscaled, "adversaries"], ["scaled"]):
        found = run_generation(partial(measure_all, kinds), world_size, timeout=600)
        assert all(other == found[0] for other in found)
        for steps in found[0].values():
            assert_unbiased(steps)


@pytest.mark.parametrize(
    ("batch_size", "world_size"),
    [
        pytest.param(2, 4, marks=pytest.mark.slow),
        pytest.param(3, 4, marks=pytest.mark.slow),
        pytest.param(10, 16, marks=pytest.mark.soak),
    ],
)
def test_padding_does_not_count(batch_size: int, world_size: int) -> None:
    program = partial(measured, batch_size=batch_size)
    found = run_generation(program, world_size, timeout=600)
    assert all(other == found[0] for other in found)
    assert_unbiased(found[0])


def measure_sharded(mesh: tuple[int, ...]) -> Found:
    kinds = ["plain", "clipped", "two losses", "counted"]
    cuts = [("plain", None), *((kind, 2) for kind in kinds)]
    return {
        (kind, size): measured(kind, size=size, mesh=mesh, num_batches=100)
        for kind, size in (cuts if len(mesh) == 1 else [("plain", 2)])
    }


@pytest.mark.slow(30)
@pytest.mark.wide
@pytest.mark.parametrize("mesh", [(3,), (2, 2)])
def test_shards_tell_it_too(mesh: tuple[int, ...]) -> None:
    program = partial(measure_sharded, mesh)
    found = run_generation(program, math.prod(mesh), timeout=600)
    assert all(other == found[0] for other in found)
    for steps in found[0].values():
        assert_unbiased(steps)


@pytest.mark.slow
def test_the_same_cut_tells_the_same_at_any_world_size() -> None:
    cuts = {1: 3, 2: 3, 4: None}  # Four chunks of three samples.
    first, *others = [
        run_generation(partial(measured, size=size, num_batches=20), world_size)[0]
        for world_size, size in cuts.items()
    ]
    for steps in others:
        np.testing.assert_allclose(steps, first, rtol=1e-6)
