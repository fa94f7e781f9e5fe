"""A training whose replicas die at given places, each in a generation of its own.

DEATHS is JSON: for each generation [rank, place, epoch, batch]; WITH_MACHINE lets the
launcher and all its replicas die with that one. The end of the training is printed: the
bits of the model, and what was counted. It comes after EPOCHS, or with the epoch in
which there is a mark `enough`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from pathlib import Path

import torch
import torch._dynamo  # In the forkserver; else the optimizer of each replica does.
from torch import nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    remaining_epochs_until,
)
from elasticrun.checkpoint.draft import Draft
from tests.support.deaths import die

DEATHS = json.loads(os.environ.get("DEATHS", "[]"))
SUMS_IN_TRAINING = "SUMS" in os.environ
DIES_SAVING = int(os.environ.get("DIES_SAVING", -1))
CATCHES = "CATCHES" in os.environ
WITH_MACHINE = "WITH_MACHINE" in os.environ
NUM_EPOCHS = int(os.environ.get("EPOCHS", 3))
ENOUGH = Path(os.environ["LAUNCHER_TEST"], "marks", "enough")


def maybe_die(place: str, epoch: int, batch: int) -> None:
    generation = elasticrun.generation()
    if generation < len(DEATHS):
        rank, *where = DEATHS[generation]
        if rank == elasticrun.rank() and where == [place, epoch, batch]:
            die(with_machine=WITH_MACHINE)
        hangs = rank == elasticrun.rank() and where == ["hang", epoch, batch]
        if hangs and place == "step":
            Path(os.environ["LAUNCHER_TEST"], "marks", "hangs").touch()
            threading.Event().wait()
        if generation == DIES_SAVING and where[1:] == [epoch, batch]:
            # A survivor of this generation, in the rescue that is about to come.
            Draft.commit = lambda *_: os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(1)
device = elasticrun.device()
x = torch.randn(200, 6)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
net = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 1))
net = net.to(device)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
model = AdaptiveDataParallel(net, optimizer, scheduler)
if CATCHES:
    other_net = nn.Linear(6, 1).to(device)
    other_optimizer = torch.optim.SGD(other_net.parameters(), lr=0.01)
    other = AdaptiveDataParallel(other_net, other_optimizer, name="other")
train = AdaptiveDataLoader(data, batch_size=20, shuffle=True, device=device)
valid = AdaptiveDataLoader(data, batch_size=50, even_batches=False, device=device)
counts = Variables(trained=0, validated=0, lost=0, made=0)
in_training = Accumulator(name="in-training")


def step(inputs: torch.Tensor, targets: torch.Tensor, epoch: int) -> None:
    place = epoch, train.batch_index
    if CATCHES:  # Another model makes its step before this one fails.
        other_optimizer.zero_grad()
        nn.functional.mse_loss(other(inputs), targets).backward()
        other_optimizer.step()
    maybe_die("forward", *place)
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(inputs), targets)
    maybe_die("loss", *place)
    loss.backward()
    maybe_die("backward", *place)
    optimizer.step()
    counts.trained += train.is_step * train.global_batch_size
    if SUMS_IN_TRAINING:
        in_training["samples"] += train.num_valid
    maybe_die("step", *place)


for epoch in remaining_epochs_until(NUM_EPOCHS):
    model.train()
    for inputs, targets in train:
        try:
            step(inputs, targets, epoch)
        except RuntimeError:  # As of programs that leave out a batch without memory.
            if not CATCHES:
                raise
            counts.lost += 1
    scheduler.step()
    made = Variables(name=f"made-in-{epoch}", number=0)
    made.number += 1
    counts.made += made.number
    maybe_die("between", epoch, 0)
    model.eval()
    total = Accumulator()
    with torch.no_grad():
        for inputs, targets in valid:
            total["samples"] += len(inputs)
            total["enough"] += ENOUGH.exists()
            total["error"] += nn.functional.l1_loss(model(inputs), targets).item()
            maybe_die("valid", epoch, valid.batch_index)
    with total.synchronized():
        counts.validated += total["samples"]
        is_enough = total["enough"] > 0
    if is_enough:
        break

with in_training.synchronized():
    samples = in_training["samples"] if SUMS_IN_TRAINING else counts.trained
state = {**net.state_dict(), "rate": torch.tensor(optimizer.param_groups[0]["lr"])}
digest = hashlib.sha256(
    b"".join(each.cpu().numpy().tobytes() for each in state.values())
)
if elasticrun.rank() == 0:
    ended = [counts.trained, counts.validated, samples, counts.made, counts.lost]
    print("on", device)
    print("END", digest.hexdigest(), *ended, flush=True)
