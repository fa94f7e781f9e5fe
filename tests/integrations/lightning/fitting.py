"""Fits of Lightning's, each with other things that a Trainer can be told to do."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import (
    Callback,
    LightningDataModule,
    LightningModule,
    Trainer,
    plugins,
)
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from elasticrun import AdaptiveDataLoader, ElasticRunError, init
from elasticrun.integrations.lightning import Elastic
from tests.support.foreign import Batches, Listed
from tests.support.streams import Cut, Iterable

# The oldest Lightning has another name for it.
_Mixed = vars(plugins).get("MixedPrecision") or plugins.MixedPrecisionPlugin

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 23, 6, 2
NUM_BATCHES = 4  # In an epoch: of 6, 6, 6 and 5 samples.


def nothing(trainer: Trainer) -> None:
    """Let the batch be."""


SILENT = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


class Net(LightningModule):
    """Logs averages over steps and epochs, and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)
        self.mean = MeanMetric()
        self.mean_valid = MeanMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        (x,) = batch
        loss = self.loss(x)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        if batch_idx == 0:  # And in no later batch of the epoch.
            self.log("first", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.mean.update(loss.detach(), len(x))
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        (x,) = batch
        loss = self.loss(x)
        self.log("valid", loss, sync_dist=True, add_dataloader_idx=False)
        if dataloader_idx == 0:
            self.mean_valid.update(loss, len(x))
            self.log("metric_valid", self.mean_valid, add_dataloader_idx=False)
            numbers = torch.tensor(float(batch_idx))
            told = {"sync_dist": True, "reduce_fx": "max", "add_dataloader_idx": False}
            self.log("last_number", numbers, **told)

    def loss(self, x: Tensor) -> Tensor:
        return mse_loss(self.net(x), x.sum(1, keepdim=True))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, 0.9)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": steps, "interval": "step"}, epochs]


