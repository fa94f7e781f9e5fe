"""Measure a training step of AdaptiveDataParallel beside DDP; one JSON line each.

    python benchmarks/parallel.py

Both train a network of the same shape in one loop of an `AdaptiveDataLoader`, in turns,
each first in every other turn: forward and backward pass, `optimizer.step` and
`zero_grad`. `ratio` is the median over all turns of AdaptiveDataParallel's time over that
of DDP (with one replica: of the bare module), on rank 0; `median_ratios_of_runs` are
those of single processes. In `weighed`, global batches do not divide by the number of
replicas, so that gradients are weighed; in `plain`, nothing is weighed or accumulates.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, world_size
from elasticrun.testing import run_generation

# Inputs, width of the hidden layers, their number, samples of a local batch, steps.
SHAPES = {"small": (64, 128, 1, 32, 2000), "large": (256, 1024, 4, 64, 200)}
NUM_WARM_UP = 20
NUM_RUNS = 3


def main() -> None:
    for num_replicas in (2, 1):
        for shape in SHAPES:
            print(
                json.dumps(compare(shape, num_replicas, is_weighed=False)), flush=True
            )
    print(json.dumps(compare("small", 2, is_weighed=True)), flush=True)


def compare(shape: str, num_replicas: int, *, is_weighed: bool) -> dict[str, Any]:
    runs = [
        run_generation(take_turns, num_replicas, shape, is_weighed, timeout=600)[0]
        for _ in range(NUM_RUNS)
    ]
    turns = [turn for run in runs for turn in run]
    return {
        "benchmark": "parallel-step",
        "case": "weighed" if is_weighed else "plain",
        "replicas": num_replicas,
        "network": shape,
        "parameters": sum(each.numel() for each in network(shape).parameters()),
        "steps": len(turns),
        "microseconds": round(1e6 * statistics.median(ours for ours, _ in turns), 1),
        "peer": "DDP" if num_replicas > 1 else "bare module",
        "peer_microseconds": round(
            1e6 * statistics.median(theirs for _, theirs in turns), 1
        ),
        "ratio": round(median_ratio(turns), 4),
        "median_ratios_of_runs": [round(median_ratio(run), 4) for run in runs],
        **machine(),
    }


def median_ratio(turns: list[tuple[float, float]]) -> float:
    ours = statistics.median(ours for ours, _ in turns)
    return ours / statistics.median(theirs for _, theirs in turns)


def take_turns(shape: str, is_weighed: bool) -> list[tuple[float, float]]:
    """Return the seconds of AdaptiveDataParallel's step and of the peer's, per turn."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_inputs, _, _, local_batch_size, num_steps = SHAPES[shape]
    ours, of_ours = trained(shape)
    theirs, of_theirs = trained(shape)
    model = AdaptiveDataParallel(ours, of_ours)
    peer = DistributedDataParallel(theirs) if world_size() > 1 else theirs
    batch_size = local_batch_size * world_size() - is_weighed
    num_samples = batch_size * (num_steps + NUM_WARM_UP)
    batch = torch.randn(local_batch_size, num_inputs)
    target = torch.randint(10, (local_batch_size,))
    turns = []
    loader = AdaptiveDataLoader(
        TensorDataset(torch.arange(num_samples)), batch_size, name="turns"
    )
    for number, _ in loader.enumerate():
        if number % 2:
            peer_seconds = seconds_of_step(peer, of_theirs, batch, target)
            seconds = seconds_of_step(model, of_ours, batch, target)
        else:
            seconds = seconds_of_step(model, of_ours, batch, target)
            peer_seconds = seconds_of_step(peer, of_theirs, batch, target)
        if number >= NUM_WARM_UP:
            turns.append((seconds, peer_seconds))
    return turns


def seconds_of_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, target: Tensor
) -> float:
    start = time.perf_counter()
    optimizer.zero_grad()
    cross_entropy(model(batch), target).backward()
    optimizer.step()
    return time.perf_counter() - start


def trained(shape: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    net = network(shape)
    return net, torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)


def network(shape: str) -> nn.Module:
    num_inputs, width, num_hidden, _, _ = SHAPES[shape]
    layers: list[nn.Module] = []
    for _ in range(num_hidden):
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(width, 10))


def machine() -> dict[str, object]:
    return {
        "platform": platform.platform(),
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": 1,
    }


def cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
