"""Losses that are no mean over samples, as users write them; see `steps`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from elasticrun import world_size
from tests.support.steps import (
    NUM_BATCHES,
    Practice,
    Torch,
    is_spread,
    network,
    sgd,
    state_of,
    train_by,
)


class _Gather(torch.autograd.Function):
    """Rows of all replicas, of which each has as many; gradients are added up."""

    @staticmethod
    def forward(_: Any, rows: Tensor) -> Tensor:
        parts = [torch.empty_like(rows) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Any:
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def gather(given: Torch, rows: Tensor) -> tuple[Tensor, int]:
    """Return the rows of all replicas without padding, and where this one's begin."""
    if not is_spread(given):
        return rows, 0
    own = torch.tensor([given.num_valid(rows)])
    counts = [torch.empty_like(own) for _ in range(world_size())]
    dist.all_gather(counts, own)
    lengths = [int(count) for count in counts]
    longest = max(*lengths, 1)
    padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    parts = _Gather.apply(padded)
    real = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    return torch.cat(real), sum(lengths[: dist.get_rank()])


def weigh(model: Any, loss: Tensor, *args: Any, **options: Any) -> Tensor:
    """Weigh a loss if the model can; with plain torch there is nothing to weigh."""
    if not hasattr(model, "weigh"):
        return loss
    weighed: Tensor = model.weigh(loss, *args, **options)
    return weighed


def contrastive(given: Torch) -> Practice:
    """Each sample is to find its pair among those of all replicas."""
    net = nn.ModuleList([network(2), network(2, 2)])
    optimizer = sgd(net)
    model = given.parallel(Pair(net), optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        first, second = model(x, y)
        others, begin = gather(given, second)
        own = torch.arange(len(x)) + begin
        loss = cross_entropy(first @ others.T, own % len(others))
        weigh(model, loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()

    return step, lambda: state_of(net)


class Pair(nn.Module):
    def __init__(self, net: nn.ModuleList) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.net[0](x)), normalize(self.net[1](y))


def global_loss(given: Torch, *, has_gradients: bool) -> Practice:
    """Each replica computes the loss of all, of which it has all gradients or its."""
    net = network(2)
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        output = model(x)
        targets, _ = gather(given, y)
        outputs, begin = gather(given, output)
        if not has_gradients:
            own = output[: given.num_valid(x)]
            rest = outputs.detach()
            outputs = torch.cat([rest[:begin], own, rest[begin + len(own) :]])
        loss = ((outputs - targets).mean(0) ** 2).sum()  # Not a sum over samples.
        if has_gradients:
            weigh(model, loss).backward()
        else:
            weigh(model, loss, reduction="sum").backward()
        optimizer.step()

    return step, lambda: state_of(net)


def over_tokens(given: Torch, *, kind: str) -> Practice:
    """A mean over those of each sample's tokens that count, some samples having none.

    Args:
        kind: "scaled" by a GradScaler, "weighted" by the tokens' classes, or "plain".
    """
    net = network(6)
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    scaler = torch.amp.GradScaler(
        "cpu", 4.0, growth_interval=2, enabled=kind == "scaled"
    )
    given.keep(scaler=scaler)
    weights = None
    if kind == "weighted":
        weights = torch.tensor([0.3, 2.0], dtype=torch.float64)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        logits = model(x).reshape(-1, 2)
        labels = (x[:, :3] > 0).long()
        labels[torch.cumsum(x.abs(), 1)[:, :3] > 2.0] = -100
        labels = labels.flatten()
        is_counted = labels != -100
        total = is_counted.sum()
        if weights is not None:
            total = weights[labels[is_counted]].sum()
        loss = cross_entropy(logits, labels, weights, reduction="sum") / (
            total.clamp(min=1e-9)
        )
        loss = weigh(model, loss, total)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        scaler.step(optimizer)
        scaler.update()

    return step, lambda: state_of(net)


def summed(given: Torch) -> Practice:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = mse_loss(model(x), y, reduction="sum")
        return weigh(model, loss, reduction="sum")

    return train_by(given, net, loss_of, optimizer)


def different_means(given: Torch) -> Practice:
    """A loss over positive values, one over samples, and a penalty, in one pass."""

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        positive = y > 0.5
        count = positive.sum().item()
        over_positive = ((output - y)[positive] ** 2).sum() / max(count, 1)
        over_samples = ((output.mean(1) - 1) ** 2).mean()
        penalty = sum((each**2).sum() for each in model.parameters())
        loss = weigh(model, over_positive, count)
        return loss + weigh(model, over_samples + 0.1 * penalty)

    return train_by(given, network(), loss_of)


def weighed_and_not(given: Torch) -> Practice:
    """Two passes in a turn, of which one needs no weighing."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        loss = ((model(-x) - 1) ** 2).mean()
        weigh(model, loss).backward()
        optimizer.step()

    return step, lambda: state_of(net)


def frozen_in_turns(given: Torch, *, in_turns: bool) -> Practice:
    """A layer is unfrozen in the second loop, and (in turns) another frozen."""
    net = network()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        is_first = given.number < NUM_BATCHES
        net[0].requires_grad_(not is_first)
        net[2].weight.requires_grad_(is_first or not in_turns)
        return mse_loss(model(x), y)

    return train_by(given, net, loss_of, optimizer)


def reading_gradients(given: Torch) -> Practice:
    """Changes each gradient after each pass, without asking whether there is one."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        for parameter in net.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(0.01).clamp_(-0.05, 0.05)
        optimizer.step()

    return step, lambda: state_of(net)


class Average:
    """An average of parameters that is not torch's."""

    def __init__(self, module: nn.Module) -> None:
        self.values = [each.detach().clone() for each in module.parameters()]

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        for mean, each in zip(self.values, module.parameters(), strict=True):
            mean.lerp_(each, 0.2)

    def state_dict(self) -> dict[str, list[Tensor]]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, list[Tensor]]) -> None:
        self.values = state["values"]


class AverageModule(nn.Module):
    """One that is a module, of which timm's is a kind."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = copy.deepcopy(module)

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        pairs = zip(self.module.parameters(), module.parameters(), strict=True)
        for mean, each in pairs:
            mean.lerp_(each, 0.2)


def averaged_by_hand(given: Torch, *, is_module: bool) -> Practice:
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    ema = AverageModule(net) if is_module else Average(net)
    given.keep(ema=ema)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        ema.update(model)

    def result() -> list[Any]:
        of_average = state_of(ema) if isinstance(ema, AverageModule) else ema.values
        return [*state_of(net), *of_average]

    return step, result
