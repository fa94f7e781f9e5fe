"""The training that wrote the checkpoints in tests/checkpoint/kept, and resumes them.

It uses public names only, since the elasticrun that wrote them ran it, too:

    export PYTHONPATH=THAT_ELASTICRUN:tests/support
    python -P -m kept tests/checkpoint/kept/format_1
"""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    State,
    Variables,
    current_epoch,
    init,
    once,
    rank,
    register,
    remaining_epochs_until,
    save_all_states,
    world_size,
)
from elasticrun.testing import run_generation

FOLDER = Path(__file__).parents[1] / "checkpoint" / "kept"
VARIABLES = {"ELASTICRUN_JOB": "kept"}
SAVED_IN = (1, 2)  # The epoch and the batch, which is delivered again.


class Notes(State):
    """A state in a format of the program's own."""

    def __init__(self) -> None:
        super().__init__("notes")
        self.text = ""

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(self.text.encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.text = fileobj.read().decode()


def train(directory: str, *, saves: bool) -> dict[str, Any]:
    """Train for two epochs; return what was there at the save, and what came then.

    Args:
        saves: Whether it is the training that saves, else the one that resumes.
    """
    init(directory, save_interval="off")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    groups = [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 1}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, amsgrad=True)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    register(model=net, optimizer=optimizer, scheduler=scheduler)
    kept = Variables(num_steps=0, losses=[], best=(0.0, None), table={})
    notes, sums = Notes(), Accumulator()
    loader = AdaptiveDataLoader(range(20), 6, shuffle=True, name="train")
    is_new = once("announced")
    for generator in (torch.manual_seed, random.seed, np.random.seed):
        generator(rank())
    found: dict[str, Any] = {}
    for _ in remaining_epochs_until(2):
        for x in loader:
            here = (current_epoch(), loader.batch_index)
            if not found and (here == SAVED_IN or not saves):
                if saves:
                    save_all_states()
                found = {
                    "here": list(here),
                    "is_announced": saves or not is_new,
                    "model": plain(net.state_dict()),
                    "optimizer": plain(optimizer.state_dict()),
                    "scheduler": plain(scheduler.state_dict()),
                    "variables": plain(vars(kept)),
                    "notes": notes.text,
                    "batches": [],
                }
            if found:
                drawn = [random.random(), np.random.rand(), torch.rand(()).item()]
                found["batches"].append([x.tolist(), drawn])
            sums["samples"] += loader.num_valid
            kept.losses.append(step(net, optimizer, x))
            kept.num_steps += 1
            kept.best = (min(kept.losses), f"in {here}")
            kept.table = {"tensor": torch.tensor([1.5, kept.num_steps]), (1, 2): {3}}
            notes.text += f"{here} "
        scheduler.step()
    with sums.synchronized():
        found["num_samples"] = sums["samples"]
    return found


def step(net: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Take the same step on every replica, for the sum of their samples."""
    total = x.sum().float()
    if world_size() > 1:
        dist.all_reduce(total)
    inputs = torch.stack([total, total.square()]).reshape(1, 2).repeat(4, 1) / 100
    inputs = inputs + torch.arange(8).reshape(4, 2)
    optimizer.zero_grad()
    loss = net(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def plain(values: Any) -> Any:
    """Return values as JSON has them, each number in full."""
    if isinstance(values, torch.Tensor):
        return [str(values.dtype), list(values.shape), values.flatten().tolist()]
    if isinstance(values, dict):
        return {str(key): plain(value) for key, value in values.items()}
    if isinstance(values, (list, tuple, set)):
        return [type(values).__name__, *map(plain, values)]
    return values


def main() -> None:
    """Write the checkpoints, and what is in them."""
    folder = Path(sys.argv[1])
    for num_replicas in (1, 2):
        directory = folder / f"{num_replicas}_replicas"
        found = run_generation(
            lambda d: train(d, saves=True),
            num_replicas,
            str(directory),
            variables=VARIABLES,
        )
        (directory / "lock").unlink()
        shutil.rmtree(directory / "checkpoint-00000002")  # Of the end.
        lines = "".join(f"{json.dumps(each)}\n" for each in found)
        directory.with_suffix(".jsonl").write_text(lines)


if __name__ == "__main__":
    main()
