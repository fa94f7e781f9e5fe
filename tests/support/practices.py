"""What people train with today, small: compilers, optimizers, shapes; see `steps`."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, mse_loss, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from tests.support.losses import weigh
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


def compiled(given: Torch, *, what: str) -> Practice:
    """torch.compile in every place."""

    def optimized(given: Any) -> Any:
        return torch.compile(given, backend="aot_eager")

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y)

    net = network()
    optimizer = sgd(net)
    if what == "in place":
        net.compile(backend="aot_eager")
    elif what == "layer":
        # Dynamo looks at the gradient of what the layer before gave.
        warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor")
        net[1] = optimized(net[1])
    model = given.parallel(optimized(net) if what == "inside" else net, optimizer)
    called = optimized(model) if what == "around" else model
    loss = optimized(loss_of) if what == "loss" else loss_of

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss(called, x, y).backward()
        optimizer.step()

    return step, lambda: state_of(net)


def autocast(given: Torch) -> Practice:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(x.float())
        return mse_loss(output.float(), y.float())

    return train_by(given, network().float(), loss_of)


class Checkpointed(nn.Module):
    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first = network(5)
        self.second = network(2)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        if self.use_reentrant:  # It needs an input that requires a gradient.
            x = x.detach().requires_grad_()
        for layer in (self.first, self.second):
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


def checkpointed(given: Torch, *, use_reentrant: bool) -> Practice:
    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return mse_loss(model(x), y)

    return train_by(given, Checkpointed(use_reentrant=use_reentrant), loss_of)


class Transformer(nn.Module):
    """A small GPT-2, whose embedding is its head, or a small ViT."""

    def __init__(self, *, is_causal: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.is_causal = is_causal
        self.words = nn.Embedding(7, 8) if is_causal else nn.Linear(1, 8)
        self.places = nn.Parameter(torch.randn(6, 8))
        self.first = nn.Parameter(torch.randn(8))
        self.norms = nn.ModuleList(nn.LayerNorm(8) for _ in range(3))
        self.attention = nn.Linear(8, 24)
        self.joined = nn.Linear(8, 8)
        self.wide = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 7 if is_causal else 2, bias=False)
        if is_causal:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x if self.is_causal else x[..., None])
        x = torch.cat([self.first.expand(len(x), 1, 8), x], 1) + self.places
        heads = self.attention(self.norms[0](x)).unflatten(-1, (3, 2, 4))
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        x = x + self.joined(mixed.transpose(1, 2).flatten(-2))
        x = self.norms[2](x + self.wide(self.norms[1](x)))
        y: Tensor = self.head(x if self.is_causal else x[:, 0])
        return y


def transformer(given: Torch, *, kind: str) -> Practice:
    """GPT-2 (tied weights, a mean over tokens) or ViT, with what belongs to them."""
    net = Transformer(is_causal=kind == "GPT-2").double()
    matrices = [each for each in net.parameters() if each.ndim == 2]
    rest = [each for each in net.parameters() if each.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": rest}],
        lr=0.01,
        betas=(0.9, 0.95),
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    model = given.parallel(net, optimizer, scheduler)

    def step(x: Tensor, y: Tensor) -> None:
        if kind == "GPT-2":
            words = (3 * x + 3).long().clamp(0, 6)
            lengths = 1 + (4 * y[:, :1].sigmoid()).long()
            words_to_come = words.where(torch.arange(5) < lengths, -100)
            count = (words_to_come != -100).sum()
            logits = model(words)[:, :-1].transpose(1, 2)
            loss = weigh(model, cross_entropy(logits, words_to_come), count)
        else:
            labels = (y[:, 0] > 0).long()
            loss = cross_entropy(model(x), labels, label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()

    return step, lambda: state_of(net)


def gradient_penalty(given: Torch) -> Practice:
    """Gradients by the inputs are to have the length 1."""

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        output = model(x)
        (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
        return mse_loss(output, y) + ((slope.norm(dim=1) - 1) ** 2).mean()

    return train_by(given, network(), loss_of)


def adversaries_in_turns(given: Torch) -> Practice:
    """A critic steps, with a penalty, and then the generator it is frozen for."""
    generator, critic = network(2), network(1, 2)
    of_generator, of_critic = sgd(generator), sgd(critic)
    g = given.parallel(generator, of_generator)
    d = given.parallel(critic, of_critic)

    def step(x: Tensor, y: Tensor) -> None:
        made = g(x).detach()
        between = (0.3 * y + 0.7 * made).requires_grad_()
        of_made, of_real, of_between = d(torch.cat([made, y, between])).chunk(3)
        (slope,) = torch.autograd.grad(of_between.sum(), between, create_graph=True)
        penalty = ((slope.norm(dim=1) - 1) ** 2).mean()
        of_critic.zero_grad()
        (of_made.mean() - of_real.mean() + penalty).backward()
        of_critic.step()
        of_generator.zero_grad()
        critic.requires_grad_(False)
        (-d(g(x)).mean()).backward()
        critic.requires_grad_(True)
        of_generator.step()

    return step, lambda: state_of(generator, critic)


def muon(given: Torch) -> Practice:
    """Muon for matrices, and AdamW for the rest."""
    net = network()
    matrices = [each for each in net.parameters() if each.ndim == 2]
    rest = [each for each in net.parameters() if each.ndim != 2]
    optimizers = [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(rest, lr=0.05)]
    model = given.parallel(net, optimizers)

    def step(x: Tensor, y: Tensor) -> None:
        for each in optimizers:
            each.zero_grad()
        mse_loss(model(x), y).backward()
        for each in optimizers:
            each.step()

    return step, lambda: state_of(net)


class ScheduleFree(torch.optim.Optimizer):
    """Computes gradients between where it is and the average of where it has been."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "num_steps": 0, "is_training": True})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["num_steps"] += 1
            for each in group["params"]:
                state = self.state[each]
                if not state:
                    state.update(here=each.clone(), average=each.clone())
                state["here"].sub_(each.grad, alpha=group["lr"])
                state["average"].lerp_(state["here"], 1 / group["num_steps"])
        self.show(is_training=True)

    @torch.no_grad()
    def show(self, *, is_training: bool) -> None:
        """Let parameters be those to train, or to evaluate."""
        for group in self.param_groups:
            group["is_training"] = is_training
            for each in group["params"]:
                if state := self.state[each]:
                    weight = 0.9 if is_training else 1.0
                    each.copy_(state["here"].lerp(state["average"], weight))


