"""What `self.log` keeps of a batch: means over samples, however they are shared out."""

from __future__ import annotations

import copy
from typing import Any

import torch

from elasticrun.checkpoint.states.metrics import find_metrics
from elasticrun.errors import ElasticRunError

Metrics = list[tuple[Any, dict[str, Any]]]  # Each with what it has.


class StepValues:
    """Corrects what is logged in a batch whose parts are uneven.

    A batch is shared out among devices, may be cut into micro-batches, and a device
    without a sample has padding. The value of a step is then that of all samples, with
    `sync_dist=True` those of all devices; and padding counts in no average or sum.
    Metrics of torchmetrics are given padding, too, and get back what they had before.

    Args:
        trainer: With the module whose metrics these are.
        results: Where one of its loops keeps what is logged.
        reduce: Of a tensor over all devices.

    Attributes:
        is_even: Whether every device has a part of each batch.
        num_valid: How many samples this part has, without padding.
    """

    def __init__(self, trainer: Any, results: Any, reduce: Any) -> None:
        self._trainer = trainer
        self._metrics: Metrics = []  # Before padding.
        self.is_even = True
        self.num_valid = 0
        self._results = results
        self._reduce = reduce
        self._update = results.update_metrics
        self._part = 0
        self._num_parts = 1
        self._parts: dict[str, dict[int, torch.Tensor]] = {}
        results.update_metrics = self._log

    def begin_batch(self, num_valid: int, *, num_parts: int = 1) -> None:
        """Forget the batch before."""
        self._num_parts = num_parts
        self._parts.clear()
        self.begin_part(0, num_valid)

    def begin_part(self, number: int, num_valid: int) -> None:
        """Take what is logged from now on for that of one micro-batch."""
        self.end_part()
        self._part = number
        self.num_valid = num_valid
        if not num_valid:
            self._metrics = copy_metrics(self._trainer.lightning_module)

    def end_part(self) -> None:
        """Let metrics forget what they were given of padding."""
        restore_metrics(self._metrics)

    def _log(self, key: str, value: Any, batch_size: int) -> None:
        """Keep a value, in place of Lightning's own method."""
        metric = self._results[key]
        meta = metric.meta
        if self._results.batch is None or not metric.is_tensor:
            self._update(key, value, batch_size)
            return
        reduction = meta.reduce_fx.__name__
        size = batch_size
        if not meta.on_epoch and batch_size == 1:  # Lightning does not count these.
            size = self.num_valid
        if not self.num_valid:
            size = batch_size = 0
            if reduction == "sum":
                value = torch.zeros_like(value)
        sync = meta.sync
        is_synced = sync.should
        if not meta.on_step or not (is_synced or self._num_parts > 1):
            self._update(key, value, batch_size)
            return
        if is_synced and not self.is_even:
            raise ElasticRunError(
                f"self.log({meta.name!r}, on_step=True, sync_dist=True) is a mean over "
                "devices in each batch of a validation, but the last one has fewer "
                "samples than there are devices, so that some of them have no such "
                "batch. Leave on_step=True out; or give the loader even_batches=True, "
                "whose padding counts in nothing that self.log averages or sums up."
            )
        sync.should = False
        self._update(key, value, batch_size)
        sync.should = is_synced
        own = metric._forward_cache
        if reduction == "mean":
            own, reduction = torch.stack((own * size, torch.full_like(own, size))), ""
        if is_synced and not sync.rank_zero_only:
            own = self._reduce(own, group=sync.group, reduce_op=reduction or "sum")
        parts = self._parts.setdefault(key, {})
        parts[self._part] = own
        metric._forward_cache = _whole(torch.stack([*parts.values()]), reduction)
        if not meta.on_epoch:
            metric.value = metric._forward_cache


def _whole(parts: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return a batch's value; without a reduction, of sums and numbers of samples."""
    if reduction in ("max", "min"):
        return parts.amax(0) if reduction == "max" else parts.amin(0)
    total = parts.sum(0)
    return total if reduction else total[0] / total[1].clamp(min=1)


def copy_metrics(module: Any) -> Metrics:
    """Return what the metrics of torchmetrics in a module have."""
    return [
        (metric, copy.deepcopy({name: getattr(metric, name) for name in names}))
        for _, metric in find_metrics(module)
        for names in [(*metric._defaults, "_update_count", "_computed")]
    ]


def restore_metrics(metrics: Metrics) -> None:
    """Give metrics what they had, once."""
    for metric, values in metrics:
        for name, value in values.items():
            setattr(metric, name, value)
    metrics.clear()
