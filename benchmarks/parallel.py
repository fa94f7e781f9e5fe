"""Measure a training step of AdaptiveDataParallel beside DDP; one JSON line each.

    python benchmarks/parallel.py

Networks of one shape train in turns in one loop of an `AdaptiveDataLoader`: forward and
backward pass, `optimizer.step` and `zero_grad`. One is in an AdaptiveDataParallel, one
in a DDP (with one replica: bare), and one more of these shows what chance does. Who
begins changes with each turn, and with each run whose memory was allocated first.
`ratio` is the median time of a step, on rank 0, over
that of DDP; `control_ratio` that of the second DDP over that of the first. In `plain`,
nothing is weighed or accumulates; in `weighed`, global batches do not divide by the
number of replicas. `cpu_microseconds` is what a step of ours takes more of the CPU, in
the thread that trains, than that of the peer: it tells also on a busy machine.

Memory that is freed stays in the process: the C library would give back to the kernel
what lies at the end, and only that one of the networks whose memory that is would pay
in each step for getting it again.
"""

from __future__ import annotations

import ctypes
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

# Inputs, width of the hidden layers, their number, samples of a local batch, steps.
SHAPES = {"small": (64, 128, 1, 32, 1500), "large": (256, 1024, 4, 64, 120)}
NUM_WARM_UP = 20
NUM_RUNS = 3

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # As malloc.h numbers them.

Seconds = tuple[float, float]  # By the clock, and of the CPU.
Turn = list[Seconds]  # Of ours, of the peer's, and of the second peer's step.


def main() -> None:
    torch.set_num_threads(1)
    for num_replicas in (2, 1):
        for shape in SHAPES:
            compare(shape, num_replicas, is_weighed=False)
    compare("small", 2, is_weighed=True)


def compare(shape: str, num_replicas: int, *, is_weighed: bool) -> None:
    runs = [
        run_generation(take_turns, num_replicas, shape, is_weighed, own, timeout=600)[0]
        for own in range(NUM_RUNS)
    ]
    turns = [turn for run in runs for turn in run]
    ours, peer, control = medians(turns)
    report(
        "parallel-step",
        case="weighed" if is_weighed else "plain",
        replicas=num_replicas,
        network=shape,
        parameters=sum(each.numel() for each in network(shape).parameters()),
        turns=len(turns),
        peer="DDP" if num_replicas > 1 else "bare module",
        microseconds=round(1e6 * ours, 1),
        peer_microseconds=round(1e6 * peer, 1),
        cpu_microseconds=round(1e6 * more_of_the_cpu(turns), 1),
        ratio=round(ours / peer, 4),
        control_ratio=round(control / peer, 4),
        ratio_of_each_run=[
            round(ours / peer, 4) for ours, peer, _ in map(medians, runs)
        ],
    )


def medians(turns: list[Turn]) -> list[float]:
    return [
        statistics.median(seconds for seconds, _ in steps)
        for steps in zip(*turns, strict=True)
    ]


def more_of_the_cpu(turns: list[Turn]) -> float:
    return statistics.median(ours[1] - peer[1] for ours, peer, _ in turns)


def take_turns(shape: str, is_weighed: bool, own: int) -> list[Turn]:
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, 2**30)
    libc.mallopt(M_MMAP_THRESHOLD, 2**25)  # The most that it takes.
    torch.set_num_threads(1)
    torch.manual_seed(0)
    num_inputs, _, _, local_batch_size, num_steps = SHAPES[shape]
    trained = [network(shape) for _ in range(3)]
    trained = trained[own:] + trained[:own]
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
    for number, _ in loader.enumerate():
        turn = [(0.0, 0.0)] * 3
        for place in range(3):
            which = (number + place) % 3
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
    num_inputs, width, num_hidden, _, _ = SHAPES[shape]
    layers: list[nn.Module] = []
    for _ in range(num_hidden):
        layers += [nn.Linear(num_inputs, width), nn.ReLU()]
        num_inputs = width
    return nn.Sequential(*layers, nn.Linear(width, 10))


if __name__ == "__main__":
    main()
