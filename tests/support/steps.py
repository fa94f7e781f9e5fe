"""Training loops as users write them, to run with plain torch and with elasticrun.

Each takes a `Torch`, which stands for plain torch on the whole global batch, or an
`Elastic`, which stands for elasticrun, and returns what it has trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, register

NUM_SAMPLES, BATCH_SIZE = 23, 10  # Batches of 10, 10 and 3 samples.
NUM_BATCHES = 3
NUM_LOOPS = 2


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(NUM_SAMPLES, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(NUM_SAMPLES, 2, generator=generator, dtype=torch.float64)
    return x, y


@dataclass
class Torch:
    """Plain torch: one replica, whole global batches, bare modules."""

    max_local_batch_size: int | None = None

    def parallel(self, module: nn.Module, *_: Any, **__: Any) -> Any:
        return module

    def keep(self, **_: Any) -> None:
        """Register nothing."""

    def batches(self) -> Iterator[tuple[int, Any]]:
        x, y = samples()
        for number, start in enumerate(range(0, NUM_SAMPLES, BATCH_SIZE)):
            stop = start + BATCH_SIZE
            yield number, (x[start:stop], y[start:stop])


class Elastic(Torch):
    """elasticrun, in the current job, in which each case has names of its own."""

    def __init__(self, name: str, max_local_batch_size: int | None) -> None:
        super().__init__(max_local_batch_size)
        self._name = name
        self._number = 0
        self.loader = AdaptiveDataLoader(
            TensorDataset(*samples()),
            BATCH_SIZE,
            max_local_batch_size=max_local_batch_size,
            name=name,
        )

    def parallel(self, module: nn.Module, *args: Any, **options: Any) -> Any:
        self._number += 1
        name = f"{self._name}-{self._number}"
        return AdaptiveDataParallel(module, *args, name=name, **options)

    def keep(self, **objects: Any) -> None:
        register(**{f"{self._name}.{name}": each for name, each in objects.items()})

    def batches(self) -> Iterator[tuple[int, Any]]:
        return self.loader.enumerate()


Case = Callable[[Torch], list[Any]]


def network(num_outputs: int = 2, num_inputs: int = 5) -> nn.Sequential:
    torch.manual_seed(num_outputs)
    return nn.Sequential(
        nn.Linear(num_inputs, 8), nn.Tanh(), nn.Linear(8, num_outputs)
    ).double()


def sgd(module: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)


def state_of(*modules: nn.Module) -> list[Tensor]:
    return [each.detach() for module in modules for each in module.parameters()]


def everything(
    given: Torch,
    *,
    zeroed: str = "before forward",
    by: str = "optimizer",
    set_to_none: bool = True,
    is_scaled: bool = True,
    **options: Any,
) -> list[Any]:
    """Momentum, a schedule within the loop, clipping, GradScaler, and EMA."""
    net = network()
    optimizer = sgd(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    model = given.parallel(net, optimizer, scheduler, **options)
    scaler = torch.amp.GradScaler("cpu", 4.0, growth_interval=2, enabled=is_scaled)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    given.keep(scaler=scaler, ema=ema)
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    zero_grad = (optimizer if by == "optimizer" else model).zero_grad

    def zero(place: str) -> None:
        if place == zeroed:
            zero_grad(set_to_none)

    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            zero("before forward")
            output = model(x)
            zero("before backward")
            scaler.scale(mse_loss(output, y)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            ema.update_parameters(model)
            scheduler.step()
            zero("after step")
    counts = [len(steps), scheduler.last_epoch, int(ema.n_averaged)]
    assert counts == [NUM_BATCHES * NUM_LOOPS] * 3
    return [*state_of(net, ema), *scheduler.get_last_lr(), scaler.get_scale()]


def two_adversaries(given: Torch) -> list[Any]:
    """Two modules; the generator's loss reaches the discriminator, which is zeroed."""
    generator, discriminator = network(2), network(1, 2)
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    g = given.parallel(generator, of_generator)
    d = given.parallel(discriminator, of_discriminator)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            of_generator.zero_grad()
            ((d(g(x)) - 1) ** 2).mean().backward()
            of_discriminator.zero_grad()
            (d(g(x).detach()) ** 2).mean().backward()
            ((d(y) - 1) ** 2).mean().backward()
            of_generator.step()
            of_discriminator.step()
    return state_of(generator, discriminator)


def gradients_after_the_step(given: Torch) -> list[Any]:
    """A second module gets gradients after its step, and zeroes them later."""
    net, critic = network(2), nn.Linear(2, 1).double()
    of_net, of_critic = sgd(net), sgd(critic)
    model = given.parallel(net, of_net)
    judge = given.parallel(critic, of_critic)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            judge.zero_grad()
            (judge(y) ** 2).mean().backward()
            of_critic.step()
            of_net.zero_grad()
            output = model(x)
            (mse_loss(output, y) + judge(output.detach()).mean()).backward()
            of_net.step()
    return state_of(net, critic)


