"""Modules, callbacks and data that do something in a validation, by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, Trainer, callbacks
from torch import nn
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC

from elasticrun import world_size
from tests.integrations.lightning.fitting import Net


class Validating(Net):
    """Calls `keep` in each step, and logs what is kept at the end of the validation."""

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if dataloader_idx == 0:
            super().validation_step(batch, batch_idx)
        self.keep(float(batch[0].sum()), batch_idx, dataloader_idx)

    def on_validation_epoch_end(self) -> None:
        self.log("kept", self.kept(), reduce_fx="sum", sync_dist=True)

    def keep(self, value: float, number: int, loader: int) -> None:
        """Keep something of a batch."""

    def kept(self) -> float:
        """Return what has been kept in this validation."""
        return 0.0


class Logging(Validating):
    """Logs at the beginning, and each step."""

    def on_validation_start(self) -> None:
        self.log("start", 2.0 / world_size(), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_start(self) -> None:
        self.log("epoch_start", 3.0, sync_dist=True)

    def keep(self, value: float, number: int, loader: int) -> None:
        told = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("sum", value, reduce_fx="sum", **told)


class Filling(Validating):
    """Fills a list, and logs its mean at the end."""

    def on_validation_start(self) -> None:
        self.outputs: list[float] = []

    def keep(self, value: float, number: int, loader: int) -> None:
        self.outputs.append(value)

    def kept(self) -> float:
        return float(sum(self.outputs))


class Drawing(Validating):
    """Draws where a validation begins, and in each step."""

    def on_validation_start(self) -> None:
        self.factor = float(torch.rand(()))

    def keep(self, value: float, number: int, loader: int) -> None:
        drawn = float(torch.rand(())) + random.random() + float(np.random.rand())
        self.log("drawn", self.factor * drawn)


class Resetting(Validating):
    """Has metrics begin anew itself, as many do; two of them are a collection."""

    def __init__(self) -> None:
        super().__init__()
        self.both = MetricCollection([MeanSquaredError(), MeanAbsoluteError()])

    def on_validation_epoch_start(self) -> None:
        self.mean_valid.reset()
        self.both.reset()

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        self.both.update(self.net(batch[0]), batch[0].sum(1, keepdim=True))

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.both.compute())


class Ranking(Validating):
    """Has a metric for each loader that keeps all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.areas = nn.ModuleList(BinaryAUROC() for _ in range(2))

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        super().validation_step(batch, batch_idx, dataloader_idx)
        values = batch[0].sum(1)
        area: Any = self.areas[dataloader_idx]
        area.update(values.sigmoid(), (batch[0][:, 0] > batch[0][:, 1]).long())

    def on_validation_epoch_end(self) -> None:
        for number, area in enumerate(self.areas):
            self.log(f"area_{number}", area.compute())
            area.reset()


class Averaging(Callback):
    """Has validations with averaged weights, in place of those that are trained."""

    def __init__(self) -> None:
        self.average: list[torch.Tensor] = []
        self.trained: list[torch.Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.average = state_dict["average"]

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        new = [each.detach().clone() for each in module.parameters()]
        old = self.average or new
        self.average = [(a + b) / 2 for a, b in zip(old, new, strict=True)]

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        self.trained = [each.detach().clone() for each in module.parameters()]
        self._put(module, self.average)

    def on_validation_end(self, trainer: Trainer, module: Any) -> None:
        self._put(module, self.trained)
        self.trained = []

    def _put(self, module: Any, values: list[torch.Tensor]) -> None:
        for parameter, value in zip(module.parameters(), values, strict=True):
            parameter.data.copy_(value)


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        sizes: Of the batches of each loader for validation.
    """

    net: type[Net] = Validating
    other: Callable[[], Callback] | None = None
    sizes: tuple[int, ...] = (3,)


def average() -> Callback:
    return callbacks.EMAWeightAveraging(decay=0.5)


CASES = {
    "plain": Case(),
    "three loaders": Case(Logging, sizes=(3, 6, 17)),
    "list": Case(Filling),
    "drawing": Case(Drawing),
    "resetting": Case(Resetting),
    "ranking": Case(Ranking, sizes=(3, 6)),
    "averaging": Case(other=Averaging),
}
if hasattr(callbacks, "EMAWeightAveraging"):  # The oldest Lightning has none.
    CASES["Lightning's"] = Case(other=average)

# What several replicas may do otherwise.
OF_SEVERAL = {
    name: CASES[name]
    for name in ("three loaders", "list", "resetting", "ranking", "averaging")
}
