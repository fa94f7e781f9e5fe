"""Losses that are no mean over samples, as users write them; see `steps`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss, normalize

from elasticrun import world_size
from tests.support.steps import (
    NUM_LOOPS,
    Elastic,
    Torch,
    network,
    sgd,
    state_of,
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
    if not isinstance(given, Elastic) or world_size() == 1:
        return rows, 0
    num_valid = torch.tensor([given.loader.num_valid])
    counts = [torch.empty_like(num_valid) for _ in range(world_size())]
    dist.all_gather(counts, num_valid)
    lengths = [int(count) for count in counts]
    longest = max(*lengths, 1)
    padded = torch.cat([rows, rows.new_zeros(longest - len(rows), *rows.shape[1:])])
    parts = _Gather.apply(padded)
    own = [part[:length] for part, length in zip(parts, lengths, strict=True)]
    return torch.cat(own), sum(lengths[: dist.get_rank()])


def weigh(model: Any, loss: Tensor, *args: Any, **options: Any) -> Tensor:
    """Weigh a loss if the model can; with plain torch there is nothing to weigh."""
    if not hasattr(model, "weigh"):
        return loss
    weighed: Tensor = model.weigh(loss, *args, **options)
    return weighed


def num_valid(given: Torch, rows: Tensor) -> int:
    return given.loader.num_valid if isinstance(given, Elastic) else len(rows)


def contrastive(given: Torch) -> list[Any]:
    """Each sample is to find its pair among those of all replicas."""
    net = nn.ModuleList([network(2), network(2, 2)])
    optimizer = sgd(net)
    model = given.parallel(Pair(net), optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            first, second = model(x, y)
            others, begin = gather(given, second)
            own = torch.arange(len(x)) + begin
            loss = cross_entropy(first @ others.T, own % len(others))
            weigh(model, loss).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
    return state_of(net)


class Pair(nn.Module):
    def __init__(self, net: nn.ModuleList) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return normalize(self.net[0](x)), normalize(self.net[1](y))


def global_loss(given: Torch, *, has_gradients: bool) -> list[Any]:
    """Each replica computes the loss of all, of which it has all gradients or its."""
    net = network(2)
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            output = model(x)
            targets, _ = gather(given, y)
            outputs, begin = gather(given, output)
            if not has_gradients:
                own = output[: num_valid(given, x)]
                rest = outputs.detach()
                outputs = torch.cat([rest[:begin], own, rest[begin + len(own) :]])
            loss = ((outputs - targets).mean(0) ** 2).sum()  # Not a sum over samples.
            if has_gradients:
                weigh(model, loss).backward()
            else:
                weigh(model, loss, reduction="sum").backward()
            optimizer.step()
    return state_of(net)


def over_tokens(given: Torch, *, kind: str) -> list[Any]:
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
    for _ in range(NUM_LOOPS):
        for _, (x, _y) in given.batches():
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
    return state_of(net)


def summed(given: Torch) -> list[Any]:
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            loss = mse_loss(model(x), y, reduction="sum")
            weigh(model, loss, reduction="sum").backward()
            nn.utils.clip_grad_value_(net.parameters(), 1.0)
            optimizer.step()
    return state_of(net)


def different_means(given: Torch) -> list[Any]:
    """A loss over positive values, one over samples, and a penalty, in one pass."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            output = model(x)
            positive = y > 0.5
            count = positive.sum().item()
            over_positive = ((output - y)[positive] ** 2).sum() / max(count, 1)
            over_samples = ((output.mean(1) - 1) ** 2).mean()
            penalty = sum((each**2).sum() for each in net.parameters())
            loss = weigh(model, over_positive, count)
            loss = loss + weigh(model, over_samples + 0.1 * penalty)
            loss.backward()
            optimizer.step()
    return state_of(net)


def weighed_and_not(given: Torch) -> list[Any]:
    """Two passes in a turn, of which one needs no weighing."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            loss = ((model(-x) - 1) ** 2).mean()
            weigh(model, loss).backward()
            optimizer.step()
    return state_of(net)


def line_search(given: Torch, *, counts: bool) -> list[Any]:
    """LBFGS, which decides by its closure's loss how often it calls that."""
    net = network()
    optimizer = torch.optim.LBFGS(
        net.parameters(), max_iter=4, line_search_fn="strong_wolfe"
    )
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                if counts:
                    positive = y > 0.2
                    total = positive.sum()
                    loss = ((model(x) - y)[positive] ** 2).sum() / total.clamp(min=1)
                    loss = weigh(model, loss, total)
                else:
                    loss = mse_loss(model(x), y)
                loss.backward()
                return loss

            optimizer.step(closure)
    return state_of(net)


def frozen_in_turns(given: Torch, *, in_turns: bool) -> list[Any]:
    """A layer is unfrozen in the second loop, and (in turns) another frozen."""
    net = network()
    net[0].requires_grad_(False)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    model = given.parallel(net, optimizer)
    for loop in range(NUM_LOOPS):
        net[0].requires_grad_(loop == 1)
        net[2].weight.requires_grad_(loop == 0 or not in_turns)
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    return state_of(net)


def reading_gradients(given: Torch) -> list[Any]:
    """Changes each gradient after each pass, without asking whether there is one."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad.add_(0.01).clamp_(-0.05, 0.05)
            optimizer.step()
    return state_of(net)


class HandwrittenAverage(nn.Module):
    """An average of parameters that is not torch's."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        super().__init__()
        self.decay = decay
        self.average = nn.ParameterList(each.detach() for each in module.parameters())

    @torch.no_grad()
    def update(self, module: nn.Module) -> None:
        for mean, each in zip(self.average, module.parameters(), strict=True):
            mean.lerp_(each, 1 - self.decay)


def averaged_by_hand(given: Torch) -> list[Any]:
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    ema = HandwrittenAverage(net, 0.8)
    given.keep(ema=ema)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
            ema.update(model)
    return state_of(net, ema)
