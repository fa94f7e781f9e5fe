"""Modules, callbacks and data that keep something in a validation, by name."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, callbacks
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import (
    MeanAbsoluteError,
    MeanMetric,
    MeanSquaredError,
    MetricCollection,
)
from torchmetrics.classification import BinaryAUROC

from elasticrun import rank, world_size
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


# What goes on in the middle.


class Logging(Validating):
    """Logs at the beginning, and each step; draws in each step."""

    def on_validation_start(self) -> None:
        self.log("start", 2.0 / world_size(), reduce_fx="sum", sync_dist=True)

    def on_validation_epoch_start(self) -> None:
        self.log("epoch_start", 3.0, sync_dist=True)

    def keep(self, value: float, number: int, loader: int) -> None:
        told = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("sum", value, reduce_fx="sum", **told)
        self.log("number", float(number), **told)


class Drawing(Validating):
    def keep(self, value: float, number: int, loader: int) -> None:
        drawn = float(torch.rand(())) + random.random() + float(np.random.rand())
        self.log("drawn", drawn)


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


class Normal(Validating):
    """Has averages of batches, and attributes that hooks make anew, or all leave."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.file = io.BytesIO()
        self.samples = list(range(1000))
        self.array = np.ones(1_500_000)
        self.tensor = torch.ones(1_500_000)
        self.function = lambda: self.samples

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return super().loss(self.norm(x))

    def on_validation_epoch_start(self) -> None:
        self.outputs: list[float] = []
        self.eval()


class InState(Callback):
    """Has in its state what it counts."""

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


class Saving(Validating):
    """Saves by a hook what no validation changes."""

    number = 5

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["number"] = self.number

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.number = checkpoint["number"]


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


# What waits for the end of the validation.


class Remembering(Validating):
    """Keeps the loss of the last batch of training."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.last = super().training_step(batch, batch_idx)
        return self.last

    def kept(self) -> float:
        return float(self.last)


class Slots:
    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0.0


class Filling(Validating):
    """Fills something that is made in `make`."""

    def on_validation_start(self) -> None:
        self.outputs = self.make()

    def make(self) -> Any:
        return []

    def keep(self, value: float, number: int, loader: int) -> None:
        self.outputs.append(value)

    def kept(self) -> float:
        return float(sum(self.outputs))


class FillsArray(Filling):
    def make(self) -> Any:
        return np.zeros(1_500_000)

    def keep(self, value: float, number: int, loader: int) -> None:
        self.outputs[number] = value


class FillsTensor(FillsArray):
    def make(self) -> Any:
        return torch.zeros(1_500_000)

    def kept(self) -> float:
        return float(self.outputs.sum())


class FillsDict(FillsArray):
    def make(self) -> Any:
        return dict.fromkeys(range(5000), 0.0)

    def kept(self) -> float:
        return float(sum(self.outputs.values()))


class FillsLast(Filling):
    """Keeps something on the last replica alone."""

    def keep(self, value: float, number: int, loader: int) -> None:
        if rank() == world_size() - 1:
            self.outputs.append(value)

    def kept(self) -> float:
        return float(bool(self.outputs))


class FillsSlots(Filling):
    def make(self) -> Any:
        return Slots()

    def keep(self, value: float, number: int, loader: int) -> None:
        self.outputs.number += value

    def kept(self) -> float:
        return float(self.outputs.number)


class FillsMetric(Filling):
    """Has a metric where no checkpoint looks for one."""

    def make(self) -> Any:
        return [MeanMetric()]

    def keep(self, value: float, number: int, loader: int) -> None:
        self.outputs[0].update(value)

    def kept(self) -> float:
        return float(self.outputs[0].compute())


class FillsClosure(Filling):
    def make(self) -> Any:
        values: list[float] = []

        def add(value: float | None = None) -> float:
            if value is not None:
                values.append(value)
            return sum(values)

        return add

    def keep(self, value: float, number: int, loader: int) -> None:
        self.outputs(value)

    def kept(self) -> float:
        return float(self.outputs())


class FillsGenerator(Filling):
    """Has what cannot be compared."""

    def make(self) -> Any:
        return (float(number) for number in range(1000))

    def keep(self, value: float, number: int, loader: int) -> None:
        next(self.outputs)

    def kept(self) -> float:
        return next(self.outputs)


class FillsLoader(FillsGenerator):
    """Has batches of another loader, too."""

    def make(self) -> Any:
        return iter(DataLoader(datasets()[0], 1, generator=torch.Generator()))

    def kept(self) -> float:
        return float(next(self.outputs)[0].sum())


class FillsFile(Filling):
    def make(self) -> Any:
        return open("kept.txt", "w+")

    def keep(self, value: float, number: int, loader: int) -> None:
        self.outputs.write("a")

    def kept(self) -> float:
        self.outputs.seek(0)
        size = len(self.outputs.read())
        self.outputs.close()
        return float(size)


class FillsClass(Validating):
    """Keeps something in its class."""

    all_values: ClassVar[list[float]] = []

    def keep(self, value: float, number: int, loader: int) -> None:
        self.all_values.append(value)

    def kept(self) -> float:
        total = sum(self.all_values)
        self.all_values.clear()
        return total


class FillsBuffer(Validating):
    """Has a buffer that is in no state."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(()), persistent=False)

    def on_validation_start(self) -> None:
        self.total.zero_()

    def keep(self, value: float, number: int, loader: int) -> None:
        self.total += value

    def kept(self) -> float:
        return float(self.total)


