"""What is saved of a fit: what Lightning's checkpoints know of it, and leave out."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from typing import Any, BinaryIO

import torch
from lightning.pytorch import Callback, Trainer, callbacks
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger, TensorBoardLogger
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)

from elasticrun.checkpoint.states.values import load_values_of, save_values_of
from elasticrun.job.current import current_job
from elasticrun.job.states import State
from elasticrun.replicas.gathering import gather


def kept_logs(loggers: Iterable[Logger]) -> list[dict[str, Any]]:
    """Return of each logger its version, and the rows that a `CSVLogger` has written.

    Lightning removes the file of a `CSVLogger` that gets the version it had, and that
    before a callback is asked for anything.
    """
    return [
        {"version": logger._version, "rows": _rows(logger)}
        if isinstance(logger, (CSVLogger, TensorBoardLogger))
        else {}
        for logger in loggers
    ]


def _rows(logger: Any) -> str:
    experiment = logger._experiment
    if not isinstance(logger, CSVLogger) or experiment is None:
        return ""
    logger.save()
    if not experiment._fs.isfile(experiment.metrics_file_path):
        return ""
    with experiment._fs.open(experiment.metrics_file_path, "r", newline="") as file:
        return str(file.read())


def restore_logs(
    loggers: Iterable[Logger], kept: list[dict[str, Any]], *, is_writer: bool
) -> None:
    """Let loggers write where they wrote before.

    From the file of a `CSVLogger` goes what a killed generation has written since.
    """
    for logger, of_logger in zip(loggers, kept, strict=False):
        if not of_logger or not isinstance(logger, (CSVLogger, TensorBoardLogger)):
            continue
        taken = logger.log_dir  # The next number, if Lightning was to find one.
        if is_writer and isinstance(logger, TensorBoardLogger):
            logger.experiment.close()
        logger._version = of_logger["version"]
        logger._experiment = None
        if not is_writer:
            continue
        if taken != logger.log_dir:
            _remove_unused(taken)
        if isinstance(logger, CSVLogger) and of_logger["rows"]:
            _write(logger.experiment, of_logger["rows"])


def _remove_unused(directory: str) -> None:
    """Remove the directory that this process made for nothing."""
    with suppress(OSError):  # There is something else in it, or it is a remote one.
        for name in os.listdir(directory):
            if name.startswith("events.") and f".{os.getpid()}." in name:
                os.remove(os.path.join(directory, name))
        os.rmdir(directory)


def _write(experiment: Any, rows: str) -> None:
    with experiment._fs.open(experiment.metrics_file_path, "w", newline="") as file:
        file.write(rows)
    experiment.metrics_keys = next(csv.reader(io.StringIO(rows)))


# What a checkpoint of Lightning's has besides what is needed to go on.
_NOT_KEPT = ("state_dict", "hyper_parameters", "hparams_name", "hparams_type")
# Where Lightning's WeightAveraging puts the weights; the averages are in their place.
_TRAINED = "current_model_state"
_AVERAGING: Any = getattr(callbacks, "WeightAveraging", ())  # The oldest have none.
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
# What a ModelCheckpoint has beside its state: without it, it would write a step twice.
_SAVED_LAST = ("_last_global_step_saved", "_last_checkpoint_saved")

Sums = dict[str, dict[str, Any]]


class FitState(State):
    """The progress of loops, callbacks, optimizers, averages, and logs.

    Attributes:
        is_in_epoch: Whether the boundary is within an epoch, for Lightning.
        is_before_validation: Whether it is the one before a validation, which belongs
            to a batch that is trained.
        loaded: What the checkpoint has, if there is one.
    """

    def __init__(self, trainer: Trainer) -> None:
        super().__init__("lightning")
        self._trainer = trainer
        self._captured: dict[str, Any] = {}
        self.is_in_epoch = False
        self.is_before_validation = False
        self.loaded: dict[str, Any] | None = None

    def current(self) -> None:
        """Nothing: it is restored where the framework begins, behind replayed code."""

    def sync(self) -> None:
        trainer, connector = self._trainer, self._trainer._logger_connector
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        epoch_loop = trainer.fit_loop.epoch_loop
        kept = {
            key: value
            for key, value in checkpoint.items()
            if key.removeprefix("datamodule_") not in _NOT_KEPT
        }
        if kept.pop(_TRAINED, None) is not None:
            kept["state_dict"] = checkpoint["state_dict"]
        self._captured = {
            "checkpoint": kept,
            "is_in_epoch": self.is_in_epoch,
            "should_stop": trainer.should_stop,
            "sums": sums_of_all(epoch_loop._results),
            # The loader and the batch of a validation that is to begin.
            "validated": (0, 0) if self.is_before_validation else None,
            "seen": dict(epoch_loop.val_loop._seen_batches_per_dataloader),
            "saved_last": [
                {name: vars(each)[name] for name in _SAVED_LAST}
                for each in _model_checkpoints(trainer)
            ],
            "logs": kept_logs(trainer.loggers),
            **{name: dict(getattr(connector, name)) for name in _METRICS},
        }

    def save(self, fileobj: BinaryIO) -> None:
        save_values_of(self, self._captured, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        self.loaded = load_values_of(self, fileobj)

    def restore_saved_last(self) -> None:
        """Let each ModelCheckpoint know what it has written."""
        assert self.loaded is not None
        known = _model_checkpoints(self._trainer)
        for callback, values in zip(known, self.loaded["saved_last"], strict=False):
            vars(callback).update(values)

    def stand_in_for_weights(self, module: torch.nn.Module) -> None:
        """Give WeightAveraging a module's weights, which the job loads later."""
        checkpoint: Any = self._trainer._checkpoint_connector._loaded_checkpoint
        if "state_dict" in checkpoint:
            checkpoint[_TRAINED] = module.state_dict()

    def restore_metrics(self) -> None:
        """Put back what was logged last, of which callbacks and schedulers read."""
        assert self.loaded is not None
        for name in _METRICS:
            getattr(self._trainer._logger_connector, name).update(self.loaded[name])