def several_optimizers(given: Torch) -> list[Any]:
    """One module, an optimizer and a scheduler for each half of it."""
    net = network()
    optimizers = [sgd(net[0]), torch.optim.AdamW(net[2].parameters(), lr=0.05)]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(each, 0.3, total_steps=20)
        for each in optimizers
    ]
    model = given.parallel(net, optimizers, schedulers)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            loss = mse_loss(model(x), y)
            model.zero_grad()
            loss.backward()
            for each in optimizers + schedulers:
                each.step()
    return state_of(net)


def regularised(given: Torch) -> list[Any]:
    """A loss term that acts on the parameters themselves, and a second pass for it."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            penalty = sum((each**2).sum() for each in net.parameters())
            (loss + 0.1 * penalty).backward()
            optimizer.step()
    return state_of(net)


def gradients_as_values(given: Torch) -> list[Any]:
    """`torch.autograd.grad` by the parameters, whose result is used as it is."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    norms: list[float] = []
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            (norm,) = torch.autograd.grad(
                net[2](torch.ones(8).double()).sum(), net[2].bias
            )
            norms.append(norm.sum().item())
            optimizer.step()
    return [*state_of(net), *set(norms)]


@dataclass
class Output:
    first: Tensor
    rest: dict[str, Any]


class Structured(nn.Module):
    """Returns what it is told to: a tuple, a dictionary or a dataclass."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = network()
        self.kind = kind

    def forward(self, x: Tensor, *, note: str) -> Any:
        y = self.net(x)
        first, second = y[:, :1], y[:, 1:]
        return {
            "tuple": (first, (second, note)),
            "dict": {"first": first, "second": second, "note": note},
            "dataclass": Output(first, {"second": second, "note": note}),
        }[self.kind]


def structured_output(given: Torch, *, kind: str) -> list[Any]:
    model_of = Structured(kind)
    optimizer = sgd(model_of)
    model = given.parallel(model_of, optimizer)
    for _, (x, y) in given.batches():
        optimizer.zero_grad()
        output = model(x, note="kept")
        if kind == "tuple":
            first, (second, note) = output
        elif kind == "dict":
            first, second, note = output.values()
        else:
            first, second, note = output.first, *output.rest.values()
        assert note == "kept"
        assert type(output) is type(model_of(x, note=""))
        mse_loss(torch.cat([first, second], 1), y).backward()
        optimizer.step()
    return state_of(model_of)


def accumulated_by_hand(given: Torch, *, zeroed: str) -> list[Any]:
    """Steps after every second global batch, without a reduction before."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for number, (x, y) in given.batches():
            is_last = number != 0
            if zeroed == "before" and number != 1:
                optimizer.zero_grad()
            waits = nullcontext if is_last else getattr(model, "no_sync", nullcontext)
            with waits():
                mse_loss(model(x), y).backward()
            if is_last:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
                optimizer.step()
                if zeroed == "after":
                    optimizer.zero_grad()
    return state_of(net)


def several_passes(given: Torch) -> list[Any]:
    """Two forward and backward passes in each micro-batch."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            (0.1 * mse_loss(model(-x), y)).backward()
            optimizer.step()
    return state_of(net)


def with_closure(given: Torch) -> list[Any]:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():

            def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
                optimizer.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                return loss

            assert optimizer.step(closure) is not None
    return state_of(net)


def asking_for_steps(given: Torch, *, zeroed: str) -> list[Any]:
    """Knows of micro-batches, and steps at the last one only."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for _ in range(NUM_LOOPS):
        for _, (x, y) in given.batches():
            if zeroed == "before":
                optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            if not isinstance(given, Elastic) or given.loader.is_step:
                optimizer.step()
            if zeroed == "after":
                optimizer.zero_grad()
    return state_of(net)


class Choosing(nn.Module):
    """A head for few samples, one layer used twice, a frozen and an unused one."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = network(5)
        self.head = network(2)
        self.rare = nn.Linear(5, 2).double()
        self.unused = nn.Linear(5, 2).double()
        self.frozen = nn.Linear(5, 5).double().requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.trunk(self.frozen(self.trunk(x))))
        is_rare = x[:, 0] > 0.9
        if is_rare.any():
            y = y + torch.where(is_rare[:, None], self.rare(x), 0.0)
        return y


def unused_parameters(
    given: Torch, *, looks_first: bool = False, **options: Any
) -> list[Any]:
    """Parameters without a gradient in some micro-batches, on some or all replicas.

    With `looks_first`, a forward pass that could have a backward pass gets none.
    """
    net = Choosing()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer, find_unused_parameters=True, **options)
    for _ in range(NUM_LOOPS):
        if looks_first:
            model(samples()[0])
        for _, (x, y) in given.batches():
            optimizer.zero_grad()
            mse_loss(model(x), y).backward()
            optimizer.step()
    return state_of(net)


def left_midway(given: Torch, *, how: str) -> list[Any]:
    """The first loop ends in its second global batch, before or at a step."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for loop in range(NUM_LOOPS):
        try:
            for number, (x, y) in given.batches():
                optimizer.zero_grad()
                if loop == 0 and number == 1 and isinstance(given, Torch):
                    if isinstance(given, Elastic) and not given.loader.is_step:
                        mse_loss(model(x), y).backward()
                    if how == "break":
                        break
                    raise KeyError(number)
                mse_loss(model(x), y).backward()
                optimizer.step()
        except KeyError:
            assert how == "exception"
    return state_of(net)
