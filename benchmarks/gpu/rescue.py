"""Measure what being ready for a rescue costs a step on a GPU; JSON lines.

    python benchmarks/gpu/rescue.py [--small]

One process does what a replica would: it waits for its gradients after the backward
pass and before the step, and remembers the module at the boundary; by turns with the
same step without that. Collectives are left out: they would be waited for in any case.
`idle` is the part of a step that elasticrun takes for its cost: up to 0.01 a rescue is
on by default.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import models
import torch

from elasticrun.checkpoint.states.module_watch import ModuleWatch
from elasticrun.job.gpu_work import GpuWork

sys.path.append(str(Path(__file__).parents[1]))
from machine import report

# The network, and in how many micro-batches a step trains.
CASES = [("gpt2", 1), ("gpt2", 4), ("resnet50", 1), ("resnet50", 8)]
NUM_ROUNDS = 7
SECONDS = 0.4  # Of each round.
IS_CUDA = torch.cuda.is_available()


class DoneAtOnce:
    """An event of a GPU that is always done, where there is none."""

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return True


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--small", action="store_true", help="try it out on a CPU")
    is_small = parser.parse_args().small
    if not IS_CUDA:
        torch.cuda.Event = DoneAtOnce  # type: ignore[assignment,misc]
        torch.cuda.is_current_stream_capturing = lambda: False
    for name, num_micro_batches in CASES[: 2 if is_small else None]:
        measure(name, num_micro_batches, is_small=is_small)


def measure(name: str, num_micro_batches: int, *, is_small: bool) -> None:
    device = torch.device("cuda" if IS_CUDA else "cpu")
    net, inputs, targets = models.make(name, device, is_small=is_small)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    work = GpuWork(check=lambda: None, abort=lambda: None)
    memory = ModuleWatch("net", net, lambda: True)
    idle: list[float] = []

    def step(*, is_ready: bool) -> None:
        optimizer.zero_grad()
        for _ in range(num_micro_batches):
            models.loss_of(net, inputs, targets).backward()
        if is_ready:
            work.wait()  # As after the reduction, and before the step.
            work.wait()
        optimizer.step()
        if is_ready:
            memory.remember()
            work.mark()
            work.pass_boundary()
            idle.append(work.idle)

    def seconds(num_steps: int, *, is_ready: bool) -> float:
        begin = time.perf_counter()
        for _ in range(num_steps):
            step(is_ready=is_ready)
        if IS_CUDA:
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / num_steps

    least = min(seconds(2, is_ready=is_ready) for is_ready in (True, False, True))
    num_steps = 2 if is_small else max(2, int(SECONDS / least))
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(NUM_ROUNDS):
        for is_ready, found in times.items():
            found.append(seconds(num_steps, is_ready=is_ready))
    bare, ready = map(statistics.median, times.values())
    ratios = [one / other for other, one in zip(*times.values(), strict=True)]
    report(
        "step on a GPU, ready for a rescue",
        network=name,
        micro_batches=num_micro_batches,
        milliseconds_without=round(bare * 1e3, 3),
        milliseconds=round(ready * 1e3, 3),
        ratio=round(statistics.median(ratios), 4),
        idle=round(statistics.median(idle) / ready, 4),
        gpu=torch.cuda.get_device_name() if IS_CUDA else None,
    )


if __name__ == "__main__":
    main()
