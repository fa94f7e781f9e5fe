"""Loops of every shape, each with a sum that is kept; with "plain", that is lost."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    Variables,
    remaining_epochs_until,
    remaining_steps_until,
)


class Plain:
    """A sum that a restart loses."""

    def __init__(self, name, value):
        self.value = value


torch.manual_seed(0)
data = TensorDataset(torch.arange(1.0, 10.0)[:, None])
net = nn.Linear(1, 1)
optimizer = torch.optim.SGD(net.parameters(), 1e-3)
model = AdaptiveDataParallel(net, optimizer)
lists = [[0, 1, 2], [3], [4, 5]]
steps = AdaptiveDataLoader(data, 2, shuffle=True, name="steps")
outer = AdaptiveDataLoader(data, 5, name="outer")
inner = AdaptiveDataLoader(data, 3, shuffle=True, name="inner")
by_hand = AdaptiveDataLoader(data, 4, shuffle=True, name="by-hand")
own = AdaptiveDataLoader(data, batch_sampler=lists, shuffle=True, name="own")
planned = AdaptiveDataLoader(data, {0: 2, 4: 3}, shuffle=True, name="planned")
both = CombinedLoader({"inner": inner, "own": own}, mode="max_size_cycle", name="both")


def train(total, x):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    total.value += float(x.sum())


def batches(total):
    for (x,) in steps.batches(100_000):
        train(total, x)
    return total.value


def turns(total):
    for _ in remaining_steps_until(100_000):
        train(total, torch.rand(2, 1))
    return total.value


def nested(total):
    for (x,) in outer:
        train(total, x)
        for (y,) in inner:
            total.value += float(y[0])
        for (y,) in steps.batches(1):
            total.value += float(y[0])
    return total.value


def asked(total):
    iterator = iter(by_hand)
    while True:
        try:
            (x,) = next(iterator)
        except StopIteration:
            return total.value
        train(total, x)


def listed(total):
    for (x,) in own:
        train(total, x)
    return total.value


def growing(total):
    for (x,) in planned:
        train(total, x)
    return total.value


def combined(total):
    for batch in both:
        train(total, batch["inner"][0])
        total.value += float(batch["own"][0].sum())
    return total.value


SHAPES = [batches, turns, nested, asked, listed, growing, combined]
NAMES = [shape.__name__ for shape in SHAPES]
kind = Plain if sys.argv[1:] == ["plain"] else Variables
results = Variables(name="results", **dict.fromkeys(NAMES))
sums = [kind(name=name, value=0.0) for name in NAMES]
for _ in remaining_epochs_until(1):
    for shape, total in zip(SHAPES, sums, strict=True):
        value = shape(total)
        if getattr(results, shape.__name__) is None:
            setattr(results, shape.__name__, value)
