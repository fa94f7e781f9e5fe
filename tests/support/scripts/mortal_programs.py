"""Trainings as programs write them, whose replicas die at given places.

PROGRAM says which one; DEATHS is JSON: for each generation [rank, place, batch], where
batches of the first loop are counted over all epochs. The end of the training is
printed: a digest of all that was trained. It comes after EPOCHS; in a long training
with the epoch in which there is a mark `enough`.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # In the forkserver; else the optimizer of each replica does.
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    LogFile,
    TextLines,
    Variables,
    register,
    remaining_epochs_until,
    remaining_steps_until,
)
from tests.support.deaths import die

DEATHS = json.loads(os.environ.get("DEATHS", "[]"))
EPOCHS = int(os.environ.get("EPOCHS", 2))
ENOUGH = Path(os.environ["LAUNCHER_TEST"], "marks", "enough")
PROGRAMS: dict[str, Callable[[], dict[str, Any]]] = {}


def maybe_die(place: str, batch: int) -> None:
    generation = elasticrun.generation()
    if generation < len(DEATHS):
        rank, *where = DEATHS[generation]
        if rank == elasticrun.rank() and where == [place, batch]:
            die()


def program(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    PROGRAMS[make.__name__] = make
    return make


torch.manual_seed(1)
np.random.seed(1)
device = elasticrun.device()
x = torch.randn(100, 6)
y = x.sum(1, keepdim=True).sin()
data = TensorDataset(x, y)


def loader(**options: Any) -> AdaptiveDataLoader:
    return AdaptiveDataLoader(data, 20, shuffle=True, device=device, **options)


def make_net(*, norm: bool = False) -> nn.Sequential:
    norms = [nn.BatchNorm1d(8)] if norm else []
    net = nn.Sequential(nn.Linear(6, 8), *norms, nn.Tanh(), nn.Linear(8, 1))
    return net.to(device)


def batches(train: Any) -> Any:
    """Yield each batch with its number over all epochs."""
    for epoch in remaining_epochs_until(EPOCHS):
        for batch in train:
            yield epoch * 5 + train.batch_index, batch


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    on_batch: Callable[[int], object] = lambda _: None,
) -> None:
    """Train as most programs do; a replica may die in the forward, or after a step."""
    for batch, (inputs, targets) in batches(loader()):
        on_batch(batch)
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        maybe_die("forward", batch)
        loss.backward()
        optimizer.step()
        maybe_die("step", batch)


@program
def moco() -> dict[str, Any]:
    """A key encoder follows in the forward pass, by assignments to `data`."""

    class Moco(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = make_net()
            self.key = copy.deepcopy(self.query).requires_grad_(False)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for q, k in zip(
                    self.query.parameters(), self.key.parameters(), strict=True
                ):
                    k.data = k.data * 0.9 + q.data * 0.1
                wanted = self.key(inputs)
            return self.query(inputs) - wanted

    net = Moco()
    optimizer = torch.optim.SGD(net.query.parameters(), lr=0.1)
    model = AdaptiveDataParallel(net, optimizer)
    train(model, optimizer)
    return net.state_dict()


@program
def sums() -> dict[str, Any]:
    """One replica alone counts what all of them know."""
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    model = AdaptiveDataParallel(net, optimizer)
    total = Accumulator(name="total")
    for batch, (inputs, targets) in batches(loader()):
        optimizer.zero_grad()
        F.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        if elasticrun.rank() == 0:
            total["batches"] += 1
        maybe_die("step", batch)
    with total.synchronized():
        return net.state_dict() | {"batches": total["batches"]}


@program
def dropout() -> dict[str, Any]:
    """Each replica draws in its forward pass, and adds up behind the step."""
    net = nn.Sequential(*make_net(), nn.Dropout(0.4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = AdaptiveDataParallel(net, optimizer)
    total = Accumulator(name="total")
    for batch, (inputs, targets) in batches(loader()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs + 0.1 * np.random.rand()), targets)
        maybe_die("forward", batch)
        loss.backward()
        maybe_die("backward", batch)
        optimizer.step()
        maybe_die("step", batch)
        total["loss"] += loss.item() * 0.5
        total["batches"] += 1
        maybe_die("added", batch)
    with total.synchronized():
        return net.state_dict() | {"batches": total["batches"], "loss": total["loss"]}


@program
def masked() -> dict[str, Any]:
    """Each replica has a seed of its own, and draws a mask for each epoch."""
    torch.manual_seed(elasticrun.rank())
    np.random.seed(elasticrun.rank())
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = AdaptiveDataParallel(net, optimizer)
    train = loader()
    for epoch in remaining_epochs_until(EPOCHS):
        mask, noise = torch.rand(6) > 0.3, np.random.rand()
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs * mask + noise), targets)
            maybe_die("forward", epoch * 5 + train.batch_index)
            loss.backward()
            optimizer.step()
    return net.state_dict()


@program
def long() -> dict[str, Any]:
    """Nine tenths of a turn lie before its step; sums and a log behind it."""
    torch.manual_seed(elasticrun.rank())
    np.random.seed(elasticrun.rank())
    net = nn.Sequential(*make_net(norm=True), nn.Dropout(0.4))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [20, 40])
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    total = Accumulator(name="total")
    log = LogFile("log.csv")
    train = loader()
    for _ in remaining_epochs_until(EPOCHS):
        for inputs, targets in train:
            optimizer.zero_grad()
            loss = F.mse_loss(model(inputs + 0.1 * np.random.rand()), targets)
            time.sleep(0.045)  # As of a larger model.
            loss.backward()
            optimizer.step()
            total["loss"] += loss.item() * 0.5
            total += {"batches": 1, "enough": ENOUGH.exists()}
            log.write(f"{train.batch_index},{optimizer.param_groups[0]['lr']}\n")
            time.sleep(0.005)
        scheduler.step()
        with total.synchronized():
            is_enough = total["enough"] > 0
            ended = {"batches": total["batches"], "loss": total["loss"]}
        if is_enough:
            break
    return net.state_dict() | ended | {"log": log.path.read_text()}


@program
def own_ddp() -> dict[str, Any]:
    """torch's DDP, whose BatchNorm is each replica's own until the next pass."""
    net = make_net(norm=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    register(net=net, optimizer=optimizer)
    model = nn.parallel.DistributedDataParallel(net)
    train(model, optimizer)
    return net.state_dict() if elasticrun.rank() == 0 else {}


@program
def labelled() -> dict[str, Any]:
    """Looks at more inputs behind a step, in training mode, without gradients."""
    net = make_net(norm=True)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = AdaptiveDataParallel(net, optimizer)
    for batch, (inputs, targets) in batches(loader()):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        maybe_die("forward", batch)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            (model if batch < 6 else net)(inputs + 0.1)
    return net.state_dict() if elasticrun.rank() == 0 else {}


@program
def usual() -> dict[str, Any]:
    """What a training has: a scaler that skips, a scheduler in the loop, clipping."""
    net = make_net(norm=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**16, growth_interval=2)
    average = torch.optim.swa_utils.AveragedModel(net)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    register(scaler=scaler, average=average)
    train = loader()
    valid = AdaptiveDataLoader(data, 50, even_batches=False, device=device)
    extra = AdaptiveDataLoader(data, 10, shuffle=True)
    kept = Variables(rows=[], best=9.0)
    for batch, (inputs, targets) in batches(train):
        optimizer.zero_grad()
        loss = F.mse_loss(model(inputs), targets)
        maybe_die("forward", batch)
        if batch % 4 == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        maybe_die("backward", batch)
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        average.update_parameters(net)
        maybe_die("step", batch)
        if batch % 3 == 0:
            model.eval()
            with torch.no_grad():
                for some, _ in valid:
                    kept.best = min(kept.best, 0.0 * float(model(some).sum()))
                    maybe_die("valid", batch)
            model.train()
            for _ in extra.batches(2):
                pass
        with torch.no_grad():
            for p in net.parameters():
                p.data.clamp_(-1, 1)
        kept.rows.append(batch)
        maybe_die("end", batch)
    ended = {"rows": kept.rows, "best": kept.best, "scale": scaler.get_scale()}
    ended["rate"] = optimizer.param_groups[0]["lr"]
    return net.state_dict() | ended | {"average": average.module[0].weight}


@program
def logged() -> dict[str, Any]:
    """Rank 0 writes a row for each batch."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = AdaptiveDataParallel(net, optimizer)
    log = LogFile("log.csv")
    log.write("a header\n")
    train(model, optimizer, lambda batch: log.write(f"{batch}\n"))
    return net.state_dict() | {"log": log.path.read_text()}