class FillsFirst(Filling):
    """Keeps something of the first of two loaders, which has one batch."""

    def keep(self, value: float, number: int, loader: int) -> None:
        if loader == 0:
            self.outputs.append(value)


class Counting(Callback):
    """Counts batches of a validation, in no state."""

    count = 0

    def on_validation_batch_end(self, *args: Any) -> None:
        self.count += 1

    def on_validation_epoch_end(self, trainer: Trainer, module: Any) -> None:
        module.log("count", float(self.count))
        self.count = 0


def summing() -> Callback:
    values: list[float] = []

    def add(trainer: Any, module: Any, outputs: Any, batch: Any, *args: Any) -> None:
        values.append(float(batch[0].sum()))

    def log(trainer: Any, module: Any) -> None:
        module.log("sum", sum(values))
        values.clear()

    return callbacks.LambdaCallback(
        on_validation_batch_end=add, on_validation_epoch_end=log
    )


class HalfInState(Counting):
    """Has a state, but with something else."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": 0}


class Numbering(InState):
    """Counts validations in its state, where they begin."""

    def on_validation_start(self, *args: Any) -> None:
        self._count += 1

    def on_validation_batch_end(self, *args: Any) -> None:
        """Count nothing."""


class NumbersItself(Validating):
    """Counts validations, and saves that by a hook."""

    count = 0

    def on_validation_start(self) -> None:
        self.count += 1

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["count"] = self.count

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.count = checkpoint["count"]

    def kept(self) -> float:
        return float(self.count)


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


class Slowing(Validating):
    """Lowers the rate where a validation begins."""

    def on_validation_start(self) -> None:
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] *= 0.5


class Choosing(Validating):
    """Draws, where a validation begins, what is kept of each batch."""

    def on_validation_start(self) -> None:
        self.factor = float(torch.rand(()))

    def keep(self, value: float, number: int, loader: int) -> None:
        self.log("chosen", self.factor * value)


class Data(LightningDataModule):
    """Counts batches, in no state."""

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
        waits_for: What a warning names, as a save waits for the end of a validation.
        sizes: Of the batches of each loader for validation.
    """

    net: type[Net] = Net
    other: Callable[[], Callback] | None = None
    waits_for: str | None = None
    sizes: tuple[int, ...] = (3,)
    data: type[Data] | None = None


def average() -> Callback:
    return callbacks.EMAWeightAveraging(decay=0.5)


CASES = {
    "plain": Case(Validating),
    "three loaders": Case(Logging, sizes=(3, 6, 17)),
    "logging": Case(Logging),
    "drawing": Case(Drawing),
    "resetting": Case(Resetting),
    "resets at end": Case(ResetsAtEnd),
    "normal": Case(Normal),
    "in state": Case(Validating, InState),
    "saving": Case(Saving),
    "ranking": Case(Ranking, sizes=(3, 6)),
    "remembering": Case(Remembering, waits_for="Remembering.last"),
    "summing": Case(
        Validating, summing, waits_for="LambdaCallback.on_validation_epoch_end"
    ),
    "list": Case(Filling, waits_for="Filling.outputs"),
    "last": Case(FillsLast, waits_for="FillsLast.outputs"),
    "array": Case(FillsArray, waits_for="FillsArray.outputs"),
    "tensor": Case(FillsTensor, waits_for="FillsTensor.outputs"),
    "dict": Case(FillsDict, waits_for="FillsDict.outputs"),
    "slots": Case(FillsSlots, waits_for="FillsSlots.outputs"),
    "metric": Case(FillsMetric, waits_for="FillsMetric.outputs"),
    "closure": Case(FillsClosure, waits_for="FillsClosure.outputs"),
    "generator": Case(FillsGenerator, waits_for="FillsGenerator.outputs"),
    "loader": Case(FillsLoader, waits_for="FillsLoader.outputs"),
    "file": Case(FillsFile, waits_for="FillsFile.outputs"),
    "class": Case(FillsClass, waits_for="FillsClass.all_values"),
    "buffer": Case(FillsBuffer, waits_for="FillsBuffer.total"),
    "first": Case(FillsFirst, waits_for="FillsFirst.outputs", sizes=(17, 3)),
    "counting": Case(Validating, Counting, waits_for="Counting.count"),
    "half in state": Case(Validating, HalfInState, waits_for="HalfInState.count"),
    "numbering": Case(Validating, Numbering, waits_for="Numbering.state_dict"),
    "numbers itself": Case(NumbersItself, waits_for="NumbersItself.count"),
    "averaging": Case(Validating, Averaging, waits_for="Validating.net.weight"),
    "slowing": Case(Slowing, waits_for="SGD.param_groups"),
    "choosing": Case(Choosing, waits_for="torch.random"),
    "data": Case(OfData, waits_for="Data.count", data=Data),
}
if hasattr(callbacks, "EMAWeightAveraging"):  # The oldest Lightning has none.
    CASES["Lightning's"] = Case(Validating, average, waits_for="Validating.net.weight")

# What several replicas may do otherwise.
OF_SEVERAL = {
    name: case
    for name, case in CASES.items()
    if case.net
    in (Logging, Ranking, Resetting, ResetsAtEnd, Filling, FillsLast, FillsFirst)
    or case.other in (InState, Numbering, Averaging, average)
}