def averaging(trainer: Any) -> list[Callback]:
    """Return the callbacks that put averaged weights into the module at the end."""
    return [each for each in trainer.callbacks if isinstance(each, _AVERAGING)]


def _model_checkpoints(trainer: Trainer) -> list[ModelCheckpoint]:
    every: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    return [each for each in every if isinstance(each, ModelCheckpoint)]


def sums_of_all(results: Any) -> Sums:
    """Return what the averages over an epoch have come to on all replicas. Collective.

    Returns:
        By its key, what `self.log` was told, and without a metric of torchmetrics the
        value and the number of samples.
    """
    merged: Sums = {}
    for of_replica in gather(_sums(results)):
        for key, mine in of_replica.items():
            known = merged.setdefault(key, mine)
            if known is not mine and "value" in mine:
                merge = {"max": max, "min": min}.get(mine["reduce_fx"], float.__add__)
                known["value"] = merge(known["value"], mine["value"])
                known["num_samples"] += mine["num_samples"]
    return merged


def _sums(results: Any) -> Sums:
    kept = {}
    for key, metric in results.items():
        meta = metric.meta
        if not meta.on_epoch or metric.has_reset:
            continue
        kept[key] = {
            "told": {
                name: getattr(meta, name)
                for name in _TOLD_BY_LOG
                if name != "reduce_fx"
            },
            # With one replica, Lightning does not note what was asked for.
            "is_synced": meta.sync.should or current_job().world_size == 1,
            "rank_zero_only": meta.sync.rank_zero_only,
            "reduce_fx": meta.reduce_fx.__name__,
        }
        if metric.is_tensor:
            number = metric.cumulated_batch_size if meta.is_mean_reduction else 0
            kept[key] |= {
                "value": float(metric.value),
                "is_double": metric.value.dtype == torch.float64,
                "num_samples": float(number),
            }
    return kept


def restore_sums(results: Any, sums: Sums, trainer: Trainer) -> None:
    """Let averages over an epoch go on; what they have come to is rank 0's."""
    is_mine = current_job().rank == 0
    for key, kept in sums.items():
        meta = _LoadedMetadata(
            **kept["told"], reduce_fx=getattr(torch, kept["reduce_fx"])
        )
        meta.sync = _Sync(
            fn=trainer.strategy.reduce,
            _should=kept["is_synced"] and current_job().world_size > 1,
            rank_zero_only=kept["rank_zero_only"],
        )
        metric: Any = _ResultMetric(meta, "value" in kept)
        results[key] = metric
        metric.to(trainer.strategy.root_device)
        if "value" not in kept:
            attribute = str(meta.metric_attribute)
            metric.value = trainer.lightning_module.get_submodule(attribute)
        elif is_mine:
            dtype = torch.float64 if kept["is_double"] else metric.value.dtype
            value = torch.full_like(metric.value, kept["value"], dtype=dtype)
            metric.value = value
            if meta.is_mean_reduction:
                metric.cumulated_batch_size.fill_(int(kept["num_samples"]))
        metric._update_count = 1  # Or torchmetrics warns of a mean over nothing.


class _LoadedMetadata(_Metadata):
    """What `self.log` was told before the restart; how to sync it is told anew."""

    def __ne__(self, other: object) -> bool:
        assert isinstance(other, _Metadata)
        self._sync = other._sync
        return any(getattr(self, name) != getattr(other, name) for name in _TOLD_BY_LOG)


_TOLD_BY_LOG = [each.name for each in fields(_Metadata) if each.name != "_sync"]