class Patient(Net):
    """Lowers the rate where a loss stays, of validations and of epochs."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, 0.9)
        make = torch.optim.lr_scheduler.ReduceLROnPlateau
        step = {"interval": "step", "frequency": 2, "monitor": "valid", "strict": False}
        epoch = {"interval": "epoch", "monitor": "train"}
        return [optimizer], [
            {"scheduler": make(optimizer, factor=0.9, patience=0), **step},
            {"scheduler": make(optimizer, factor=0.5, patience=0), **epoch},
        ]


class Paired(Net):
    """Trains with two loaders in one step, and validates with three in turn."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch["a"][0])
        if batch["b"] is not None:  # Or that loader is through.
            loss = loss + self.loss(batch["b"][0]) / 2
        self.log("train", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        loss = self.loss(batch[0])
        if dataloader_idx == 0:
            super().validation_step(batch, batch_idx)
        if dataloader_idx == 1:
            self.log("second", loss, sync_dist=True, add_dataloader_idx=False)
        self.log("of", loss, sync_dist=True)


class Logging(Net):
    """Logs averages, sums and extremes over the epoch, of all devices."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        (x,) = batch
        told = {"on_step": False, "on_epoch": True, "sync_dist": True}
        loss = self.loss(x)
        self.log("mean", loss, **told)
        for name in ("sum", "max", "min"):
            self.log(name, getattr(x[:, 0], name)(), reduce_fx=name, **told)
        weights = (x[:, 1].abs() * 99).round()  # As numbers of tokens.
        mean = (x[:, 0] * weights).sum() / weights.sum()
        self.log("tokens", mean, batch_size=int(weights.sum()), **told)
        return loss

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        told = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("before", float(batch_idx), **told)  # A mean by the batches' sizes.

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        told = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("after", outputs["loss"], **told)


class Manual(Net):
    """Steps by itself, each second batch, with two optimizers."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_model(self) -> None:
        if not hasattr(self, "last"):
            self.last = nn.Linear(1, 1)

    def loss(self, x: Tensor) -> Tensor:
        return mse_loss(self.last(self.net(x)), x.sum(1, keepdim=True))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        loss = self.loss(x)
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.manual_backward(self.loss(x) / 2)
        if batch_idx % 2:
            for optimizer in self.optimizers():
                optimizer.step()
                optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        adam = torch.optim.Adam(self.last.parameters(), 0.1)
        return [torch.optim.SGD(self.net.parameters(), 0.1, 0.9), adam]


class Module(LightningDataModule):
    """Makes its loaders in hooks, and counts batches in its state."""

    def __init__(self, train: Any, valid: Any) -> None:
        super().__init__()
        self._loaders = train, valid
        self.num_batches = 0

    def train_dataloader(self) -> Any:
        return self._loaders[0]()

    def val_dataloader(self) -> Any:
        return self._loaders[1]()

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer is not None
        self.num_batches += bool(self.trainer.training)
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"num_batches": self.num_batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.num_batches = state_dict["num_batches"]


class Log(Callback):
    """Keeps what there was at each end of a batch, a validation and an epoch.

    Attributes:
        lines: What was kept, in the whole job.
    """

    def __init__(self) -> None:
        self.lines: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lines = list(state_dict["lines"])

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._keep(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._keep(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(trainer)

    def _keep(self, trainer: Trainer) -> None:
        metrics = trainer.callback_metrics
        loop = trainer.fit_loop
        counts = [trainer.global_step, trainer.current_epoch, loop.total_batch_idx]
        counts.append(loop.epoch_loop._batches_that_stepped)  # What loggers count by.
        counts.append(loop.epoch_loop.val_loop.batch_progress.current.completed)
        data = trainer.datamodule
        counts.append(data.num_batches if isinstance(data, Module) else 0)
        values = [float(metrics[name]) for name in sorted(metrics)]
        self.lines.append([*counts, *values])


class OnBatch(Callback):
    """Calls a function at the end of each batch, of a validation, too."""

    def __init__(self, function: Callable[[Trainer], None]) -> None:
        self._function = function

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._function(trainer)

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._function(trainer)


@dataclass(frozen=True)
class Kind:
    """What is trained, with which loaders, and what the Trainer is told.

    Attributes:
        mode: Of the loaders that train together, if there are two.
        max_local_batch_size: Of the loader for training.
        with_module: Whether hooks of a LightningDataModule make the loaders.
        with_torch: Whether the loaders are torch's.
        streams: Makes streams of the data to train with.
        scale: Of gradients in float16, at the beginning.
        tolerance: How much another number of replicas may change values.
    """

    net: type[Net] = Net
    mode: Any = None
    max_local_batch_size: int | None = None
    with_module: bool = False
    with_torch: bool = False
    streams: Any = None
    scale: float | None = None
    tolerance: float = 2e-5
    options: dict[str, Any] = field(default_factory=lambda: {"val_check_interval": 0.5})


CLIPPED = {"gradient_clip_val": 0.3, "val_check_interval": 0.5}

KINDS = {
    "plain": Kind(),
    "streams": Kind(streams=Cut),
    "iterable": Kind(streams=Iterable, with_torch=True),
    "steps": Kind(
        Patient,
        options={
            "max_steps": 7,
            "max_epochs": -1,
            "limit_train_batches": 3,
            "limit_val_batches": 0.5,
            "check_val_every_n_epoch": None,
            "val_check_interval": 4,
        },
    ),
    "paired": Kind(
        Paired,
        mode="max_size_cycle",
        with_module=True,
        tolerance=0.05,
        options={"precision": "bf16-mixed", "num_sanity_val_steps": 2},
    ),
    "shortest": Kind(
        Paired, mode="min_size", options={"check_val_every_n_epoch": 2, "max_epochs": 4}
    ),
    "longest": Kind(Paired, mode="max_size", options={}),
    "cut": Kind(Logging, max_local_batch_size=1, options=CLIPPED),
    "whole": Kind(Logging, options=CLIPPED),
    "scaled": Kind(
        max_local_batch_size=4, scale=2.0**8, tolerance=0.05, options=CLIPPED
    ),
    "overflowing": Kind(max_local_batch_size=4, scale=2.0**16, options=CLIPPED),
    "manual": Kind(
        Manual,
        with_torch=True,
        options={"precision": "64-true", "val_check_interval": 3},
    ),
}


@dataclass
class Fit:
    """One fit.

    Attributes:
        on_batch: Called at the end of each batch, before the validation after it.
    """

    directory: str
    on_batch: Callable[[Trainer], None] = nothing
    save_interval: float | str = "off"
    kind: str = "plain"
    accumulated: int = 1
    max_local_batch_size: int | None = None
    patience: int = 9
    num_epochs: int = NUM_EPOCHS
    strategy: str = "auto"

    def __call__(self) -> dict[str, Any]:
        """Run in a replica of its own."""
        init(self.directory, save_interval=self.save_interval, async_save=False)
        return self.run()

    def run(self) -> dict[str, Any]:
        kind = KINDS[self.kind]
        means: Any = "global" if kind.with_torch else None
        if kind.with_module:
            data: Any = Module(self._train, self._valid)
            loaders = {"datamodule": data}
        else:
            loaders = {
                "train_dataloaders": self._train(),
                "val_dataloaders": self._valid(),
            }
        return self._fit(
            [Elastic(means)], loaders, strategy=self.strategy, **Elastic.devices()
        )

    def run_bare(self, batches: Batches) -> dict[str, Any]:
        """Train with these batches and without elasticrun."""
        data, valid = datasets()
        loaders = {
            "train_dataloaders": DataLoader(data, batch_sampler=Listed(batches)),
            "val_dataloaders": DataLoader(valid, 4),
        }
        return self._fit([], loaders, accelerator="cpu")

    def _train(self) -> Any:
        kind = KINDS[self.kind]
        data, valid = datasets()
        if kind.streams is not None:
            data = kind.streams(data)
        if kind.with_torch:
            return DataLoader(data, BATCH_SIZE, shuffle=kind.streams is None)
        if kind.mode is None:
            most = self.max_local_batch_size or kind.max_local_batch_size
            options = {"shuffle": True, "max_local_batch_size": most}
            return AdaptiveDataLoader(data, BATCH_SIZE, **options)
        more = TensorDataset(data.tensors[0].repeat(2, 1)[:30])
        short = TensorDataset(valid.tensors[0][:8])  # Begins again after each batch.
        both = [
            AdaptiveDataLoader(more, BATCH_SIZE, shuffle=True, drop_last=True),
            AdaptiveDataLoader(short, 6, shuffle=True, drop_last=True),
        ]
        return CombinedLoader(dict(zip("ab", both, strict=True)), kind.mode)

    def _valid(self) -> Any:
        data, valid = datasets()
        kind = KINDS[self.kind]
        if kind.with_torch:
            return DataLoader(valid, 4)
        loader = AdaptiveDataLoader(valid, 4, even_batches=False)
        if kind.mode is None:
            return loader
        others = [(data, 5), (valid, 4)]
        more = [AdaptiveDataLoader(*each, even_batches=False) for each in others]
        return [loader, *more]

    def _fit(
        self, callbacks: list[Callback], loaders: dict[str, Any], **options: Any
    ) -> dict[str, Any]:
        torch.set_num_threads(1)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        log = Log()
        best = ModelCheckpoint(
            f"{self.directory}/best", monitor="valid", save_top_k=2, save_last=True
        )
        early = EarlyStopping("valid", patience=self.patience)
        callbacks = [*callbacks, log, best, early, OnBatch(self.on_batch)]
        kind = KINDS[self.kind]
        options = {
            "max_epochs": self.num_epochs,
            "accumulate_grad_batches": self.accumulated,
            "logger": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            **options,
            **kind.options,
        }
        if kind.scale:
            scaler = torch.amp.GradScaler("cpu", kind.scale, growth_interval=3)
            options["plugins"] = [_Mixed("16-mixed", "cpu", scaler)]
        trainer = Trainer(callbacks=callbacks, **options)
        net = kind.net()
        trainer.fit(net, **loaders)
        parameters = torch.cat([each.flatten() for each in net.parameters()])
        return {
            "parameters": parameters.tolist(),
            "log": [value for line in log.lines for value in line],
            "best": sorted(float(value) for value in best.best_k_models.values()),
            "waited": early.wait_count,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "steps": trainer.global_step,
            "plugin": trainer.precision_plugin.state_dict(),
        }


class Stepwise(Net):
    """Logs sums of steps of a validation, and an average; counts samples."""

    def __init__(self) -> None:
        super().__init__()
        self.num_trained = SumMetric()
        self.num_validated = SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        self.num_trained.update(len(batch[0]))
        return super().training_step(batch, batch_idx)

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self.num_validated.update(len(batch[0]))
        self.log("mean", self.loss(batch[0]), sync_dist=True)
        both = {"on_step": True, "on_epoch": True, "sync_dist": True}
        self.log("sum", batch[0].sum(), reduce_fx="sum", **both)


def validate_by_steps(directory: str) -> tuple[list[float], str]:
    """Return what steps of a validation logged, and why one without padding fails."""

    def keep(trainer: Trainer) -> None:
        metrics = trainer.logged_metrics
        seen.extend(float(metrics[name]) for name in sorted(metrics))

    init(directory)
    data, valid = datasets()
    seen: list[float] = []
    callbacks = [Elastic(), OnBatch(keep)]
    options = {**SILENT, **Elastic.devices()}
    trainer = Trainer(max_epochs=1, callbacks=callbacks, **options)
    net = Stepwise()
    # Their last batches have one sample.
    trainer.fit(net, AdaptiveDataLoader(data, 11), AdaptiveDataLoader(valid, 4))
    seen.append(float(trainer.callback_metrics["mean"]))
    counts = [float(each.compute()) for each in (net.num_trained, net.num_validated)]
    fitted = [*seen, *counts]
    try:
        trainer.validate(net, AdaptiveDataLoader(valid, 4, even_batches=False))
    except ElasticRunError as error:
        return fitted, str(error)
    return fitted, ""


def datasets() -> tuple[TensorDataset, TensorDataset]:
    """Return samples to train with, and others."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_SAMPLES, 4, generator=generator)
    return TensorDataset(x), TensorDataset(x[:17] / 2)
