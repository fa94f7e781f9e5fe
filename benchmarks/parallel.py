"""Measure a training step of AdaptiveDataParallel beside DDP; one JSON line each.

    python benchmarks/parallel.py

Networks of one shape train in turns in one loop of an `AdaptiveDataLoader`: forward and
backward pass, `optimizer.step` and `zero_grad`. One is in an AdaptiveDataParallel, two
are peers: in a DDP (with one replica: bare). The order is drawn for each turn, since a
step leaves the caches to the next one, and the place in memory, which decides about a
few percent, is another one in each run. `ratio` is the median time of a step, on rank
0, over the mean of those of the peers; `control_ratio` compares these with each other:
what chance does. In `plain`, nothing is weighed or accumulates; in `weighed`, global
batches do not divide by the number of replicas. `cpu_microseconds` is what a step of
ours takes more of the CPU, in the thread that trains: it tells also on a busy machine.

Memory that is freed stays in the process: the C library would give back to the kernel
what lies at the end, and only that one of the networks whose memory that is would pay
in each step for getting it again.
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time

import torch
from machine import report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, world_size
from elasticrun.testing import run_generation

# Inputs, width of the hidden layers, their number, samples of a local batch.
SHAPES = {"small": (64, 128, 1, 32), "large": (256, 1024, 4, 64)}
NUM_RUNS_AND_STEPS = {"small": (6, 750), "large": (3, 80)}
NUM_WARM_UP = 20

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # As malloc.h numbers them.

Seconds = tuple[float, float]  # By the clock, and of the CPU.
Turn = list[Seconds]  # Of our step, and of those of the two peers.


def main() -> None:
    torch.set_num_threads(1)
    for num_replicas in (2, 1):
        for shape in SHAPES:
            compare(shape, num_replicas, is_weighed=False)
    compare("small", 2, is_weighed=True)


def compare(shape: str, num_replicas: int, *, is_weighed: bool) -> None:
    num_runs, num_steps = NUM_RUNS_AND_STEPS[shape]
    runs = [
        run_generation(
            take_turns, num_replicas, shape, num_steps, is_weighed, run, timeout=600
        )[0]
        for run in range(num_runs)
    ]
    turns = [turn for run in runs for turn in run]
    ours, first, second = medians(turns)
    report(
        "parallel-step",
        case="weighed" if is_weighed else "plain",
        replicas=num_replicas,
        network=shape,
        parameters=sum(each.numel() for each in network(shape).parameters()),
        turns=len(turns),
        peer="DDP" if num_replicas > 1 else "bare module",
        microseconds=round(1e6 * ours, 1),
        peer_microseconds=round(1e6 * (first + second) / 2, 1),
        cpu_microseconds=round(1e6 * more_of_the_cpu(turns), 1),
        ratio=ratio_to_peers(turns),
        control_ratio=round(second / first, 4),
        ratio_of_each_run=[ratio_to_peers(run) for run in runs],
    )


def ratio_to_peers(turns: list[Turn]) -> float:
    ours, first, second = medians(turns)
    return round(2 * ours / (first + second), 4)


def medians(turns: list[Turn]) -> list[float]:
    return [
        statistics.median(seconds for seconds, _ in steps)
        for steps in zip(*turns, strict=True)
    ]


def more_of_the_cpu(turns: list[Turn]) -> float:
    return statistics.median(
        ours - (first + second) / 2 for (_, ours), (_, first), (_, second) in turns
    )


def take_turns(shape: str, num_steps: int, is_weighed: bool, run: int) -> list[Turn]:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, 2**30)
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # The most that it takes.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_inputs, _, _, local_batch_size = SHAPES[shape]
    trained = [network(shape) for _ in range(3)]
    trained = trained[run % 3 :] + trained[: run % 3]
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, 0.9) for each in trained]
    models = [AdaptiveDataParallel(trained[0], optimizers[0]), *trained[1:]]
    if world_size() > 1:
        models[1:] = [DistributedDataParallel(each) for each in trained[1:]]
    batch = torch.randn(local_batch_size, num_inputs)
    target = torch.randint(10, (local_batch_size,))
    batch_size = local_batch_size * world_size() - is_weighed
    turns = []
    loader = AdaptiveDataLoader(
        TensorDataset(torch.arange(batch_size * (num_steps + NUM_WARM_UP))), batch_size
    )
    order = [0, 1, 2]
    shuffle = random.Random(run).shuffle  # All replicas draw alike.
    for _ in loader:
        turn = [(0.0, 0.0)] * 3
        shuffle(order)
        for which in order:
            turn[which] = seconds_of_step(
                models[which], optimizers[which], batch, target
            )
        turns.append(turn)
    return turns[NUM_WARM_UP:]


def seconds_of_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, target: Tensor
) -> Seconds:
    start, start_of_cpu = time.perf_counter(), time.thread_time()
    optimizer.zero_grad()
    cross_entropy(model(batch), target).backward()
    optimizer.step()
    return time.perf_counter() - start, time.thread_time() - start_of_cpu


def network(shape: str) -> nn.Module:
    num_inputs, width, num_hidden, _ = SHAPES[shape]
    layers: list[nn.Module] = []
    for _ in range(num_hidden):
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(width, 10))


if __name__ == "__main__":
    main()
