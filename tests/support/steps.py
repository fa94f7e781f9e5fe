"""Steps of training as users write them, to run with plain torch and with elasticrun.

Each practice takes a `Torch`, which stands for plain torch on whole global batches, or
an `Elastic`, which stands for elasticrun. It makes what it trains, and returns its step
and what tells how it has ended. All are trained in one loop, so that one interruption
interrupts them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, register, world_size

# Batches of 7, 7 and 1 samples: shares of two and of three replicas are uneven, and in
# the last batch all but one have only padding.
NUM_SAMPLES, BATCH_SIZE = 15, 7
NUM_BATCHES = 3
NUM_LOOPS = 2


def samples(number: int = NUM_SAMPLES) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(number, 5, generator=generator, dtype=torch.float64)
    y = torch.randn(number, 2, generator=generator, dtype=torch.float64)
    return x, y


def batches() -> Iterator[tuple[Tensor, Tensor]]:
    x, y = samples()
    for start in range(0, NUM_SAMPLES, BATCH_SIZE):
        stop = start + BATCH_SIZE
        yield x[start:stop], y[start:stop]


class Torch:
    """Plain torch: one replica, whole global batches, bare modules.

    Attributes:
        number: Of the global batch, from 0 in all loops.
    """

    number = 0
    is_step = True
    loss_weight = 1.0

    def parallel(self, module: nn.Module, *_: Any, **__: Any) -> Any:
        return module

    def keep(self, **_: Any) -> None:
        """Register nothing."""

    def num_valid(self, rows: Tensor) -> int:
        return len(rows)


class Elastic(Torch):
    """elasticrun, in a loop that practices share; each has names of its own."""

    def __init__(self, name: str, loader: AdaptiveDataLoader) -> None:
        self._name = name
        self._number_of_model = 0
        self.loader = loader

    @property
    def is_step(self) -> bool:  # type: ignore[override]
        return self.loader.is_step

    @property
    def loss_weight(self) -> float:  # type: ignore[override]
        return self.loader.loss_weight

    def parallel(self, module: nn.Module, *args: Any, **options: Any) -> Any:
        self._number_of_model += 1
        name = f"{self._name}-{self._number_of_model}"
        return AdaptiveDataParallel(module, *args, name=name, **options)

    def keep(self, **objects: Any) -> None:
        register(**{f"{self._name}.{name}": each for name, each in objects.items()})

    def num_valid(self, rows: Tensor) -> int:
        return self.loader.num_valid


def is_spread(given: Torch) -> bool:
    """Return whether several replicas train."""
    return isinstance(given, Elastic) and world_size() > 1


Practice = tuple[Callable[[Tensor, Tensor], None], Callable[[], list[Any]]]
Case = Callable[[Torch], Practice]


def train_plainly(case: Case) -> list[Any]:
    """Return what a practice ends with in plain torch."""
    given = Torch()
    step, result = case(given)
    for loop in range(NUM_LOOPS):
        for number, (x, y) in enumerate(batches()):
            given.number = loop * NUM_BATCHES + number
            step(x, y)
    return result()


def train_together(
    cases: Mapping[str, Case],
    max_local_batch_size: int | None,
    on_batch: Callable[[int], None] = lambda number: None,
) -> dict[str, list[Any]]:
    """Train practices in one loop; return what each ends with.

    Args:
        on_batch: Is told the number of each global batch that begins.
    """
    name = f"size-{max_local_batch_size}"
    loader = make_loader(name, max_local_batch_size)
    trained = []
    for label, case in cases.items():
        given = Elastic(f"{name}.{label}", loader)
        trained.append((given, *case(given)))
    begun = -1
    for loop in range(NUM_LOOPS):
        for batch, (x, y) in loader.enumerate():
            number = loop * NUM_BATCHES + batch
            if number != begun:
                begun = number
                on_batch(number)
            for given, step, _ in trained:
                given.number = number
                step(x, y)
    return {
        label: result() for label, (_, _, result) in zip(cases, trained, strict=True)
    }


def make_loader(name: str, max_local_batch_size: int | None) -> AdaptiveDataLoader:
    return AdaptiveDataLoader(
        TensorDataset(*samples()),
        BATCH_SIZE,
        max_local_batch_size=max_local_batch_size,
        name=name,
    )


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
) -> Practice:
    """Momentum, a schedule within the loop, clipping, GradScaler, and EMA."""
    net = network()
    optimizer = sgd(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    model = given.parallel(net, optimizer, scheduler, **options)
    scaler = torch.amp.GradScaler("cpu", 4.0, growth_interval=2, enabled=is_scaled)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    given.keep(scaler=scaler, ema=ema)
    zero_grad = (optimizer if by == "optimizer" else model).zero_grad

    def zero(place: str) -> None:
        if place == zeroed:
            zero_grad(set_to_none)

    def step(x: Tensor, y: Tensor) -> None:
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

    return step, lambda: [
        *state_of(net, ema),
        *scheduler.get_last_lr(),
        scaler.get_scale(),
        scheduler.last_epoch,
        int(ema.n_averaged),
    ]


def two_adversaries(given: Torch, *, freezes: bool) -> Practice:
    """Two modules; the generator's loss goes through the discriminator, then zeroed.

    Args:
        freezes: Whether the discriminator gets no gradients by that.
    """
    generator, discriminator = network(2), network(1, 2)
    of_generator, of_discriminator = sgd(generator), sgd(discriminator)
    g = given.parallel(generator, of_generator)
    d = given.parallel(discriminator, of_discriminator)

    def step(x: Tensor, y: Tensor) -> None:
        of_generator.zero_grad()
        discriminator.requires_grad_(not freezes)
        ((d(g(x)) - 1) ** 2).mean().backward()
        discriminator.requires_grad_(True)
        of_discriminator.zero_grad()
        (d(g(x).detach()) ** 2).mean().backward()
        ((d(y) - 1) ** 2).mean().backward()
        of_generator.step()
        of_discriminator.step()

    return step, lambda: state_of(generator, discriminator)


def gradients_after_the_step(given: Torch) -> Practice:
    """A second module gets gradients after its step, and zeroes them later."""
    net, critic = network(2), nn.Linear(2, 1).double()
    of_net, of_critic = sgd(net), sgd(critic)
    model = given.parallel(net, of_net)
    judge = given.parallel(critic, of_critic)

    def step(x: Tensor, y: Tensor) -> None:
        judge.zero_grad()
        (judge(y) ** 2).mean().backward()
        of_critic.step()
        of_net.zero_grad()
        output = model(x)
        (mse_loss(output, y) + judge(output.detach()).mean()).backward()
        of_net.step()

    return step, lambda: state_of(net, critic)


def several_optimizers(given: Torch) -> Practice:
    """One module, an optimizer and a scheduler for each half of it."""
    net = network()
    optimizers = [sgd(net[0]), torch.optim.AdamW(net[2].parameters(), lr=0.05)]
    schedulers = [
        torch.optim.lr_scheduler.OneCycleLR(each, 0.3, total_steps=20)
        for each in optimizers
    ]
    model = given.parallel(net, optimizers, schedulers)

    def step(x: Tensor, y: Tensor) -> None:
        loss = mse_loss(model(x), y)
        model.zero_grad()
        loss.backward()
        for each in optimizers + schedulers:
            each.step()

    return step, lambda: state_of(net)


def train_by(
    given: Torch,
    net: nn.Module,
    loss_of: Callable[[Any, Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> Practice:
    """Train in the usual way by a loss, which is told the model and the samples."""
    made = sgd(net) if optimizer is None else optimizer
    model = given.parallel(net, made, **options)

    def step(x: Tensor, y: Tensor) -> None:
        made.zero_grad()
        loss_of(model, x, y).backward()
        made.step()

    return step, lambda: state_of(net)


def regularised(given: Torch) -> Practice:
    """A loss term that acts on the parameters themselves."""

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        penalty = sum((each**2).sum() for each in model.parameters())
        return mse_loss(model(x), y) + 0.1 * penalty

    return train_by(given, network(), loss_of)


def gradients_as_values(given: Torch) -> Practice:
    """`torch.autograd.grad` by a parameter, whose result is used as it is."""
    net = network()

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = mse_loss(model(x), y)
        total = net[2](torch.ones(8).double()).sum()
        (gradient,) = torch.autograd.grad(total, net[2].bias)
        return loss * gradient.sum()

    return train_by(given, net, loss_of)


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


def structured_output(given: Torch, *, kind: str) -> Practice:
    net = Structured(kind)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        output = model(x, note="kept")
        if kind == "tuple":
            first, (second, note) = output
        elif kind == "dict":
            first, second, note = output.values()
        else:
            first, second, note = output.first, *output.rest.values()
        assert note == "kept"
        assert type(output) is type(net(x, note=""))
        return mse_loss(torch.cat([first, second], 1), y)

    return train_by(given, net, loss_of)


def accumulated_by_hand(given: Torch, *, zeroed: str) -> Practice:
    """Steps after every second global batch, without a reduction before."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        is_last = given.number % 2 == 1
        if zeroed == "before" and not is_last:
            optimizer.zero_grad()
        waits = nullcontext if is_last else getattr(model, "no_sync", nullcontext)
        with waits():
            mse_loss(model(x), y).backward()
        if is_last:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            if zeroed == "after":
                optimizer.zero_grad()

    return step, lambda: state_of(net)


