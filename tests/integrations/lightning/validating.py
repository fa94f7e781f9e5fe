"""Modules, callbacks and data that do something in a validation, by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, callbacks
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import MeanAbsoluteError, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC

from elasticrun import world_size
from tests.integrations.lightning.fitting import Net, datasets


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


class ResetsAtEnd(Resetting):
    def on_validation_epoch_start(self) -> None:
        """Leave them."""

    def on_validation_epoch_end(self) -> None:
        super().on_validation_epoch_end()
        self.both.reset()


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


class Slowing(Validating):
    """Lowers the rate where a validation begins."""

    def on_validation_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5


class Numbering(Validating):
    """Counts validations where they begin, and saves that by a hook."""

    count = 0

    def on_validation_start(self) -> None:
        self.count += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]

    def kept(self) -> float:
        return float(self.count)


class Counting(Callback):
    """Counts batches of validations, in its state."""

    def __init__(self) -> None:
        self._count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self._count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._count = state_dict["count"]

    def on_validation_batch_end(self, *args: Any) -> None:
        self._count += 1

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        module.log("count", float(self._count))


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


class Data(LightningDataModule):
    """Counts batches of a validation."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        self.count += bool(self.trainer.validating)
        return batch

    def train_dataloader(self) -> Any:
        return DataLoader(datasets()[0], 6)

    def val_dataloader(self) -> Any:
        return DataLoader(datasets()[1], 3)


class OfData(Validating):
    def kept(self) -> float:
        data: Any = self.trainer.datamodule
        total, data.count = data.count, 0
        return float(total)


@dataclass(frozen=True)
class Case:
    """What is trained.

    Attributes:
        sizes: Of the batches of each loader for validation.
    """

    net: type[Net] = Validating
    other: Callable[[], Callback] | None = None
    sizes: tuple[int, ...] = (3,)
    data: type[Data] | None = None


def average() -> Callback:
    return callbacks.EMAWeightAveraging(decay=0.5)


CASES = {
    "plain": Case(),
    "three loaders": Case(Logging, sizes=(3, 6, 17)),
    "list": Case(Filling),
    "drawing": Case(Drawing),
    "resetting": Case(Resetting),
    "resets at end": Case(ResetsAtEnd),
    "ranking": Case(Ranking, sizes=(3, 6)),
    "slowing": Case(Slowing),
    "numbering": Case(Numbering),
    "counting": Case(other=Counting),
    "averaging": Case(other=Averaging),
    "data": Case(OfData, data=Data),
}
if hasattr(callbacks, "EMAWeightAveraging"):  # The oldest Lightning has none.
    CASES["Lightning's"] = Case(other=average)

# What several replicas may do otherwise.
OF_SEVERAL = {
    name: CASES[name]
    for name in ("three loaders", "list", "resetting", "ranking", "averaging")
}
