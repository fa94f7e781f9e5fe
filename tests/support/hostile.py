"""Small programs, one for each kind of states, and what a damaged state may hold."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torchmetrics
from torch import nn
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import TensorDataset

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CombinedLoader,
    Mixed,
    Variables,
    once,
    register,
    remaining_epochs_until,
    remaining_steps_until,
    save_all_states,
)
from tests.support import numbered_streams
from tests.support.autoscale import decide_by_force
from tests.support.data import Numbers
from tests.support.generations import Crash

# Each trains; it saves and dies in the step of that number, if there is one.
Program = Callable[[int], None]


def count(save_in: int) -> None:
    """Use what counts: sums, loops, passes, steps, once."""
    once("announced")
    sums, named = Accumulator(), Accumulator(name="named")
    loader = AdaptiveDataLoader(Numbers(12), batch_size={0: 2, 4: 4}, shuffle=True)
    passes = AdaptiveDataLoader(Numbers(8), batch_size=4, name="passes")
    for _ in remaining_steps_until(1):
        pass
    num_steps = 0
    for _ in remaining_epochs_until(2):
        own = Accumulator()
        for batch in loader:
            num_steps += 1
            if num_steps == save_in:
                _save_and_die()
            for total in (sums, named, own):
                total["n"] += len(batch)
        for _ in passes.batches(3):
            pass
        with sums.synchronized(), named.synchronized(), own.synchronized():
            named["seen"] = named["n"]


def read(save_in: int) -> None:
    """Read streams, batches of one's own, a mixture, several loaders together."""
    streams = numbered_streams.Numbers(5, 0, 7, lanes=2)
    mixed = Mixed({"a": range(9), "b": range(6)}, {"a": 1, "b": 1}, num_samples=9)
    batches: Any = [[0, 1], [2, 3, 4], [5]]
    members = [AdaptiveDataLoader(Numbers(6), batch_size=2, name=name) for name in "xy"]
    loaders: list[Any] = [
        AdaptiveDataLoader(streams, batch_size=4, name="streams"),
        AdaptiveDataLoader(mixed, batch_size=4, name="mixed"),
        AdaptiveDataLoader(Numbers(8), batch_sampler=batches, name="own"),
        CombinedLoader(members, name="both"),
    ]
    values = Variables(best=0.0, seen=[1, 2], notes={"a": "b"}, mean=torch.ones(2))
    num_steps = 0
    for _ in remaining_epochs_until(1):
        for _ in loaders[0].batches(4):
            num_steps += 1
            values.best = 1.5 * num_steps  # Whatever it was: any value is right there.
            if num_steps == save_in:
                _save_and_die()
        for loader in loaders[1:]:
            for _ in loader:
                torch.rand(())


def decide(save_in: int) -> None:
    """Train with batch sizes that the job decides."""
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    model = AdaptiveDataParallel(net, optimizer, measure_noise=True)
    loader = AdaptiveDataLoader(TensorDataset(torch.ones(24, 1)), batch_size=3)
    decide_by_force(loader)
    num_steps = 0
    for _ in remaining_epochs_until(2):
        for (x,) in loader:
            num_steps += 1
            if num_steps == save_in:
                _save_and_die()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()


def learn(save_in: int) -> None:
    """Train a model with several optimizers; scale losses, average, measure."""
    net = nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2))
    kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    optimizers = {
        "sgd": torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9),
        **{name: kind(net.parameters()) for name, kind in kinds.items()},
    }
    averaged = AveragedModel(net)
    scaler = torch.amp.GradScaler("cpu", growth_interval=2)
    metric = torchmetrics.MeanMetric()
    register(model=net, averaged=averaged, scaler=scaler, metric=metric, **optimizers)
    loader = AdaptiveDataLoader(Numbers(8), batch_size=2)
    num_steps = 0
    for _ in remaining_epochs_until(1):
        for _ in loader:
            num_steps += 1
            if num_steps == save_in:
                _save_and_die()
            net.zero_grad()
            scaler.scale(net(torch.randn(4, 1)).square().mean()).backward()
            scaler.step(optimizers["sgd"])
            for name in kinds:
                optimizers[name].step()
            scaler.update()
            averaged.update_parameters(net)
            metric.update(1.0)
        metric.compute()