@program
def gan() -> dict[str, Any]:
    """Two models, of which one steps in each second iteration."""
    nets = make_net(), make_net()
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in nets]
    one = AdaptiveDataParallel(nets[0], optimizers[0], name="one")
    two = AdaptiveDataParallel(nets[1], optimizers[1], name="two")
    for batch, (inputs, targets) in batches(loader()):
        optimizers[0].zero_grad()
        F.mse_loss(one(inputs), targets).backward()
        maybe_die("between", batch)
        optimizers[0].step()
        maybe_die("half", batch)
        if batch % 2:
            optimizers[1].zero_grad()
            F.mse_loss(two(inputs), one(inputs).detach()).backward()
            maybe_die("backward", batch)
            optimizers[1].step()
        maybe_die("step", batch)
    return nets[0].state_dict() | {f"2.{k}": v for k, v in nets[1].state_dict().items()}


@program
def steps() -> dict[str, Any]:
    """Batches from a loader of two others, and gradients of two turns to a step."""
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = AdaptiveDataParallel(net, optimizer)
    first = loader(name="a")
    second = AdaptiveDataLoader(data, 15, name="b", device=device)
    both = CombinedLoader([first, second], mode="max_size_cycle")
    for epoch in remaining_epochs_until(EPOCHS):
        for (inputs, targets), (_others, _) in both:
            turn = both.batch_index
            loss = F.mse_loss(model(inputs), targets)
            loss = model.weigh(loss, member=first)
            maybe_die("forward", epoch * 7 + turn)
            loss.backward()
            if turn % 2:
                optimizer.step()
                optimizer.zero_grad()
            maybe_die("step", epoch * 7 + turn)
    for _ in remaining_steps_until(6):
        optimizer.zero_grad()
        F.mse_loss(model(x[:6].to(device)), y[:6].to(device)).backward()
        optimizer.step()
    return net.state_dict()


