"""Keeps padding out of the averages and sums of `self.log` and of metrics."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import Trainer

from elasticrun.checkpoint.states.metrics import find_metrics
from elasticrun.errors import ElasticRunError
from elasticrun.integrations.lightning.loaders import LoaderProxy
from elasticrun.job.current import current_job


class StepValues:
    """Leaves padding out of what is logged in one of a Trainer's loops.

    A device without a sample of a batch, or of one of its micro-batches, gets padding.
    Averages and sums over an epoch leave it out. Metrics of torchmetrics are given it,
    and get back what they had before. The value of a step is Lightning's: that of the
    last micro-batch, and with `sync_dist=True` the mean of the devices' means.

    Attributes:
        is_even: Whether every device has a part of each batch.
    """

    def __init__(self, trainer: Any, results: Any) -> None:
        self._trainer = trainer
        self._results = results
        self._update = results.update_metrics
        self._num_valid = 0
        self._before_padding: list[tuple[Any, dict[str, Any]]] = []
        self.is_even = True
        results.update_metrics = self._log

    def begin_part(self, num_valid: int) -> None:
        """Take what is logged from now on for that of one batch or micro-batch."""
        self.end_part()
        self._num_valid = num_valid
        if not num_valid:
            self._before_padding = _copy_metrics(self._trainer.lightning_module)

    def end_part(self) -> None:
        """Let metrics forget what they were given of padding."""
        for metric, values in self._before_padding:
            for name, value in values.items():
                setattr(metric, name, value)
        self._before_padding.clear()

    def _log(self, key: str, value: Any, batch_size: int) -> None:
        """Keep a value, in place of Lightning's own method."""
        metric = self._results[key]
        meta = metric.meta
        if self._results.batch is None or not metric.is_tensor:
            self._update(key, value, batch_size)
            return
        if meta.on_step and meta.sync.should and not self.is_even:
            raise ElasticRunError(
                f"self.log({meta.name!r}, on_step=True, sync_dist=True) is taken over "
                "devices in each batch of an evaluation, but its last one has fewer "
                "samples than there are devices, so that some of them have no such "
                "batch. Leave on_step=True out; or give the loader even_batches=True, "
                "whose padding counts in no average or sum over the epoch."
            )
        if not self._num_valid:
            batch_size = 0
            if meta.is_sum_reduction:
                value = torch.zeros_like(value)
        self._update(key, value, batch_size)


class Evaluations:
    """Reads batches for a Trainer's validations and tests, and leaves out padding."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer: Any = trainer
        of_trainer = self._trainer
        val_loop = of_trainer.fit_loop.epoch_loop.val_loop
        self._values = {
            id(loop._results): StepValues(trainer, loop._results)
            for loop in (val_loop, of_trainer.validate_loop, of_trainer.test_loop)
        }

    def read(self, batches: LoaderProxy) -> Iterator[Any]:
        """Yield all batches."""
        values = self._values_now()
        loader = batches.loader
        is_even = loader.even_batches or not len(batches)
        if not is_even:
            last = len(batches) - 1
            is_even = loader.batches_of_epoch().size(last) >= current_job().world_size
        for batch, share in loader.read(0):
            if values is not None:
                values.is_even = is_even
                values.begin_part(share.part.num_valid)
            yield batch

    def end_batch(self) -> None:
        """Let metrics forget padding."""
        values = self._values_now()
        if values is not None:
            values.end_part()

    def _values_now(self) -> StepValues | None:
        return self._values.get(id(self._trainer._results))  # None to predict.


def _copy_metrics(module: Any) -> list[tuple[Any, dict[str, Any]]]:
    """Return the metrics of torchmetrics in a module, each with what it has."""
    return [
        (metric, copy.deepcopy({name: getattr(metric, name) for name in names}))
        for _, metric in find_metrics(module)
        for names in [(*metric._defaults, "_update_count", "_computed")]
    ]
