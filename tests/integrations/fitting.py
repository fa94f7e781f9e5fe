"""A fit of Lightning's with validation, checkpoints, schedules and averages."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from elasticrun import AdaptiveDataLoader, init
from elasticrun.integrations.lightning import Elastic

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 23, 6, 2
NUM_BATCHES = 4  # In an epoch: of 6, 6, 6 and 5 samples.

Batches = dict[tuple[int, int], list[int]]  # By epoch and number.


def nothing(trainer: Trainer) -> None:
    """Let the batch be."""


class Net(LightningModule):
    """Logs averages over steps and epochs, and a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(4, 1)
        self.mean = MeanMetric()

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        (x,) = batch
        loss = mse_loss(self.net(x), x.sum(1, keepdim=True))
        self.log("train", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.mean.update(loss.detach(), len(x))
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: tuple[Tensor], batch_idx: int) -> None:
        (x,) = batch
        loss = mse_loss(self.net(x), x.sum(1, keepdim=True))
        self.log("valid", loss, sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1, 0.9)
        steps = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        epochs = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": steps, "interval": "step"}, epochs]


class Log(Callback):
    """Keeps what there was at each end of a validation and of an epoch.

    Attributes:
        lines: What was kept, in the whole job.
    """

    def __init__(self) -> None:
        self.lines: list[list[float]] = []

    def state_dict(self) -> dict[str, Any]:
        return {"lines": self.lines}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.lines = list(state_dict["lines"])

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(trainer, "valid")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(trainer, "train", "metric")

    def _keep(self, trainer: Trainer, *names: str) -> None:
        values = [float(trainer.callback_metrics[name]) for name in names]
        loop = trainer.fit_loop
        counts = [trainer.global_step, trainer.current_epoch, loop.total_batch_idx]
        counts.append(loop.epoch_loop._batches_that_stepped)  # What loggers count by.
        self.lines.append([*counts, *values])


class OnBatch(Callback):
    """Calls a function at the end of each batch."""

    def __init__(self, function: Callable[[Trainer], None]) -> None:
        self._function = function

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self._function(trainer)


@dataclass
class Fit:
    """One fit.

    Attributes:
        on_batch: Called at the end of each batch, before the validation after it.
    """

    directory: str
    on_batch: Callable[[Trainer], None] = nothing
    save_interval: float | str = "off"
    accumulated: int = 1
    patience: int = 9
    num_epochs: int = NUM_EPOCHS

    def __call__(self) -> dict[str, Any]:
        """Run in a replica of its own."""
        init(self.directory, save_interval=self.save_interval, async_save=False)
        return self.run()

    def run(self) -> dict[str, Any]:
        data, valid = self._data()
        train_loader = AdaptiveDataLoader(data, BATCH_SIZE, shuffle=True)
        valid_loader = AdaptiveDataLoader(valid, 4, even_batches=False)
        return self._fit([Elastic()], train_loader, valid_loader, **Elastic.devices())

    def run_bare(self, batches: Batches) -> dict[str, Any]:
        """Train with these batches and without elasticrun."""
        data, valid = self._data()
        sampler = _Listed(batches)
        loader = DataLoader(data, batch_sampler=sampler)
        return self._fit(
            [],
            loader,
            DataLoader(valid, 4),
            accelerator="cpu",
            num_sanity_val_steps=0,
        )

    def _data(self) -> tuple[TensorDataset, TensorDataset]:
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(NUM_SAMPLES, 4, generator=generator)
        return TensorDataset(x), TensorDataset(x[:17] / 2)

    def _fit(
        self, callbacks: list[Callback], train: Any, valid: Any, **options: Any
    ) -> dict[str, Any]:
        torch.set_num_threads(1)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        log = Log()
        best = ModelCheckpoint(
            f"{self.directory}/best", monitor="valid", save_top_k=2, save_last=True
        )
        early = EarlyStopping("valid", patience=self.patience)
        callbacks = [*callbacks, log, best, early, OnBatch(self.on_batch)]
        trainer = Trainer(
            max_epochs=self.num_epochs,
            accumulate_grad_batches=self.accumulated,
            val_check_interval=0.5,
            callbacks=callbacks,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        net = Net()
        trainer.fit(net, train, valid)
        parameters = torch.cat([each.flatten() for each in net.parameters()])
        return {
            "parameters": parameters.tolist(),
            "log": [value for line in log.lines for value in line],
            "best": sorted(float(value) for value in best.best_k_models.values()),
            "waited": early.wait_count,
            "lr": trainer.optimizers[0].param_groups[0]["lr"],
            "steps": trainer.global_step,
        }


class _Listed:
    """The batches of each epoch, in turn."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches
        self._epoch = -1

    def __len__(self) -> int:
        return NUM_BATCHES

    def __iter__(self) -> Any:
        self._epoch += 1
        epoch = min(self._epoch, NUM_EPOCHS - 1)
        return iter([self._batches[epoch, number] for number in range(NUM_BATCHES)])
