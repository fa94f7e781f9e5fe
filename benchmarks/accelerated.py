"""What a training step with Accelerate costs with elasticrun, beside one without.

    python benchmarks/accelerated.py

Both train a net of the same size in turns, in one process on one thread; what counts is
the processor's time, so other programs on the machine matter little.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from accelerate import Accelerator
from machine import report
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from elasticrun import AdaptiveDataLoader
from elasticrun.integrations.accelerate import prepare

NUM_ROUNDS, NUM_STEPS, BATCH_SIZE = 15, 40, 64


def net(width: int) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    module = nn.Sequential(
        nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 10),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
    return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10**6)


def seconds(accelerator: Accelerator, prepared: Any, batches: Iterable[Any]) -> float:
    model, optimizer, scheduler = prepared
    begun = time.process_time()
    for x, y in batches:
        with accelerator.accumulate(model):
            accelerator.backward(cross_entropy(model(x), y))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return (time.process_time() - begun) / NUM_STEPS


def main() -> None:
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    num_samples = NUM_STEPS * BATCH_SIZE
    labels = torch.randint(10, (num_samples,))
    data = TensorDataset(torch.randn(num_samples, 64), labels)
    bare = accelerator.prepare_data_loader(DataLoader(data, BATCH_SIZE, shuffle=True))
    ours = AdaptiveDataLoader(data, BATCH_SIZE, shuffle=True, name="train")
    for width in (128, 1024):
        without = accelerator.prepare(*net(width))
        elastic = prepare(accelerator, *net(width), name=f"width-{width}")
        pairs = [
            (seconds(accelerator, elastic, ours), seconds(accelerator, without, bare))
            for _ in range(NUM_ROUNDS)
        ][1:]
        medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
        ratio = statistics.median(one / other for one, other in pairs)
        report(
            "accelerated",
            parameters=sum(each.numel() for each in elastic[0].parameters()),
            milliseconds=round(medians[0] * 1e3, 3),
            accelerate_milliseconds=round(medians[1] * 1e3, 3),
            ratio=round(ratio, 3),
        )


if __name__ == "__main__":
    main()
