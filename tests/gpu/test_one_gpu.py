"""One replica on a GPU: device, generators, and a restart that does not show."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun.testing import run_generation
from tests.support.held import held_writer
from tests.support.stage import wait_until

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def train(checkpoint_dir: str, stop_after: int | None = None) -> dict[str, Any]:
    """Train a net with dropout on the GPU, and return what it ended with."""
    import elasticrun as er

    torch.manual_seed(0)
    er.init(checkpoint_dir, save_interval="off")
    device = er.device()
    net = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.5), nn.Linear(32, 1)).to(device)
    optimizer = torch.optim.Adam(net.parameters())
    model = er.AdaptiveDataParallel(net, optimizer)
    inputs = torch.arange(80.0).reshape(10, 8) / 80
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    loader = er.AdaptiveDataLoader(data, 4, shuffle=True, pin_memory=True)
    num_steps = 0
    for _ in er.remaining_epochs_until(3):
        for x, y in loader:
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            num_steps += 1
            if num_steps == stop_after:
                er.request_stop()
    momentum = next(iter(optimizer.state.values()))["exp_avg"]
    return {
        "device": str(device),
        "devices": {str(p.device) for p in net.parameters()} | {str(momentum.device)},
        "parameters": [p.detach().cpu() for p in net.parameters()],
    }


def test_a_restart_does_not_show(tmp_path: Path) -> None:
    (whole,) = run_generation(train, 1, str(tmp_path / "whole"))
    assert run_generation(train, 1, str(tmp_path / "cut"), 4) == [None]
    (resumed,) = run_generation(train, 1, str(tmp_path / "cut"))
    for one, other in zip(whole["parameters"], resumed["parameters"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_everything_is_on_the_replicas_own_gpu(tmp_path: Path) -> None:
    assert run_generation(train, 1, str(tmp_path), 4) == [None]
    (resumed,) = run_generation(train, 1, str(tmp_path))
    assert resumed["device"] == "cuda:0"
    assert resumed["devices"] == {"cuda:0"}


def draw_after_restart(checkpoint_dir: str, *, stops: bool) -> list[float]:
    """Return what the GPU's generator draws in each batch."""
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off")
    torch.cuda.manual_seed(1)
    loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(6)), 1)
    drawn = []
    for _ in loader:
        drawn.append(float(torch.rand(1, device=er.device())))
        if stops and len(drawn) == 3:
            er.request_stop()
    return drawn


def test_the_gpus_generator_comes_back(tmp_path: Path) -> None:
    (whole,) = run_generation(
        lambda: draw_after_restart(str(tmp_path / "whole"), stops=False), 1
    )
    directory = str(tmp_path / "cut")
    run_generation(lambda: draw_after_restart(directory, stops=True), 1)
    (rest,) = run_generation(lambda: draw_after_restart(directory, stops=False), 1)
    assert rest == whole[3:]


def hold_memory_until_stopped(checkpoint_dir: str) -> None:
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off")
    held = torch.ones(2**20, device=er.device())
    loader = er.AdaptiveDataLoader(TensorDataset(torch.zeros(1000)), 4)
    for _ in er.remaining_epochs_until(10**9):
        for (x,) in loader:
            held[0] = float(x[0])


def test_status_shows_the_memory_on_the_gpu(tmp_path: Path) -> None:
    job = elasticrun.launch(
        hold_memory_until_stopped, str(tmp_path), replicas=1, wait=False
    )

    def held() -> list[int]:
        return [each["gpu_memory"] or 0 for each in job.status()["members"]]

    wait_until(lambda: sum(held()) >= 2**22)
    job.stop()
    with pytest.raises(elasticrun.ElasticRunError, match="stopped"):
        job.result()


def save_in_flight(checkpoint_dir: str) -> list[torch.Tensor]:
    """Change everything in place while a thread writes; return what was captured."""
    import elasticrun as er

    er.init(checkpoint_dir, save_interval="off", save_every=2)
    net = nn.Linear(1000, 5000).to(er.device())  # Some megabytes, and a small bias.
    er.register(net=net)
    kept: list[torch.Tensor] = []
    with held_writer() as held:
        loader = er.AdaptiveDataLoader(TensorDataset(torch.arange(3)), 1)
        for (x,) in loader:
            if loader.batch_index == 2:
                held.wait_for_writer()
                kept = [p.detach().clone().cpu() for p in net.parameters()]
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(2).add_(float(x[0]))
        held.let_go()
    return kept


def test_what_is_saved_is_what_was_at_the_boundary(tmp_path: Path) -> None:
    (kept,) = run_generation(save_in_flight, 1, str(tmp_path))
    saved = torch.load(tmp_path / "checkpoint-00000001" / "net", weights_only=True)
    assert [value.device.type for value in saved.values()] == ["cuda", "cuda"]
    for value, expected in zip(saved.values(), kept, strict=True):
        assert torch.equal(value.cpu(), expected)
