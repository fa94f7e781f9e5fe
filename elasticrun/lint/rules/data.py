"""ER501 to ER504: data, seeds and sizes that differ between starts."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint import roles
from elasticrun.lint.finding import Finding
from elasticrun.lint.naming import named
from elasticrun.lint.program import Program
from elasticrun.lint.values import Value
from elasticrun.lint.walk.core import Event

_SIZES = named(
    "batch_size lr max_lr learning_rate total_steps num_training_steps T_max "
    "num_warmup_steps steps_per_epoch warmup_steps step_size epochs milestones "
    "total_iters base_lr max_local_batch_size t_initial"
)
_WORDS = ("step", "total", "warm", "lr", "batch", "epoch", "iter")  # of own classes
_UNFIXED = frozenset(("time", "entropy", "random"))


def check(program: Program) -> Iterator[Finding]:
    """Yield the findings of ER501 to ER504."""
    yield from _unseeded(program)
    yield from _seeds(program)
    yield from _sizes(program)
    yield from _samplers(program)


def _unseeded(program: Program) -> Iterator[Finding]:
    for event in program.events("draw"):
        name, is_keyed, is_seeded = event.data
        if is_keyed or is_seeded or program.zone(event.step) != "P":
            continue
        message = f"{name} without a seed gives other data after every restart"
        yield program.finding("ER501", event.at, event.step, message)


def _seeds(program: Program) -> Iterator[Finding]:
    for event in program.events("seeded", "rng_made"):
        values: list[Value] = (
            event.data[1] if event.kind == "seeded" else list(event.value.parts)  # type: ignore[union-attr]
        )
        name = event.data[0] if event.kind == "seeded" else str(event.data)
        taints = frozenset().union(*(value.taints for value in values))
        is_none = bool(values) and values[0].kind == "const" and values[0].data is None
        is_empty = not values and name in ("random.seed", "numpy.random.seed", "seed")
        if taints & _UNFIXED or is_none or is_empty:
            message = f"{name}: the seed differs with every start"
            yield program.finding("ER502", event.at, event.step, message)
        elif _is_unseeded(event, values) and program.zone(event.step) in "PAB":
            message = f"{name}() without a seed draws other values after a restart"
            yield program.finding("ER501", event.at, event.step, message)
    for event in program.events("loader_made"):
        seed = event.data[1].get("seed")
        if seed is not None and seed.taints & _UNFIXED:
            message = "the loader's seed differs with every start"
            yield program.finding("ER502", event.at, event.step, message)


def _is_unseeded(event: Event, values: list[Value]) -> bool:
    return event.kind == "rng_made" and not values and event.data != "torch.Generator"


def _sizes(program: Program) -> Iterator[Finding]:
    for event in program.events("loader_made", "optimizer_made", "scheduler_made"):
        own = event.value.attrs if event.value is not None else {}
        for name, value in [*_arguments(event), *own.items()]:
            if "world_size" in value.taints and _is_size(name, value in own.values()):
                message = (
                    f"{name} is computed from the world size, so it changes when the "
                    "number of replicas does"
                )
                yield program.finding("ER503", event.at, event.step, message)
                break


def _is_size(name: object, is_own: bool) -> bool:
    """Return whether a name says that a value belongs to batches, rates or steps."""
    text = str(name).lower()
    return name in _SIZES or (is_own and any(word in text for word in _WORDS))


def _arguments(event: Event) -> Iterator[tuple[str, Value]]:
    data = (
        event.data
        if event.kind == "loader_made"
        else getattr(event.value, "data", None)
    )
    if not isinstance(data, tuple):
        return
    args, keywords = data
    yield from keywords.items()
    names = {
        "loader_made": ("dataset", "batch_size"),
        "optimizer_made": ("params", "lr"),
        "scheduler_made": ("optimizer", "total_steps", "total_steps"),
    }[event.kind]
    yield from zip(names, args, strict=False)


def _samplers(program: Program) -> Iterator[Finding]:
    for event in program.events("loader_made"):
        for key in ("sampler", "batch_sampler"):
            value = event.data[1].get(key)
            if value is None or (value.kind == "const" and value.data is None):
                continue
            if key == "batch_sampler" or _is_only_iterated(value):
                message = (
                    f"{key}= of this loader can only be iterated, so a loop could not "
                    "continue in its middle"
                )
                yield program.finding("ER504", event.at, event.step, message)


def _is_only_iterated(value: Value) -> bool:
    if value.kind == "instance" and value.cls is not None:
        return value.cls.find("__getitem__") is None and (
            value.cls.role == "sampler" or value.cls.find("__iter__") is not None
        )
    return value.name in roles.ITERATED_SAMPLERS