@program
def streams() -> dict[str, Any]:
    """Lines of text, and a state that is registered in the loop."""
    if elasticrun.rank() == 0:
        for number in range(4):
            lines = "".join(f"{number * 25 + n}\n" for n in range(25))
            Path(f"{number}.part").write_text(lines)
            os.replace(f"{number}.part", f"{number}.txt")
    dist.barrier()
    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    model = AdaptiveDataParallel(net, optimizer)
    texts = TextLines("*.txt", parse=int, lanes=4, window=10)
    train = AdaptiveDataLoader(texts, 20, shuffle=True)
    for epoch in remaining_epochs_until(EPOCHS):
        for numbers in train:
            batch = epoch * 5 + train.batch_index
            if batch == 3:
                late = Variables(name="late", seen=[])
            if batch >= 3:
                late = locals().get("late") or Variables(name="late", seen=[])
                late.seen.append(batch)
            maybe_die("forward", batch)
            optimizer.zero_grad()
            inputs, targets = x[numbers].to(device), y[numbers].to(device)
            F.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            maybe_die("step", batch)
    return net.state_dict() | {"late": late.seen}


ended = PROGRAMS[os.environ["PROGRAM"]]()
if elasticrun.rank() == 0:
    text = repr(
        {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in ended.items()
        }
    )
    print("on", device)
    print("END", hashlib.sha256(text.encode()).hexdigest(), flush=True)
    Path(f"ended-{elasticrun.generation()}").write_text(text)
