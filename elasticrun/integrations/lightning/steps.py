"""A step in micro-batches; keeps padding out of the averages of `self.log`."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Trainer

from elasticrun.checkpoint.states.metrics import find_metrics
from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.errors import ElasticRunError
from elasticrun.integrations.lightning.loaders import LoaderProxy
from elasticrun.job.current import current_job
from elasticrun.job.foreign import ForeignLoop
from elasticrun.job.loop import MicroBatch


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


class MicroBatchSteps:
    """Trains with all micro-batches of a batch in one step of Lightning's.

    Lightning gets the first micro-batch, with one number, one step of the optimizer and
    the hooks of one batch; the others are trained inside of that step.
    """

    def __init__(self, trainer: Any, values: StepValues) -> None:
        self._trainer = trainer
        self._values = values
        self._loop: ForeignLoop | None = None
        self._parts: list[tuple[Any, MicroBatch]] = []  # Each with its share.
        self._taken: MicroBatch | None = None  # The share of the one that is trained.

    def begin_batch(
        self, loop: ForeignLoop, parts: list[tuple[Any, MicroBatch]]
    ) -> None:
        """Have these micro-batches come next, of which Lightning gets the first one."""
        self._loop = loop
        self._parts = parts
        _, share = parts[0]
        self._take(share)
        self._values.begin_part(share.part.local_batch_size)

    def make_closure(
        self, make: Any, kwargs: Any, optimizer: Any, batch_idx: int
    ) -> Any:
        """Return what Lightning trains a batch with, in place of its own method."""
        first = make(kwargs, optimizer, batch_idx)
        if len(self._parts) <= 1:
            return first
        automatic = self._trainer.fit_loop.epoch_loop.automatic_optimization
        batches, closures = [kwargs["batch"]], [first]
        for batch, _ in self._parts[1:]:
            batches.append(self._transfer(batch))
            step = automatic._make_step_fn({**kwargs, "batch": batches[-1]})
            backward = automatic._make_backward_fn(optimizer)
            closures.append(type(first)(step, backward))  # And zeroes no gradients.
        return _CutClosure(self, closures, batches)

    def _transfer(self, batch: Any) -> Any:
        """Do with a micro-batch what Lightning has done with the first one."""
        trainer = self._trainer
        batch = trainer.precision_plugin.convert_input(batch)
        batch = trainer.lightning_module._on_before_batch_transfer(batch)
        return trainer.strategy.batch_to_device(batch, dataloader_idx=0)

    def train(self, closures: list[Any], batches: list[Any]) -> torch.Tensor | None:
        """Train with all parts; return their mean loss, if there is any."""
        results = self._trainer.fit_loop.epoch_loop._results
        block = getattr(self._trainer.strategy, "block_backward_sync", nullcontext)
        losses = []
        for number, (_, share) in enumerate(self._parts):
            self._take(share)
            results.batch, results.batch_size = batches[number], None
            self._values.begin_part(share.part.num_valid)
            with nullcontext() if share.part.is_step else block():
                loss = closures[number]()
            if loss is not None:
                weight = share.part.num_valid / max(1, share.part.local_batch_size)
                losses.append(loss * weight)
        self.log_for_all_parts()
        return torch.stack(losses).sum(0) if losses else None

    def log_for_all_parts(self) -> None:
        """Count what is logged now for all samples of the batch, as hooks are."""
        if len(self._parts) > 1:
            num_samples = self._parts[0][1].part.local_batch_size
            self._trainer.fit_loop.epoch_loop._results.batch_size = num_samples
            self._values.begin_part(num_samples)

    def end_part(self) -> None:
        """Let metrics forget padding."""
        self._values.end_part()

    def _take(self, share: MicroBatch) -> None:
        assert self._loop is not None
        if share is not self._taken:  # Or a trace would have it twice.
            self._loop.take(share)
            self._taken = share


class _CutClosure:
    """Stands for Lightning's closure over a batch, with one over each part of it."""

    def __init__(
        self, steps: MicroBatchSteps, closures: list[Any], batches: list[Any]
    ) -> None:
        self._steps = steps
        self._closures = closures
        self._batches = batches
        self._loss: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor | None:
        self._loss = self._steps.train(self._closures, self._batches)
        return self._loss

    def consume_result(self) -> Any:
        """Return the last result, with the loss of all."""
        result = [closure.consume_result() for closure in self._closures][-1]
        result.loss = self._loss
        return result


def set_micro_batches(
    loaders: list[AdaptiveDataLoader[Any]], trainer: Any, sizes: dict[str, int]
) -> None:
    """Set the size of micro-batches, or refuse them where no step can be taken.

    Args:
        sizes: By the name of a loader, what fits on a device; it is cut if it can be.
    """
    why_not = _why_no_micro_batches(loaders, trainer)
    for loader in loaders:
        if why_not is None and loader.name in sizes:
            loader.shares = replace(
                loader.shares, max_local_batch_size=sizes[loader.name]
            )
        elif why_not is not None and loader.shares.max_local_batch_size is not None:
            raise ElasticRunError(
                f"`{loader.name}` has max_local_batch_size, but {why_not}"
            )


def _why_no_micro_batches(loaders: list[Any], trainer: Any) -> str | None:
    """Return why a step cannot be taken on micro-batches, with a way out."""
    if not trainer.lightning_module.automatic_optimization:
        return (
            "the module optimizes manually: training_step would step its optimizers "
            "after each micro-batch. Leave it out, and cut the batch in training_step."
        )
    if hasattr(trainer.fit_loop._data_fetcher, "iterator_wrapper"):
        return (
            "training_step takes a dataloader_iter, and asks for batches itself. Leave "
            "it out, or let training_step take a batch."
        )
    if len(loaders) > 1:
        return (
            f"is one of {len(loaders)} loaders that deliver together, whose numbers of "
            "micro-batches may differ. Leave it out; accumulate_grad_batches with "
            "smaller batch sizes saves memory, too."
        )
    return None
