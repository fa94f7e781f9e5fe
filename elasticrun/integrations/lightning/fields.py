"""What a module and callbacks keep for themselves, which is in no checkpoint."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ProgressBar
from torch import nn
from torchmetrics import MeanMetric, Metric, MetricCollection

from elasticrun.integrations.lightning.digests import (
    Digests,
    digest_of_weight,
    is_of_others,
)

_BASES = (Callback, LightningDataModule, LightningModule, nn.Module)


class Fields:
    """The attributes of a module, its submodules, callbacks and data at one moment.

    Left out is what checkpoints have: parameters, buffers, metrics of torchmetrics, and
    what is in the states of callbacks and the data module; and what is Lightning's own,
    and progress bars.

    Args:
        trainer: With the callbacks.
        module: That is trained.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._digests = Digests(_known(trainer, module))
        self._before = self._look()

    def find_change(self) -> str | None:
        """Return the name of an attribute that is another one now, if any is.

        One that cannot be compared counts as another one.
        """
        now = self._look()
        for name, owner in _owners(self._trainer, self._module):
            old, new = self._before.get(id(owner), {}), now[id(owner)]
            for attribute in {**old, **new}:
                is_same = old.get(attribute) == new.get(attribute)
                if not (is_same or self._is_in_state(owner, attribute)):
                    return f"{name}.{attribute}"
        return None

    def _look(self) -> dict[int, dict[str, object]]:
        return {
            id(owner): {
                attribute: self._digests.of(value)
                for attribute, value in _attributes(owner)
            }
            for _, owner in _owners(self._trainer, self._module)
        }

    def _is_in_state(self, owner: Any, attribute: str) -> bool:
        """Say whether the state of a callback or the data has it, by its name.

        Of several replicas, checkpoints have the first one's alone.
        """
        if isinstance(owner, nn.Module) or self._trainer.world_size > 1:
            return False
        mine = self._digests.of(getattr(owner, attribute, None))
        return any(
            str(key).strip("_") == attribute.strip("_")
            and self._digests.of(value) == mine
            for key, value in owner.state_dict().items()
        )


class KeptFields:
    """What checkpoints have, at one moment before the hooks that begin a validation.

    These are called once more where a validation goes on in another process. That is
    right if they leave alone what comes back there: weights, random generators, what
    optimizers and schedulers are told, and what the user's own parts save themselves.

    Args:
        trainer: With the callbacks.
        module: That is trained.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer: Any = trainer
        self._module = module
        self._digests = Digests(_known(trainer, module))
        self._before = self._look()

    def find_change(self) -> str | None:
        """Return the name of what is another value now, if anything is."""
        for old, new in zip_longest(self._before, self._look()):
            if old != new:
                name, _ = new or old
                return str(name)
        return None

    def _look(self) -> list[tuple[str, object]]:
        module, kind = self._module, type(self._module).__name__
        weights = chain(module.named_parameters(), module.named_buffers())
        return [
            *((f"{kind}.{key}", digest_of_weight(value)) for key, value in weights),
            *((name, self._digests.of(value)) for name, value in self._values()),
        ]

    def _values(self) -> Iterator[tuple[str, Any]]:
        yield "random", random.getstate()
        yield "numpy.random", np.random.get_state()
        yield "torch.random", torch.get_rng_state()
        if torch.cuda.is_initialized():
            yield "torch.cuda.random", torch.cuda.get_rng_state()
        for optimizer in self._trainer.optimizers:
            told = [{**group, "params": None} for group in optimizer.param_groups]
            yield f"{type(optimizer).__name__}.param_groups", told
        for config in self._trainer.lr_scheduler_configs:
            scheduler = config.scheduler
            yield f"{type(scheduler).__name__}.state_dict", scheduler.state_dict()
        for name, owner in _owners(self._trainer, self._module):
            saves = ["on_save_checkpoint"]
            if isinstance(owner, nn.Module):
                saves += ["state_dict", "get_extra_state"]
            elif _has_own(owner, "state_dict"):
                yield f"{name}.state_dict", owner.state_dict()
            if _has_own(owner, *saves):
                for attribute, value in _attributes(owner):
                    yield f"{name}.{attribute}", value


def _owners(trainer: Any, module: LightningModule) -> Iterator[tuple[str, Any]]:
    """Yield the parts of a module, and the user's own callbacks and data module."""
    for path, part in module.named_modules():
        if not isinstance(part, MetricCollection):  # Metrics in it are parts, too.
            yield f"{type(module).__name__}.{path}".rstrip("."), part
    for each in (*trainer.callbacks, trainer.datamodule):
        is_shown = each is None or isinstance(each, ProgressBar)
        if type(each) is LambdaCallback or not (is_shown or is_of_others(type(each))):
            yield type(each).__name__, each


def _known(trainer: Any, module: LightningModule) -> list[Any]:
    """Return what is looked at by itself, or is in checkpoints, wherever it is met."""
    parts = [*module.modules(), *module.parameters(), *module.buffers()]
    return [*parts, *(owner for _, owner in _owners(trainer, module))]


def _has_own(part: Any, *methods: str) -> bool:
    """Say whether a part says itself what is saved of it, by one of these methods."""
    return any(
        getattr(type(part), method, None)
        not in [getattr(base, method, None) for base in _BASES]
        for method in methods
    )


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield what an object, and its class of the user's own, have for themselves."""
    for kind in reversed(type(owner).__mro__):
        if not is_of_others(kind):
            for name, value in vars(kind).items():
                is_plain = not (name.startswith("_abc_") or hasattr(value, "__get__"))
                if is_plain and not name.startswith("__"):
                    yield name, value
    left_out: set[str] = set()
    if isinstance(owner, nn.Module):
        left_out = _of_modules()
        if isinstance(owner, Metric):
            left_out = {*left_out, *_of_metrics(), *owner._defaults}
        for name in owner._non_persistent_buffers_set:
            yield name, owner._buffers[name]
    yield from (each for each in vars(owner).items() if each[0] not in left_out)


@cache
def _of_modules() -> set[str]:
    return {*vars(LightningModule()), *vars(nn.Module())}


@cache
def _of_metrics() -> set[str]:
    return {*vars(MeanMetric())}
