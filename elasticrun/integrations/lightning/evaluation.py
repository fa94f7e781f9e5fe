"""Batches of a Trainer's evaluations, and what is logged in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from elasticrun.integrations.lightning.loaders import StandIn
from elasticrun.integrations.lightning.values import StepValues
from elasticrun.job.current import current_job


class Evaluations:
    """Reads for a Trainer's validations and tests, whose averages leave out padding.

    Args:
        trainer: Whose loops these are.
        reduce: Of a tensor over all devices.
    """

    def __init__(self, trainer: Trainer, reduce: Any) -> None:
        self._trainer: Any = trainer
        of_trainer = self._trainer
        val_loop = of_trainer.fit_loop.epoch_loop.val_loop
        self._values = {
            id(loop._results): StepValues(trainer, loop._results, reduce)
            for loop in (val_loop, of_trainer.validate_loop, of_trainer.test_loop)
        }

    def read(self, batches: StandIn) -> Iterator[Any]:
        """Yield all batches."""
        values = self._of_now()
        loader = batches.loader
        is_even = loader.even_batches or not len(batches)
        if not is_even:
            last = len(batches) - 1
            is_even = loader._pass().size(last) >= current_job().world_size
        for batch, (_, _, part) in loader.read(0):
            if values is not None:
                values.is_even = is_even
                values.begin_batch(part.num_valid)
            yield batch

    def end_batch(self) -> None:
        """Let metrics forget padding."""
        values = self._of_now()
        if values is not None:
            values.end_part()

    def _of_now(self) -> StepValues | None:
        return self._values.get(id(self._trainer._results))  # None to predict.
