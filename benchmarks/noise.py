"""Measure what `measure_noise` costs a training step; one JSON line each.

    python benchmarks/noise.py [--replicas N]

Five networks of 10 thousand parameters in 62 tensors train in turns in one loop of an
`AdaptiveDataLoader`: the first one made, which is slower by some hundredths and does
not count, then two with `measure_noise=True` and two without. Which of them comes
first is drawn for each turn. A step is a forward and a backward pass, `optimizer.step`
and `zero_grad`; of 32 steps one is measured, so means are compared, over blocks of 32,
and `ratio` is the median of the blocks' ratios on rank 0, of both to both.
`control_ratio` compares the two without. `measured_ratio` is that of the steps that are
measured alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

import torch
from machine import report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, world_size
from elasticrun.adaptive.noise import MEASURED_EACH
from elasticrun.testing import run_generation

WIDTH, NUM_LAYERS, NUM_CLASSES = 18, 30, 10  # 62 tensors, and some 10 thousand.
LOCAL_BATCH_SIZE = 32
NUM_BLOCKS = 80


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--replicas", type=int, default=2)
    num_replicas = parser.parse_args().replicas
    seconds = run_generation(take_turns, num_replicas, timeout=600)[0]
    pairs = [added(seconds[1], seconds[4]), added(seconds[2], seconds[3])]
    off, on = (blocks_of(each) for each in pairs)
    firsts = [each[::MEASURED_EACH] for each in pairs]
    report(
        "noise-step",
        replicas=num_replicas,
        parameters=sum(each.numel() for each in network().parameters()),
        tensors=len(list(network().parameters())),
        microseconds=round(5e5 * statistics.median(off), 1),
        ratio=ratio(on, off),
        control_ratio=ratio(blocks_of(seconds[4]), blocks_of(seconds[1])),
        measured_ratio=ratio(firsts[1], firsts[0]),
    )


def added(these: list[float], those: list[float]) -> list[float]:
    return [a + b for a, b in zip(these, those, strict=True)]


def blocks_of(seconds: list[float]) -> list[float]:
    starts = range(MEASURED_EACH, len(seconds), MEASURED_EACH)  # The first warms up.
    return [statistics.fmean(seconds[s : s + MEASURED_EACH]) for s in starts]


def ratio(these: list[float], those: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(these, those, strict=True)), 4)


def take_turns() -> list[list[float]]:
    torch.set_num_threads(1)
    models = []
    for number, is_on in enumerate([False, False, True, True, False]):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), 0.01, 0.9)
        model = AdaptiveDataParallel(
            net, optimizer, name=f"model-{number}", measure_noise=is_on
        )
        models.append((model, optimizer))
    batch_size = LOCAL_BATCH_SIZE * world_size()
    data = TensorDataset(
        torch.randn(50_000, WIDTH), torch.randint(NUM_CLASSES, (50_000,))
    )
    loader = AdaptiveDataLoader(data, batch_size, shuffle=True)
    seconds: list[list[float]] = [[] for _ in models]
    order = list(range(len(models)))
    shuffle = random.Random(0).shuffle  # All replicas draw alike.
    for x, y in loader.batches(NUM_BLOCKS * MEASURED_EACH):
        shuffle(order)
        for which in order:
            model, optimizer = models[which]
            begun = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(x), y).backward()
            optimizer.step()
            taken = time.perf_counter() - begun
            if loader.is_first:
                seconds[which].append(taken)
            else:  # One replica has measured batches in two micro-batches.
                seconds[which][-1] += taken
    return seconds


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))


if __name__ == "__main__":
    main()
