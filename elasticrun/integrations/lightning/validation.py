"""The validation of a fit: where it goes on, and whether a stop may come in it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Trainer

from elasticrun.integrations.lightning.evaluation import Evaluations
from elasticrun.integrations.lightning.fields import Fields, KeptFields
from elasticrun.integrations.lightning.loaders import StandIn
from elasticrun.integrations.lightning.state import FitState, restore_sums
from elasticrun.integrations.lightning.values import (
    Metrics,
    copy_metrics,
    restore_metrics,
)
from elasticrun.job.current import current_job
from elasticrun.job.foreign import ForeignLoop
from elasticrun.replicas.gathering import gather

logger = logging.getLogger(__name__)

_CHANGED_IN_STEPS = (
    "`%s` has changed in the validation or the batch before it, or cannot be compared, "
    "and is in no checkpoint, so saves and stops wait for the end of the validation. "
    "Keep it by self.log or in a metric of torchmetrics; or if it need not be kept, "
    "say so: Elastic(saves_in_validation=True)."
)
_CHANGED_IN_HOOKS = (
    "`%s` is changed by the hooks that begin a validation. They would do so once more "
    "where it goes on after a restart, so saves and stops wait for its end."
)


class Validation:
    """The validations of a fit, in the middle of which the job saves and stops.

    Before a save or a stop in one, `must_end` compares what would be lost with what
    there was: before the last batch of training, before the hooks that begin the
    validation, and after these.

    Args:
        trainer: That fits.
        loop: Of its training, whose boundaries those between two batches are, too.
        state: Keeps where a validation was left.
        evaluations: Read its batches.
        saves: Whether to save in it; with None, where nothing would be lost.
    """

    def __init__(
        self,
        trainer: Trainer,
        loop: ForeignLoop,
        *,
        state: FitState,
        evaluations: Evaluations,
        saves: bool | None,
    ) -> None:
        self._trainer: Any = trainer
        self._loop = loop
        self._state = state
        self._evaluations = evaluations
        self._saves = saves
        self._start = (0, 0)  # Loader and batch with which the next one begins.
        self._resumes = False  # Its first batch after a restart is to come.
        self._before_batch: Fields | None = None
        self._before_hooks: KeptFields | None = None
        self._after_hooks: Fields | None = None
        self._change_in_batch: str | None = None
        self._change_in_hooks: str | None = None
        self._metrics: Metrics = []  # Of one that goes on.
        self._is_begun = True  # Its hooks were called.
        self._must_end = False
        self._has_said_why = False
        self._val_loop: Any = trainer.fit_loop.epoch_loop.val_loop

    def look_before_batch(self) -> None:
        """Note what there is before a batch of training, if a validation follows it."""
        loop = self._trainer.fit_loop
        if self._saves is None and loop.epoch_loop._should_check_val_fx(
            loop._data_fetcher
        ):
            module = self._trainer.lightning_module
            self._before_batch = Fields(self._trainer, module)

    def resume_at(self, place: tuple[int, int]) -> None:
        """Go on in one of its loaders, behind a number of batches."""
        self._start = place
        self._resumes = True
        self._val_loop._restarting = True  # It counts on.

    def begin(self) -> None:
        """Begin one; the hooks at its beginning are to be called."""
        module = self._trainer.lightning_module
        self._change_in_batch = self._change_in_hooks = None
        if self._before_batch is not None:  # None where a validation goes on.
            self._change_in_batch = self._before_batch.find_change()
            self._before_batch = None
        self._must_end = self._is_begun = False
        if self._saves is None and not self._trainer.sanity_checking:
            self._before_hooks = KeptFields(self._trainer, module)
        if self._resumes:
            self._metrics = copy_metrics(module)

    def begin_batch(self) -> None:
        """Let averages go on; Lightning would begin them anew in its first batch."""
        if self._resumes:
            self._resumes = False
            self._trainer._logger_connector._first_loop_iter = False

    def end(self) -> None:
        """Forget what there was after its hooks."""
        self._after_hooks = None

    def must_end(self) -> bool:
        """Say whether something would be lost by leaving it here. Collective."""
        if self._saves:
            return False
        assert self._after_hooks is not None
        changed = self._change_in_batch or self._after_hooks.find_change()
        told = gather((self._change_in_hooks, changed))
        in_hooks = [each for each, _ in told if each]
        in_steps = [each for _, each in told if each]
        if not in_hooks and not in_steps:
            return False
        self._must_end = True
        if not self._has_said_why and current_job().rank == 0:
            logger.warning(
                _CHANGED_IN_HOOKS if in_hooks else _CHANGED_IN_STEPS,
                (in_hooks or in_steps)[0],
            )
        self._has_said_why = True
        return True

    def read(self, batches: StandIn) -> Iterator[Any]:
        """Yield the batches of one of its loaders, from where it is to go on."""
        self._begin_batches()
        combined = self._val_loop._combined_loader
        members = combined.flattened
        number = members.index(batches)
        loader, first = self._start
        if number < loader:
            return  # It was finished before the restart.
        self._start = (0, 0)
        if first:
            self._resume(loader, first)
        end = int(min(len(batches), combined.limits[number]))
        may_save = self._saves is not False and not self._trainer.sanity_checking
        is_in_turn = len(members) == 1 or combined._mode == "sequential"
        # A replica may have no sample of the last batch, so it has another one after
        # each boundary: without any, it would not take part in the averages.
        last = end - 2 if may_save and is_in_turn else 0
        finished = first
        for batch, index in self._evaluations.read_from(first, batches, end=end):
            finished = self._pass_boundaries((number, finished), min(index, last))
            if index >= end:
                return
            yield batch
        self._pass_boundaries((number, finished), last)

    def _begin_batches(self) -> None:
        """Undo what those hooks did once more, and note what there is after them."""
        if self._is_begun:
            return
        self._is_begun = True
        if self._resumes:
            assert self._state.loaded is not None
            restore_metrics(self._metrics)
            sums = self._state.loaded["validation_sums"]
            restore_sums(self._val_loop._results, sums, self._trainer)
        if self._before_hooks is not None:
            self._change_in_hooks = self._before_hooks.find_change()
            self._before_hooks = None
            module = self._trainer.lightning_module
            self._after_hooks = Fields(self._trainer, module)

    def _resume(self, loader: int, first: int) -> None:
        """Be in a loader; those before it were finished."""
        val_loop = self._val_loop
        val_loop._combined_loader._iterator._idx = first  # The number that hooks get.
        for finished in range(loader):
            val_loop._results.dataloader_idx = finished
            if finished < loader - 1:  # Lightning ends the last one when it comes here.
                val_loop._store_dataloader_outputs()

    def _pass_boundaries(self, place: tuple[int, int], number: int) -> int:
        """Pass the boundaries up to that before a batch; return how many are finished.

        There are several where other replicas alone had samples of a batch.
        """
        loader, finished = place
        while finished < number and not self._must_end:
            finished += 1
            self._state.validated = (loader, finished)
            self._loop.pass_boundary(0)
            self._state.validated = None
        return finished