def different_rates(given: Torch) -> Practice:
    """One optimizer steps after each batch, the other after every second."""
    net = network()
    fast, slow = sgd(net[0]), sgd(net[2])
    model = given.parallel(net, [fast, slow])

    def step(x: Tensor, y: Tensor) -> None:
        mse_loss(model(x), y).backward()
        fast.step()
        fast.zero_grad()
        if given.number % 2 == 1:
            slow.step()
            slow.zero_grad()

    return step, lambda: state_of(net)


def several_passes(given: Torch) -> Practice:
    """Two forward and backward passes in each micro-batch."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        (0.1 * mse_loss(model(-x), y)).backward()
        optimizer.step()

    return step, lambda: state_of(net)


def with_closure(given: Torch) -> Practice:
    net = network()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.05)
    model = given.parallel(net, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            return loss

        assert optimizer.step(closure) is not None

    return step, lambda: state_of(net)


def asking_for_steps(given: Torch, *, zeroed: str) -> Practice:
    """Knows of micro-batches, and steps at the last one only."""
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)

    def step(x: Tensor, y: Tensor) -> None:
        if zeroed == "before":
            optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        if given.is_step:
            optimizer.step()
        if zeroed == "after":
            optimizer.zero_grad()

    return step, lambda: state_of(net)


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
) -> Practice:
    """Parameters without a gradient in some micro-batches, on some or all replicas.

    With `looks_first`, a forward pass that could have a backward pass gets none.
    """

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        if looks_first and given.number % NUM_BATCHES == 0:
            model(samples()[0])
        return mse_loss(model(x), y)

    return train_by(given, Choosing(), loss_of, find_unused_parameters=True, **options)


def left_midway(given: Torch, *, how: str) -> list[Any]:
    """A loop of its own, the first of which ends in its second global batch."""
    loader = given.loader if isinstance(given, Elastic) else None
    net = network()
    optimizer = sgd(net)
    model = given.parallel(net, optimizer)
    for loop in range(NUM_LOOPS):
        try:
            turns = enumerate(batches()) if loader is None else loader.enumerate()
            for number, (x, y) in turns:
                optimizer.zero_grad()
                if loop == 0 and number == 1:
                    if not given.is_step:
                        mse_loss(model(x), y).backward()
                    if how == "break":
                        break
                    raise KeyError(number)
                mse_loss(model(x), y).backward()
                optimizer.step()
        except KeyError:
            assert how == "exception"
    return state_of(net)
