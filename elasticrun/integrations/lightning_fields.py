"""What a module and callbacks keep for themselves, which is in no checkpoint."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from torch import nn

from elasticrun.checkpoint.states.metrics import find_metrics

_OTHERS = ("elasticrun", "lightning", "torch", "torchmetrics")  # Packages.
_MOST_ITEMS = 1000  # Of a container that is looked into.
_MOST_VALUES = 100_000  # Of all that is looked at.
_MOST_DEPTH = 100  # Of containers in one another.
_MOST_ELEMENTS = 1_000_000  # Of an array that is compared.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


class Fields:
    """The attributes of a module, its submodules and callbacks at one moment.

    Left out is what checkpoints have: parameters, buffers, metrics of torchmetrics, and
    callbacks with a state; and what is Lightning's own, and progress bars. Of objects
    of torch's and Lightning's it is known only which ones they are.

    Args:
        trainer: With the callbacks.
        module: That is trained.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self._trainer = trainer
        self._module = module
        self._kept: list[Any] = []  # So that no other object is where one was.
        self._before = self._look()

    def find_change(self) -> str | None:
        """Return the name of an attribute that is another one now, if any is."""
        now = self._look()
        names = {**self._before, **now}
        return next((n for n in names if self._before.get(n) != now.get(n)), None)

    def _look(self) -> dict[str, Any]:
        look = _Look()
        seen = {
            f"{name}.{attribute}": look.at(value)
            for name, owner, left_out in self._owners()
            for attribute, value in vars(owner).items()
            if attribute not in left_out
        }
        self._kept += look.known_by_id
        return seen

    def _owners(self) -> Iterator[tuple[str, Any, set[str]]]:
        name = type(self._module).__name__
        of_modules = {*vars(LightningModule()), *vars(nn.Module())}
        metrics = {
            id(part)
            for _, metric in find_metrics(self._module)
            for part in metric.modules()
        }
        for path, part in self._module.named_modules():
            if id(part) not in metrics:
                yield f"{name}.{path}".rstrip("."), part, of_modules
        callbacks: list[Callback] = self._trainer.callbacks  # type: ignore[attr-defined]
        for each in callbacks:
            kind = type(each)
            has_state = kind.state_dict is not Callback.state_dict
            if not (has_state or isinstance(each, ProgressBar) or _is_of_others(each)):
                yield kind.__name__, each, set()


class _Look:
    """Makes of values what can be compared later.

    Attributes:
        known_by_id: What has to live on for that.
    """

    def __init__(self) -> None:
        self.known_by_id: list[Any] = []
        self._num_values = 0
        self._around: set[int] = set()  # The containers that one is in.

    def at(self, value: Any) -> Any:
        self._num_values += 1
        if isinstance(value, _PLAIN):
            return type(value), repr(value)
        if isinstance(value, torch.Tensor):
            return self._at_tensor(value)
        if isinstance(value, np.ndarray) and value.size <= _MOST_ELEMENTS:
            return value.shape, value.dtype.str, value.tobytes()
        if isinstance(value, torch.Generator):
            return value.get_state().numpy().tobytes()
        if isinstance(value, random.Random):
            return value.getstate()
        if isinstance(value, np.random.Generator):
            return repr(value.bit_generator.state)
        is_too_far = len(self._around) > _MOST_DEPTH or self._num_values > _MOST_VALUES
        is_opaque = isinstance(value, type) or _is_of_others(value)
        if is_too_far or is_opaque or id(value) in self._around:
            return self._by_id(value)
        self._around.add(id(value))
        inside = self._at_inside(value)
        self._around.discard(id(value))
        return inside

    def _at_inside(self, value: Any) -> Any:
        if isinstance(value, dict):
            items: Any = reversed(value.items())
        elif isinstance(value, list | tuple | deque):
            items = reversed(value)
        elif isinstance(value, set | frozenset):
            items = iter(value)
        elif hasattr(value, "__dict__"):
            return self._by_id(value), self._at_inside(vars(value))
        else:
            return self._by_id(value)
        last = [self.at(each) for each in islice(items, _MOST_ITEMS)]
        return type(value), len(value), last

    def _at_tensor(self, value: torch.Tensor) -> Any:
        if not value.is_inference():
            return self._by_id(value), value._version
        if value.numel() > _MOST_ELEMENTS:
            return self._by_id(value)
        return value.dtype, repr(value.tolist())

    def _by_id(self, value: Any) -> int:
        self.known_by_id.append(value)
        return id(value)


def _is_of_others(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _OTHERS
