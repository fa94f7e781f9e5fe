"""Ways to train, each by what it comes to; the same at any number of processes."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    Endless,
    Mixed,
    Streams,
    register,
    remaining_epochs_until,
)
from tests.support.same_bits import Noisy, digest, mixed, network

BATCH = 13


class AverageMeter:
    """As scripts have it: what they print."""

    def __init__(self) -> None:
        self.total = self.count = 0.0

    def update(self, value: float, num: int) -> None:
        self.total += value * num
        self.count += num

    def __repr__(self) -> str:
        return repr(self.total / max(self.count, 1))


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), network())


def wrapped(net: nn.Module, way: str, **options: Any) -> tuple[Any, Any]:
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    return AdaptiveDataParallel(net, optimizer, name=way, **options), optimizer


def with_a_scaler() -> Any:
    """Scale the loss; an infinite gradient in one share leaves the whole step out."""
    net = network()
    model, optimizer = wrapped(net, "scaled")
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3)
    register(scaler=scaler)
    train = AdaptiveDataLoader(Noisy(), BATCH, name="scaled.train")
    scales = []
    for x, y in train.batches(6):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = cross_entropy(model(x).float(), y)
        is_bad = train.batch_index == 2 and train.running_loop.current.part.share == 1
        scaler.scale(loss * float("inf") if is_bad else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        if train.is_step:
            scales.append(scaler.get_scale())
    return digest(net), scales


def with_averaged_weights() -> Any:
    net = normed()
    model, optimizer = wrapped(net, "averaged")
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    register(average=average)
    train = AdaptiveDataLoader(Noisy(), BATCH, drop_last=True, name="averaged.train")
    for x, y in train.batches(5):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
        average.update_parameters(net)
    return digest(net, average)


def with_what_scripts_do_once_a_batch() -> Any:
    """Average buffers, evaluate, change buffers and draw a rate, behind the step."""
    net = normed()
    net.register_buffer("num_steps", torch.zeros(()))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    hooked: list[float] = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(float(torch.rand(()))))
    model = AdaptiveDataParallel(net, optimizer, name="once")
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    register(unscaled=scaler)
    average = {key: value.clone() for key, value in net.state_dict().items()}
    train = AdaptiveDataLoader(Noisy(), BATCH, drop_last=True, name="once.train")
    seen = []
    for x, y in train.batches(6):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        is_bad = train.batch_index == 3
        scaler.scale(loss * float("inf") if is_bad else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        if not train.is_step:
            continue
        for key, value in net.state_dict().items():
            average[key] = average[key] * 0.9 + value * 0.1
        net.num_steps += 1
        with torch.no_grad():
            model.eval()
            seen.append([float(model(each[None]).sum()) for each, _ in Noisy(2)])
            model.train()
            model(x)  # For the accuracy; its averages are nobody's.
        optimizer.param_groups[0]["lr"] = 0.1 * random.random()
    assert net.num_steps == 6
    return digest(net), seen, hooked, repr(average), float(torch.rand(()))


def with_schedulers_of_epochs_and_steps() -> Any:
    """Print rates, losses and accuracies, and let one rate follow the accuracy."""
    net = normed()
    optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
    warmup = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=20)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    model = AdaptiveDataParallel(net, optimizer, [warmup, plateau], name="rates")
    train = AdaptiveDataLoader(Noisy(52), BATCH, shuffle=True, name="rates.train")
    valid = AdaptiveDataLoader(Noisy(10), 7, even_batches=False, name="rates.valid")
    sums = Accumulator(name="rates.sums")
    said: list[Any] = []
    for epoch in remaining_epochs_until(3):
        meter = AverageMeter()
        model.train()
        for x, y in train:
            optimizer.zero_grad()
            loss = cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            warmup.step()
            meter.update(loss.item(), train.num_valid)
            sums["loss"] += meter.total
            meter = AverageMeter()
        model.eval()
        for x, y in valid:
            with torch.no_grad():
                sums["right"] += int((model(x).argmax(1) == y).sum())
                sums["seen"] += len(y)
        with sums.synchronized():
            plateau.step(sums["loss"])
            said.append(f"{epoch} {sums['loss']!r} {sums['right'] / sums['seen']!r}")
            sums.clear()
        said.append(optimizer.param_groups[0]["lr"])
        said.append(float(torch.rand(())))
    return digest(net), said, float(torch.rand(()))


def with_a_plan_of_sizes() -> Any:
    """Batches grow, rates with them, and each share is cut further."""
    net = network()
    model, optimizer = wrapped(net, "planned", scaling="sqrt")
    train = AdaptiveDataLoader(
        Noisy(), {0: 6, 60: 17}, max_local_batch_size=3, name="planned.train"
    )
    for x, y in train.batches(16):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return digest(net)


def with_counts_of_tokens() -> Any:
    """Weigh losses over as many tokens as a share happens to have, one has none."""
    net = nn.Linear(8, 3)
    model, optimizer = wrapped(net, "counted")
    train = AdaptiveDataLoader(Noisy(), BATCH, name="counted.train")
    for x, y in train.batches(5):
        optimizer.zero_grad()
        kept = (y != 1) & (x[:, 0] > -0.5)
        lengths = 1 + y[kept] / 3  # No whole numbers: sums depend on their order.
        loss = cross_entropy(model(x[kept]), y[kept], reduction="none")
        mean = (loss * lengths).sum() / lengths.sum().clamp(min=1e-9)
        model.weigh(mean, count=lengths.sum()).backward()
        optimizer.step()
    return digest(net)


def with_summed_losses() -> Any:
    net = network()
    model, optimizer = wrapped(net, "summed")
    train = AdaptiveDataLoader(Noisy(), BATCH, max_local_batch_size=2, name="summed.t")
    for x, y in train.batches(4):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y, reduction="sum")
        model.weigh(loss, reduction="sum").backward()
        optimizer.step()
    return digest(net)


def with_negatives_of_the_share() -> Any:
    net = network()
    model, optimizer = wrapped(net, "contrastive")
    train = AdaptiveDataLoader(Noisy(), BATCH, num_workers=1, name="contrastive.t")
    for x, _ in train:
        optimizer.zero_grad()
        a, b = normalize(model(x)), normalize(model(x + 0.1 * torch.randn_like(x)))
        model.weigh(cross_entropy(a @ b.T / 0.1, torch.arange(len(x)))).backward()
        optimizer.step()
    return digest(net)


def with_combined_loaders(**options: Any) -> Any:
    """Of the small batches of one member some shares have no sample."""
    net = network()
    model, optimizer = wrapped(net, f"combined{len(options)}")
    name = f"combined{len(options)}.both"
    few = AdaptiveDataLoader(Noisy(11), 3, shuffle=True, name=f"{name}.few")
    many = AdaptiveDataLoader(Noisy(), BATCH, name=f"{name}.many", **options)
    both = CombinedLoader({"few": few, "many": many}, "max_size_cycle", name=name)
    seen = Accumulator(name=f"{name}.seen")
    for batch in both:
        (x, y), (z, _) = batch["few"], batch["many"]
        optimizer.zero_grad()
        loss = model.weigh(cross_entropy(model(x), y), member=few)
        other = model(z + torch.randn_like(z)).square().mean()
        (loss + model.weigh(other, member=many)).backward()
        optimizer.step()
        seen["few"] += few.num_valid * loss.item()
    with seen.synchronized():
        return digest(net), seen["few"]


def with_combined_loaders_that_are_cut() -> Any:
    return with_combined_loaders(max_local_batch_size=2, num_workers=1)


def with_batches_of_its_own() -> Any:
    net = normed()
    model, optimizer = wrapped(net, "own")
    lists = [[0, 1, 2], [], [*range(20)], [7, 7, 8, 9, 9, 9]]
    for x, y in AdaptiveDataLoader(Noisy(), batch_sampler=lists, name="own.train"):
        if len(x) == 1:  # Too few for BatchNorm.
            x, y = x.repeat(2, 1), y.repeat(2)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return digest(net)


def with_fewer_samples_than_shares() -> Any:
    net = network()
    model, optimizer = wrapped(net, "short")
    data = TensorDataset(torch.randn(8, 8), torch.arange(8) % 3)
    for x, y in AdaptiveDataLoader(data, 6, name="short.train"):  # Then of two.
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return digest(net), float(torch.rand(()))


class Records(Streams):
    """Streams of random numbers."""

    block = 4

    def __init__(self, sizes: list[int], **options: Any) -> None:
        names = [f"part {each}" for each in range(len(sizes))]
        super().__init__(names, lengths=sizes, transform=jittered, **options)
        self._sizes = sizes

    def open(self, stream: int, first: int) -> Iterator[Any]:
        size = self._sizes[stream]
        x = torch.randn(size, 8, generator=torch.Generator().manual_seed(stream))
        yield from zip(x[first:], range(first, size), strict=True)


def jittered(record: Any) -> Any:
    x, y = record
    return x + 0.1 * torch.randn(8) + random.random(), y % 3


class Whole(Records):
    """Streams of which each is read by one lane."""

    block = 100


def with_streams(
    *, kind: Any = Records, sizes: Sequence[int] = (9,) * 7, lanes: int = 6
) -> Any:
    """Read in as many workers as there are other processes."""
    net = normed()
    name = f"streams{lanes}.{len(sizes)}"
    model, optimizer = wrapped(net, name)
    train = AdaptiveDataLoader(
        kind([*sizes], lanes=lanes),
        BATCH,
        shuffle=True,
        num_workers=elasticrun.world_size() - 1,
        max_local_batch_size=3,
        collate_fn=mixed,
        drop_last=True,
        name=name,
    )
    for x, y in train:
        if len(x) == 1:  # Too few for BatchNorm.
            x, y = x.repeat(2, 1), y.repeat(2)
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        optimizer.step()
    return digest(net), float(torch.rand(()))


def with_fewer_streams_than_shares() -> Any:
    return with_streams(lanes=3)


def with_streams_that_run_dry() -> Any:
    """The first share has no samples any more where others have some."""
    return with_streams(kind=Whole, sizes=(60, 5, 5, 5), lanes=4)


def with_streams_without_end() -> Any:
    """Mix streams, whose last shares are short, with samples that have an index."""
    net = network()
    model, optimizer = wrapped(net, "endless")
    sources = {"a": Endless(Records([9] * 2)), "b": Endless(Records([9] * 3))}
    few = AdaptiveDataLoader(
        Mixed(sources, {"a": 1.0, "b": 2.0}, num_samples=40), 6, name="endless.few"
    )
    many = AdaptiveDataLoader(Noisy(), 3, shuffle=True, name="endless.many")
    both = CombinedLoader([few, many], "max_size_cycle", name="endless.both")
    for (x, y), (z, _) in both:
        optimizer.zero_grad()
        loss = model.weigh(cross_entropy(model(x), y), member=few)
        other = model(z + torch.randn_like(z)).square().mean()
        (loss + model.weigh(other, member=many)).backward()
        optimizer.step()
    return digest(net)


WAYS: tuple[Callable[[], Any], ...] = (
    with_what_scripts_do_once_a_batch,  # While there is no other optimizer.
    with_a_scaler,
    with_averaged_weights,
    with_schedulers_of_epochs_and_steps,
    with_a_plan_of_sizes,
    with_counts_of_tokens,
    with_summed_losses,
    with_negatives_of_the_share,
    with_combined_loaders,
    with_combined_loaders_that_are_cut,
    with_batches_of_its_own,
    with_fewer_samples_than_shares,
    with_streams,
    with_fewer_streams_than_shares,
    with_streams_that_run_dry,
    with_streams_without_end,
)


def train_in_each_way() -> dict[str, str]:
    """Return what each way comes to, to the last digit."""
    torch.set_num_threads(1)
    elasticrun.init(save_interval="off", virtual_replicas=4)
    torch.manual_seed(5)
    return {way.__name__: repr(way()) for way in WAYS}
