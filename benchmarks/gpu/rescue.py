"""Measure what being ready for a rescue costs a step on a GPU; JSON lines.

    python benchmarks/gpu/rescue.py

One process does what a replica would: it waits for its gradients after the backward
pass and before the step, and remembers the module at the boundary. By turns with the
same step without that. Collectives are left out: they would be waited for in any case.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from elasticrun.checkpoint.states.module_memory import ModuleMemory
from elasticrun.job.gpu_work import GpuWork

sys.path.append(str(Path(__file__).parents[1]))
from machine import report

NUM_ROUNDS = 7
SECONDS = 0.6  # Of each round.


def transformer(width: int, num_layers: int, num_words: int = 50304) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        width, width // 64, 4 * width, dropout=0.0, batch_first=True, norm_first=True
    )
    layers = nn.TransformerEncoder(layer, num_layers, enable_nested_tensor=False)
    words = nn.Embedding(num_words, width)
    return nn.Sequential(words, layers, nn.Linear(width, num_words))


def measure(name: str, net: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    net = net.cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)
    work = GpuWork(check=lambda: None, abort=lambda: None)
    memory = ModuleMemory("net", net, lambda: True)

    def step(*, is_ready: bool) -> None:
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            outputs = net(inputs)
            loss = nn.functional.cross_entropy(
                outputs.flatten(0, -2), targets.flatten()
            )
        loss.backward()
        if is_ready:
            work.wait()  # As after the reduction, and before the step.
            work.wait()
        optimizer.step()
        if is_ready:
            memory.remember()
            work.mark()

    def seconds(num_steps: int, *, is_ready: bool) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(num_steps):
            step(is_ready=is_ready)
        torch.cuda.synchronize()
        return (time.perf_counter() - begin) / num_steps

    num_steps = max(3, int(SECONDS / max(seconds(3, is_ready=True) for _ in range(3))))
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(NUM_ROUNDS):
        for is_ready, found in times.items():
            found.append(seconds(num_steps, is_ready=is_ready))
    ratios = [
        ready / bare for bare, ready in zip(times[False], times[True], strict=True)
    ]
    report(
        "step on a GPU, ready for a rescue",
        model=name,
        parameters=sum(each.numel() for each in net.parameters()),
        milliseconds_without=round(statistics.median(times[False]) * 1e3, 3),
        milliseconds=round(statistics.median(times[True]) * 1e3, 3),
        ratio=round(statistics.median(ratios), 4),
        gpu=torch.cuda.get_device_name(),
    )


def words(*shape: int) -> tuple[Tensor, Tensor]:
    drawn = torch.randint(50304, (2, *shape), device="cuda")
    return drawn[0], drawn[1]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("needs a GPU")
    mlp = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    rows = torch.randn(128, 1, 64, device="cuda")
    measure("two linear layers", mlp, rows, torch.zeros_like(rows[..., 0]).long())
    measure("transformer, 4,096 words", transformer(768, 12), *words(8, 512))
    measure("transformer, 16,384 words", transformer(768, 12), *words(32, 512))
    measure("larger transformer", transformer(1024, 24), *words(16, 1024))


if __name__ == "__main__":
    main()
