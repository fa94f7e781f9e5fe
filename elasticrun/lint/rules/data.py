"""ER501, ER503, ER504: data, orders and sizes that differ between starts."""

from __future__ import annotations

from collections.abc import Iterator

from elasticrun.lint import roles
from elasticrun.lint.events import Event
from elasticrun.lint.finding import Finding, Rule
from elasticrun.lint.naming import named
from elasticrun.lint.program import Program
from elasticrun.lint.values import Value

ER501 = Rule(
    "ER501 W unseeded data",
    help="seed it: torch.manual_seed(0) at the top, or a seeded generator=",
)
ER503 = Rule(
    "ER503 W batch size, learning rate or steps from the world size",
    help="give the global batch size, and what belongs to it",
)
ER504 = Rule(
    "ER504 E sampler that can only be iterated",
    help="give it shuffle=True, WeightedDraws, LengthGroups, RandomWindows or a list",
)

_SIZES = named(
    "batch_size lr max_lr learning_rate total_steps num_training_steps T_max "
    "num_warmup_steps steps_per_epoch warmup_steps step_size epochs milestones "
    "total_iters base_lr max_local_batch_size t_initial"
)
_WORDS = ("step", "total", "warm", "lr", "batch", "epoch", "iter")  # of own classes
_POSITIONS = {  # of parameters that matter here
    "loader": ("dataset", "batch_size"),
    "optimizer": ("params", "lr"),
    "scheduler": ("optimizer", "total_steps", "total_steps"),
}
_SHARING = frozenset(("rank", "world_size"))


def _unseeded(program: Program) -> Iterator[Finding]:
    for event in program.events("drawn"):
        if event.how == "optimizer":  # first weights, which come back
            continue
        if event.is_seeded or program.zone(event.step) != "P":
            continue
        message = f"{event.name} without a seed gives other data after every restart"
        yield program.finding(ER501, event, message)


def _sizes(program: Program) -> Iterator[Finding]:
    for event in program.events("made"):
        if event.role not in _POSITIONS:
            continue
        own = event.value.attrs if event.value is not None else {}
        messages = [
            _misfit(event.role, name, value, is_own=value in own.values())
            for name, value in [*_arguments(event), *own.items()]
        ]
        if any(messages):
            yield program.finding(ER503, event, next(filter(None, messages)))


def _misfit(role: str, name: str, value: Value, *, is_own: bool) -> str:
    """Return why what an object is given is not the same everywhere, if so."""
    if "world_size" in value.taints and _is_size(name, is_own):
        return (
            f"{name} is computed from the world size, so it changes when the number of "
            "replicas does"
        )
    if role == "loader" and name == "dataset" and value.taints >= _SHARING:
        return (
            "the data set is cut by the rank or the world size; a loader needs the "
            "whole one, the same on all replicas, and cuts it itself"
        )
    return ""


def _arguments(made: Event) -> Iterator[tuple[str, Value]]:
    """Yield what an object is given, each with the name of its parameter."""
    yield from made.given.keywords.items()
    yield from zip(_POSITIONS[made.role], made.given.args, strict=False)


def _is_size(name: object, is_own: bool) -> bool:
    """Return whether a name says that a value belongs to batches, rates or steps."""
    text = str(name).lower()
    return name in _SIZES or (is_own and any(word in text for word in _WORDS))


def _samplers(program: Program) -> Iterator[Finding]:
    for event in program.events("made", role="loader"):
        for key in ("sampler", "batch_sampler"):
            value = event.given.keywords.get(key)
            if value is not None and _is_only_iterated(value):
                message = (
                    f"{key}= of this loader can only be iterated, so a loop could not "
                    "continue in its middle"
                )
                yield program.finding(ER504, event, message)


def _is_only_iterated(value: Value) -> bool:
    cls = value.cls
    if value.kind == "instance" and cls is not None:
        if any(cls.find(name) for name in ("__getitem__", "take", "keyed")):
            return False
        return cls.role == "sampler" or cls.find("__iter__") is not None
    is_used_up = value.kind in ("generator", "iterator", "set")
    return is_used_up or roles.is_iterated_sampler(value.name)


CHECKS = (_unseeded, _sizes, _samplers)
