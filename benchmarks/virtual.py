"""Measure what virtual replicas cost; one JSON line each.

    python benchmarks/virtual.py

Jobs with and without virtual replicas train in turns, in blocks of some steps, in the
same processes: whole loops over an `AdaptiveDataLoader` with forward and backward
pass, `optimizer.step` and `zero_grad`. In `same`, two processes train one share each
beside an `AdaptiveDataParallel` without. In `shares`, one process trains four shares
beside the four micro-batches that `max_local_batch_size` makes of the same batch.
`ratio` is the median over pairs of blocks, each with its neighbour's; `control_ratio`
that of the jobs without among themselves: what chance does. `cpu_ratio` counts the
time of the thread that trains, which tells also on a busy machine.
"""

from __future__ import annotations

import logging
import statistics
import sys
import time

import torch
import torch.distributed as dist
from machine import report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel
from elasticrun.replicas.environment import read_environment
from elasticrun.testing import Job, Settings, run_generation, use_job

NUM_PAIRS = 25
NUM_WARM_UP = 5
CASES = {"same": (2, 2, 1), "shares": (1, 4, 4)}  # Processes, shares, micro-batches.
NETWORKS = ("mlp", "convolutions", "transformer")

Turn = list[tuple[float, float]]  # Seconds of each job, by the clock and of the CPU.


def network(name: str) -> tuple[nn.Module, Tensor, int]:
    """Return a network, samples of a global batch for it, and steps of a block."""
    if name == "mlp":
        layers = [nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(512, 10)), torch.randn(128, 64), 20
    if name == "convolutions":
        layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()]
        layers += [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
        layers += [nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Dropout(0.2)]
        net = nn.Sequential(*layers, nn.Linear(128, 10))
        return net, torch.randn(64, 1, 12, 12), 10
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    net = nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Flatten())
    return nn.Sequential(net, nn.Linear(32 * 64, 10)), torch.randn(16, 32, 64), 10


def block(name: str, num_virtual: int | None, num_micro: int) -> tuple[float, float]:
    """Train some steps as a job of its own; return seconds a step, and of the CPU."""
    torch.manual_seed(0)
    settings = Settings.read({}, save_interval="off", virtual_replicas=num_virtual)
    with use_job(Job(read_environment(), settings)):
        net, x, num_steps = network(name)
        size = len(x)
        data = TensorDataset(
            x.repeat(2, *[1] * (x.dim() - 1)), torch.arange(2 * size) % 10
        )
        optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
        model = AdaptiveDataParallel(net, optimizer)
        most = None if num_virtual or num_micro == 1 else size // num_micro
        train = AdaptiveDataLoader(data, size, max_local_batch_size=most, name="train")
        clock, cpu, step = 0.0, 0.0, 0
        for inputs, labels in train.batches(num_steps + NUM_WARM_UP):
            if train.batch_index == NUM_WARM_UP and clock == 0.0:
                clock, cpu = time.perf_counter(), time.thread_time()
            optimizer.zero_grad()
            cross_entropy(model(inputs), labels).backward()
            optimizer.step()
            step += train.is_step
        return (
            (time.perf_counter() - clock) / num_steps,
            (time.thread_time() - cpu) / num_steps,
        )


def take_turns(
    name: str, num_virtual: int, num_micro: int, num_pairs: int
) -> list[Turn]:
    """Return for each turn what a step took: with, without, and without once more."""
    torch.set_num_threads(1)
    logging.getLogger("elasticrun").setLevel(logging.ERROR)  # Nothing is saved.
    if read_environment().world_size > 1:
        dist.init_process_group("gloo")  # Of all jobs that follow.
    kinds = (num_virtual, None, None)
    return [[block(name, kind, num_micro) for kind in kinds] for _ in range(num_pairs)]


def ratio(turns: list[Turn], part: int, *, is_control: bool = False) -> float:
    """Return the median ratio over the turns, by the clock or of the CPU."""
    found = []
    for turn in turns:
        ours, first, second = (times[part] for times in turn)
        found.append(first / second if is_control else 2 * ours / (first + second))
    return round(statistics.median(found), 3)


def main(cases: list[str], num_pairs: int = NUM_PAIRS) -> None:
    for case in cases or CASES:
        size, num_virtual, num_micro = CASES[case]
        for name in NETWORKS:
            turns = run_generation(
                take_turns, size, name, num_virtual, num_micro, num_pairs, timeout=900
            )[0]

            report(
                "virtual-replicas",
                case=case,
                network=name,
                processes=size,
                virtual=num_virtual,
                milliseconds=1e3 * statistics.median(turn[1][0] for turn in turns),
                ratio=ratio(turns, 0),
                control_ratio=ratio(turns, 0, is_control=True),
                cpu_ratio=ratio(turns, 1),
                cpu_control_ratio=ratio(turns, 1, is_control=True),
            )


if __name__ == "__main__":
    main(sys.argv[1:])