def schedule_free(given: Torch) -> Practice:
    net = network()
    optimizer = ScheduleFree(net.parameters(), lr=0.3)
    model = given.parallel(net, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        if given.number % NUM_BATCHES == NUM_BATCHES - 1 and given.is_step:
            optimizer.show(is_training=False)
            with torch.no_grad():
                model(x)
            optimizer.show(is_training=True)

    return step, lambda: state_of(net)


class Layers(nn.Module):
    """Returns what comes before the end, too."""

    def __init__(self) -> None:
        super().__init__()
        net = network()
        self.first, self.last = net[:2], net[2]

    def forward(self, x: Tensor) -> dict[str, Any]:
        hidden = self.first(x)
        return {"hidden": [hidden], "y": self.last(hidden), "kind": "layers"}


def sharded(given: Torch, *, kind: str) -> Practice:
    """FSDP2, which averages gradients by itself.

    Args:
        kind: "registered", without `AdaptiveDataParallel`; with it, a "mean" over
            samples, which is clipped; one over what is "counted"; or "two losses", each
            with its own passes.
    """
    net = Layers()
    if is_spread(given):
        fully_shard(net.first)
        fully_shard(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    model: Any = net
    if kind == "registered":
        given.keep(model=net, optimizer=optimizer)
    else:
        model = given.parallel(net, optimizer)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        output = model(x)
        loss = mse_loss(output["y"], y) + output["hidden"][0].square().mean() / 9
        if kind == "registered":
            return loss * given.loss_weight
        if kind != "counted":
            return loss
        counts = (y[:, :1] > 0) * 1.0
        total = ((output["y"] - y).square() * counts).sum()
        count = counts.sum()
        return weigh(model, total / count.clamp(1), count=count)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        loss_of(x, y).backward()
        if kind == "two losses":
            loss_of(-x, y).backward()
        if kind == "mean":
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()

    def result() -> list[Any]:
        return [
            each.full_tensor() if isinstance(each, DTensor) else each
            for each in state_of(net)
        ]

    return step, result


def partitioned(given: Torch) -> Practice:
    """An optimizer of which each replica keeps a part of the state."""
    net = network()
    optimizer: Any = torch.optim.Adam(net.parameters(), lr=0.1)
    if is_spread(given):
        with warnings.catch_warnings():  # Of what torch itself imports.
            warnings.simplefilter("ignore")
            from torch.distributed.optim import ZeroRedundancyOptimizer
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.1)
    return train_by(given, net, lambda model, x, y: mse_loss(model(x), y), optimizer)


def compressed(given: Torch) -> Practice:
    """A communication hook, whose steps are those of as many replicas only."""
    net = network()
    net[0] = nn.Linear(5, 8).double()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    if hasattr(model, "register_comm_hook"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()

    return step, lambda: state_of(net)
