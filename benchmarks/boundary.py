"""Measure what a boundary costs the training thread, at 1 and 4 replicas; JSON lines.

    python benchmarks/boundary.py

The cost is that of counting the samples and passing the boundary, as the loader does
after each global batch, with the watcher running and nothing requested; and of being
ready for a rescue, by what is registered. Between two boundaries of the latter the
training thread does something else, as it does in training: else all would be at hand.
"""

from __future__ import annotations

import statistics
import tempfile
import time

import torch
from machine import report
from torch import nn

import elasticrun
from elasticrun.testing import run_generation

NUM_BOUNDARIES = 200_000
NUM_RESCUES = 300


def microseconds_per_boundary(checkpoint_dir: str) -> float:
    """Return the cost on this replica; the shortest of five rounds."""
    elasticrun.init(checkpoint_dir, rescue=False)
    job = elasticrun.current_job()
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(NUM_BOUNDARIES):
            job.progress.index += 32
            job.boundary.reach()
        times.append(time.perf_counter() - begin)
    return min(times) / NUM_BOUNDARIES * 1e6


def microseconds_with_rescue(checkpoint_dir: str, num_layers: int) -> float:
    """Return the median cost on this replica, with a step's work before each boundary.

    Args:
        num_layers: Each a convolution and a BatchNorm, with Adam and a scheduler.
    """
    torch.set_num_threads(1)  # What `elasticrun run` gives each of two on two cores.
    elasticrun.init(checkpoint_dir, rescue="always")
    job = elasticrun.current_job()
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8)]
    net = nn.Sequential(*layers)
    optimizer = torch.optim.Adam(net.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    elasticrun.register(net=net, optimizer=optimizer, scheduler=scheduler)
    values = elasticrun.Variables(best=0.0)
    work = torch.randn(256, 256)
    for parameter in net.parameters():  # As from the first backward pass on.
        parameter.grad = torch.zeros_like(parameter)
    times = []
    for number in range(NUM_RESCUES):
        work = torch.tanh(work @ work)
        for buffer in net.buffers():  # As a forward pass changes them.
            buffer.add_(1)
        optimizer.step()
        scheduler.step()
        values.best = float(number)
        begin = time.perf_counter()
        job.progress.index += 32
        job.boundary.reach()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6


def main() -> None:
    for world_size in (1, 4):
        with tempfile.TemporaryDirectory() as directory:
            costs = run_generation(microseconds_per_boundary, world_size, directory)
        report(
            "boundary",
            world_size=world_size,
            microseconds=round(statistics.median(costs), 3),
        )
    for num_layers in (1, 10, 50):
        with tempfile.TemporaryDirectory() as directory:
            costs = run_generation(microseconds_with_rescue, 2, directory, num_layers)
        report(
            "boundary, ready for a rescue",
            world_size=2,
            tensors=7 * num_layers,
            microseconds=round(statistics.median(costs), 1),
        )


if __name__ == "__main__":
    main()