def schedule(save_in: int) -> None:
    """Step schedulers of each kind, to the last step that one cycle has."""
    num_steps = 8

    def sequence(optimizer: torch.optim.Optimizer) -> SequentialLR:
        parts = [ConstantLR(optimizer), StepLR(optimizer, 2)]
        return SequentialLR(optimizer, parts, [3])

    kinds: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
        "step": lambda optimizer: StepLR(optimizer, 3),
        "milestones": lambda optimizer: MultiStepLR(optimizer, [2, 5]),
        "cosine": lambda optimizer: CosineAnnealingLR(optimizer, num_steps),
        "cycle": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=num_steps),
        "table": lambda optimizer: LambdaLR(
            optimizer, lambda step: [1.0, 0.5, 0.2][step // 3]
        ),
        "sequence": sequence,
        "plateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1),
    }
    optimizers = {
        name: torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.01, momentum=0.9)
        for name in kinds
    }
    schedulers: dict[str, Any] = {
        name: kind(optimizers[name]) for name, kind in kinds.items()
    }
    register(**schedulers)

    def step() -> None:
        for name, scheduler in schedulers.items():
            optimizers[name].step()
            scheduler.step(*([1.0] if name == "plateau" else []))

    for _ in remaining_epochs_until(2):
        step()  # In code that is replayed.
        for num_done in remaining_steps_until(num_steps // 2 - 1):
            if num_done + 1 == save_in:
                _save_and_die()
            step()


def _save_and_die() -> None:
    save_all_states()
    raise Crash


PROGRAMS: dict[str, Program] = {
    each.__name__: each for each in (count, read, decide, learn, schedule)
}

_VALUES: list[Any] = [
    None,
    True,
    "x",
    [],
    {},
    [1, 2],
    0,
    -1,
    -8,
    10**30,
    0.5,
    math.nan,
    math.inf,
    -math.inf,
]

_KINDS = (torch.int32, torch.int64, torch.bool, torch.float16, torch.float64)


def damaged(values: Any, *, has_tensors: bool) -> Iterator[tuple[str, Any]]:
    """Yield in words what is damaged, and the values with that."""
    for path in _paths(values):
        found = _at(values, path)
        for new in (*_VALUES, *(_tensors_like(found) if has_tensors else ())):
            yield f"{path} = {new!r}", _with(values, path, new)
        yield f"{path} is missing", _with(values, path, ...)
    for path in [(), *_paths(values)]:
        inside = _at(values, path)
        keys = _keys(inside)
        for one, other in itertools.pairwise(keys):
            pair = inside[one], inside[other]
            if {type(each) for each in pair} == {int} and abs(pair[0] - pair[1]) == 1:
                continue  # Nobody can tell a schedule from one that is a step further.
            changed = _with(values, (*path, one), inside[other])
            yield (
                f"{path}: {one} and {other}",
                _with(changed, (*path, other), inside[one]),
            )
        if isinstance(inside, dict):
            changed = copy.deepcopy(values)
            _at(changed, path)["additional"] = math.inf
            yield f"{path} has more", changed


def _tensors_like(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        return [torch.ones(2), torch.tensor(math.nan), torch.empty(0)]
    flat = value.reshape(-1)
    numbers: list[Any] = [3, -1]
    if value.is_floating_point():
        numbers += [math.nan, math.inf, -math.inf]
    return [
        *(torch.full_like(value, number) for number in numbers),
        *(value.to(kind) for kind in _KINDS if kind != value.dtype),
        *(value.reshape(-1, 1, 1), value[None], value.mT if value.dim() > 1 else flat),
        *(torch.cat([flat] * 2), flat[:0], flat[:1], flat[:1].reshape(())),
    ]


def _keys(values: Any) -> list[Any]:
    if isinstance(values, dict):
        return list(values)
    return list(range(len(values))) if isinstance(values, list | tuple) else []


def _paths(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    # The words of a generator are alike: the first ones stand for all.
    for key in _keys(values)[:12]:
        yield (*path, key)
        yield from _paths(values[key], (*path, key))


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        values = values[key]
    return values


def _with(values: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return values with another one at a path, or none if that is `...`."""
    if not path:
        return new
    key, *rest = path
    if not rest and new is ...:
        if isinstance(values, dict):
            return {each: value for each, value in values.items() if each != key}
        return type(values)([*values[:key], *values[key + 1 :]])
    inner = _with(values[key], tuple(rest), new)
    if isinstance(values, dict):
        return type(values)({**values, key: inner})
    return type(values)([*values[:key], inner, *values[key + 1 :]])
