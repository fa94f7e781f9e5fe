"""The generators of GPUs, of which a machine that runs these tests has none."""

from __future__ import annotations

import io

import pytest
import torch

from elasticrun.checkpoint.states.generators import Generators

CPU, GPU_0, GPU_1 = (torch.device(name) for name in ("cpu", "cuda:0", "cuda:1"))


@pytest.fixture
def states(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Pretend to have two GPUs that have been used; return their generators' states."""
    states = [torch.full((16,), number, dtype=torch.uint8) for number in (10, 20)]
    for name, stand_in in {
        "is_initialized": lambda: True,
        "device_count": lambda: 2,
        "get_rng_state_all": lambda: [state.clone() for state in states],
        "set_rng_state": lambda state, device: states.__setitem__(
            device if isinstance(device, int) else device.index, state
        ),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return states


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (CPU, CPU, (10, 20)),  # Replicas that share a GPU, or a program's own choice.
        (GPU_0, GPU_0, (10, 20)),
        (GPU_0, GPU_1, (99, 10)),  # Its own has another number now; so has the other.
        (CPU, GPU_1, (10, 20)),
    ],
)
def test_the_generators_of_all_gpus_come_back(
    states: list[torch.Tensor],
    before: torch.device,
    after: torch.device,
    expected: tuple[int, int],
) -> None:
    file = io.BytesIO()
    Generators(before).save(file)
    for state in states:
        state.fill_(99)
    file.seek(0)
    resumed = Generators(after)
    resumed.load(file)
    resumed.restore()
    assert tuple(int(state[0]) for state in states) == expected


def test_a_gpu_that_nobody_has_used_is_left_alone(
    states: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.delattr(torch.cuda, "get_rng_state_all")
    Generators(CPU).save(io.BytesIO())
