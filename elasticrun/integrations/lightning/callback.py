"""`Elastic`, the callback that makes a Trainer's fit resume."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.errors import ElasticRunError, JobStopped, StateNameError
from elasticrun.integrations.lightning.checks import check_arguments, check_version
from elasticrun.integrations.lightning.loaders import (
    LoaderProxy,
    check_equal_shares,
    make_elastic,
)
from elasticrun.integrations.lightning.state import (
    FitState,
    averaging,
    restore_logs,
    restore_sums,
)
from elasticrun.integrations.lightning.steps import (
    Evaluations,
    MicroBatchSteps,
    StepValues,
    set_micro_batches,
)
from elasticrun.job.current import current_job
from elasticrun.job.foreign import ForeignLoop
from elasticrun.job.states import register
from elasticrun.replicas.gathering import gather


class Elastic(Callback):
    """Gives a Trainer's `fit` a place in the job, and keeps what it knows.

        train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
        valid = AdaptiveDataLoader(valid_set, batch_size=256, even_batches=False)
        trainer = Trainer(max_epochs=10, callbacks=[Elastic()], **Elastic.devices())
        trainer.fit(model, train, valid)

    The job saves and stops between two batches of training, before a validation and
    after it, and not while gradients are accumulated. A stop that is asked for in a
    validation waits for its end. The module, its optimizers and schedulers, the
    progress of all loops, callbacks, the averages over the epoch that `self.log` has
    begun, and what a `CSVLogger` has written are in each checkpoint. Losses are weighed
    by the replica's share in the global batch. A loader with `max_local_batch_size` is
    trained in micro-batches, by one step a global batch.

    Collective: `fit` is called on every replica, once in a job.
    Replay: `fit` goes on where the job was; give it no `ckpt_path`.

    Args:
        batch_size: What that of a `DataLoader` means, so that `fit` takes such ones,
            too: "global", samples of all devices together; or "per_device", samples
            of one of as many devices as are given. On fewer devices, the part of each
            is then cut into micro-batches of that size. Of an `AdaptiveDataLoader` it
            is always global.
        devices: How many there were when that size was chosen.

    Raises:
        ElasticRunError: The Trainer is told to do what is not supported.
        TypeError: `fit` gets a loader that cannot go on in the middle.
        ValueError: `batch_size` has a value that it cannot have; or `devices` is
            missing, or without a meaning.
    """

    def __init__(
        self,
        batch_size: Literal["global", "per_device"] | None = None,
        *,
        devices: int | None = None,
    ) -> None:
        if batch_size not in (None, "global", "per_device"):
            raise ValueError(
                f'batch_size={batch_size!r} must be "global" or "per_device".'
            )
        if (devices is not None) != (batch_size == "per_device"):
            raise ValueError(
                f"batch_size={batch_size!r} with devices={devices}: devices says of "
                'how many "per_device" is one, so these go together. A job trains with '
                "the same global batch at any number of devices."
            )
        self._num_nominal = {None: 0, "global": 1}.get(batch_size, devices)
        self._trainer: Any = None
        self._resumes = False
        self._is_waiting = False  # Gradients, for a step.
        self._has_finished = False
        self._start = (0, 0)  # Epoch, and its first batch in this process.
        self._seconds_of_validation = math.inf  # Nobody knows before the first one.
        self._num_loaders = 0
        self._sizes: dict[str, int] = {}  # Of one device, by the name of the loader.

    @staticmethod
    def devices() -> dict[str, Any]:
        """Return the Trainer's arguments that follow from the job."""
        job = current_job()
        accelerator = "cpu" if job.device.type == "cpu" else "gpu"
        return {"accelerator": accelerator, "devices": job.world_size}

    # Before anything of the fit is restored.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the loaders, and load what the job has."""
        if self._trainer is not trainer:
            check_version(trainer)
            self._take_over(trainer)
        if stage != "fit":
            return
        check_arguments(trainer)
        self._loop = ForeignLoop("Trainer.fit")
        current_job().boundary.defer_while(lambda: self._is_waiting)
        try:
            self._state = FitState(trainer)
        except StateNameError as error:
            raise ElasticRunError(
                "fit() was called a second time, but a job has one place, in one fit. "
                "Train until a larger max_epochs, or in another job with a checkpoint "
                "directory of its own."
            ) from error
        loaded = self._state.loaded
        if loaded is not None:
            self._resumes = True
            self._state.restore_saved_last()
            trainer.num_sanity_val_steps = 0  # It was checked before the restart.
            connector = trainer._checkpoint_connector
            connector._loaded_checkpoint = dict(loaded["checkpoint"])
            trainer.should_stop = loaded["should_stop"]
            restore_logs(
                trainer.loggers, loaded["logs"], is_writer=trainer.is_global_zero
            )

    def _take_over(self, trainer: Any) -> None:
        """Replace some of Lightning's methods."""
        self._trainer = trainer
        trainer._accelerator_connector.use_distributed_sampler = False
        strategy, fit_loop = trainer.strategy, trainer.fit_loop
        strategy.process_dataloader = self._stand_in
        strategy.reduce = _exact(strategy.reduce)
        trainer._signal_connector.register_signal_handlers = _do_nothing
        connector = trainer._checkpoint_connector
        connector.resume_start = partial(self._resume_start, connector.resume_start)
        connector.restore_model = partial(self._restore_model, connector.restore_model)
        epoch_loop = fit_loop.epoch_loop
        self._steps = MicroBatchSteps(trainer, StepValues(trainer, epoch_loop._results))
        self._evaluations = Evaluations(trainer)
        automatic = epoch_loop.automatic_optimization
        automatic._make_closure = partial(
            self._steps.make_closure, automatic._make_closure
        )
        epoch_loop.reset = partial(self._begin_epoch, epoch_loop.reset)
        epoch_loop.on_advance_end = partial(self._end_batch, epoch_loop.on_advance_end)
        fit_loop.on_advance_end = partial(self._end_epoch, fit_loop.on_advance_end)

    def _resume_start(
        self, start: Any, path: Any = None, *options: Any, **named: Any
    ) -> None:
        """Load a checkpoint of Lightning's, but never for a fit."""
        if path is not None and self._trainer.state.fn == TrainerFn.FITTING:
            raise ElasticRunError(
                f"fit() was given ckpt_path={path!r}, but the job itself knows where "
                "it goes on. Leave it out; to begin with trained weights, load them "
                "into the module."
            )
        start(path, *options, **named)

    def _restore_model(self, restore: Any) -> None:
        """Leave the weights of a fit to the job; a test may have those of a file."""
        if self._trainer.state.fn != TrainerFn.FITTING:
            restore()
        elif self._resumes:
            self._state.stand_in_for_weights(self._trainer.lightning_module)

    def _stand_in(self, loader: Any) -> Any:
        """Return what Lightning iterates in place of a loader."""
        trainer = self._trainer
        is_fitting = trainer.state.fn == TrainerFn.FITTING
        is_for_training = is_fitting and trainer.training
        if is_fitting and type(loader) is DataLoader and self._num_nominal:
            size = (loader.batch_size or 0) * self._num_nominal
            name = f"Trainer.fit-{self._num_loaders}"
            self._num_loaders += 1
            if self._num_nominal > 1 and is_for_training:
                self._sizes[name] = loader.batch_size or 0
            loader = make_elastic(
                loader, size, name=name, is_for_training=is_for_training
            )
        if not isinstance(loader, AdaptiveDataLoader):
            if not is_fitting:
                return loader
            raise TypeError(
                f"fit() got a {type(loader).__name__}, whose batches depend on the "
                "number of devices and whose place is lost at a restart. Make it an "
                "AdaptiveDataLoader(data, batch_size) with the batch size of all "
                "devices together; or, if it is torch's DataLoader, say what its "
                'batch_size means: Elastic(batch_size="global"), or '
                'Elastic(batch_size="per_device", devices=...).'
            )
        if loader.shares.max_local_batch_size is not None and not is_for_training:
            raise ElasticRunError(
                f"`{loader.name}` has max_local_batch_size, but evaluates, where there "
                "are no steps: each micro-batch would be a batch with hooks and a "
                "number of its own. Give it a smaller batch_size instead."
            )
        if is_for_training:
            return LoaderProxy(loader, self._read)
        return LoaderProxy(loader, self._evaluations.read)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Register the module, which is complete and in its precision only now.

        All loaders are asked for here, which is in one order, and outside of epochs.
        Lightning would ask for those of a validation where that begins.
        """
        register(module=pl_module)
        fit_loop = trainer.fit_loop
        fit_loop.setup_data()
        if fit_loop._combined_loader is not None:
            members = fit_loop._combined_loader.flattened
            set_micro_batches([each.loader for each in members], trainer, self._sizes)
        val_loop = fit_loop.epoch_loop.val_loop
        if trainer.enable_validation:
            trainer.validating = True
            val_loop.setup_data()
            trainer.training = True
        if self._resumes:
            assert self._state.loaded is not None
            val_loop._seen_batches_per_dataloader.update(self._state.loaded["seen"])
            weights = {"state_dict": pl_module.state_dict()}
            checkpoint = trainer._checkpoint_connector._loaded_checkpoint
            pl_module.on_load_checkpoint({**checkpoint, **weights})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back what was logged last."""
        if self._resumes:
            self._state.restore_metrics()

    # In the loop.

    def _begin_epoch(self, reset: Any) -> None:
        """Enter an epoch where the job stands; Lightning's loop is about to begin."""
        trainer, fit_loop = self._trainer, self._trainer.fit_loop
        epoch_loop = fit_loop.epoch_loop
        loaded = self._state.loaded if self._resumes else None
        if loaded is not None:  # Between batches: nothing is to be repeated or skipped.
            fit_loop._restarting = False
            epoch_loop.restarting = False  # And that of the loops in it.
        if loaded is not None and loaded["is_in_epoch"]:
            self._resume_epoch(trainer, loaded)
        else:
            reset()
        self._resumes = False

        # The loaders begin where that epoch stands.
        members = fit_loop._combined_loader.flattened
        check_equal_shares([each.loader for each in members], current_job().world_size)
        for each in members:
            each.num_passes = 0
        trained = epoch_loop.batch_progress.current.completed
        epoch, _ = self._loop.begin(
            int(trainer.num_training_batches),
            epoch=fit_loop.epoch_progress.current.processed,
            step=trained - 1 if self._state.is_before_validation else trained,
        )
        self._start = epoch, trained
        self._state.is_in_epoch = True
        if self._state.is_before_validation:  # It is all that is left of the batch.
            epoch_loop.on_advance_end(fit_loop._data_fetcher)

    def _resume_epoch(self, trainer: Any, loaded: dict[str, Any]) -> None:
        """Put back what Lightning would begin anew in an epoch that goes on."""
        self._state.is_before_validation = loaded["validated"] is not None
        fit_loop = trainer.fit_loop
        # Older versions count an epoch that goes on once more.
        progress = loaded["checkpoint"]["loops"]["fit_loop"]["epoch_progress"]
        fit_loop.epoch_progress.load_state_dict(progress)
        restore_sums(fit_loop.epoch_loop._results, loaded["sums"], trainer)
        # Averages begin anew in the first batch of all, by Lightning's count.
        trainer._logger_connector._first_loop_iter = False
        _show_progress(trainer, fit_loop.epoch_loop.batch_progress.current.completed)

    def _read(self, batches: LoaderProxy) -> Iterator[Any]:
        """Yield batches of this epoch; from its beginning, in a second pass."""
        epoch, first = self._start
        number = batches.num_passes
        if number:
            first = 0
        elif self._trainer.fit_loop._combined_loader._mode == "max_size_cycle":
            number, first = divmod(first, len(batches))
        batches.num_passes = number + 1
        parts = []
        for batch, share in batches.loader.read(
            epoch, min(first, len(batches)), number=number
        ):
            parts.append((batch, share))
            if share.part.is_step:
                self._steps.begin_batch(self._loop, parts)
                yield parts[0][0]
                parts = []

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Count the samples of all micro-batches; Lightning has the first one."""
        self._steps.log_for_all_parts()

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Let metrics forget padding."""
        self._steps.end_part()

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Weigh the loss by this replica's share in the global batch."""
        self._is_waiting = True
        weight = self._loop.loss_weight
        if weight != 1.0 and loss.requires_grad:
            hook: Any = loss.register_hook
            hook(lambda gradient: gradient * weight)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Note that no gradients wait any more."""
        self._is_waiting = False

    def _end_batch(self, end: Any, data_fetcher: Any) -> None:
        """Pass a boundary before a validation, and one after all of the batch."""
        epoch_loop = self._trainer.fit_loop.epoch_loop
        is_validated = epoch_loop._should_check_val_fx(data_fetcher)
        if is_validated and not self._state.is_before_validation:
            self._pass_boundary_before_validation()
        self._state.is_before_validation = False  # Also where the job resumed at one.
        begun = time.monotonic()
        end(data_fetcher)
        if is_validated:
            self._seconds_of_validation = time.monotonic() - begun
        if not epoch_loop.done:
            self._loop.pass_boundary()

    def _pass_boundary_before_validation(self) -> None:
        """Save, if a stop may come that cannot wait for the end of the validation.

        It repeats the validation then, but not the training before it. How long this
        one takes is judged by the last one; half of the grace is for the stop's save.
        """
        job = current_job()
        is_long = self._seconds_of_validation > job.settings.grace / 2
        if any(gather(is_long)):
            job.boundary.save_at_next()
        self._state.is_before_validation = True
        self._loop.pass_boundary(0)

    def _end_epoch(self, end: Any) -> None:
        """Finish the epoch, with all hooks and schedulers."""
        end()
        self._state.is_in_epoch = False
        self._loop.end()

    def on_validation_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Let metrics forget padding."""
        self._evaluations.end_batch()

    def on_test_batch_end(self, trainer: Trainer, *args: Any) -> None:
        """Let metrics forget padding."""
        self._evaluations.end_batch()

    # After it.

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write a checkpoint at the end of the last epoch."""
        self._loop.finish()
        self._has_finished = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Walk past a fit that was finished before the restart."""
        if not self._has_finished:
            self._state.restore_metrics()
            for each in averaging(trainer):
                each.on_train_end(trainer, pl_module)
            self._loop.finish()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the epoch unfinished."""
        if hasattr(self, "_loop") and not isinstance(exception, JobStopped):
            self._loop.leave()


def patch(trainer: Trainer, **options: Any) -> Trainer:
    """Make a Trainer elastic that exists already, and return it.

        trainer = patch(Trainer(max_epochs=10, devices=4), batch_size="global")

    Collective: `fit` is called on every replica, once in a job.

    Args:
        trainer: With as many devices as the job has replicas.
        options: Those of `Elastic`.

    Raises:
        ElasticRunError: The Trainer has an `Elastic` already.
    """
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    if any(isinstance(each, Elastic) for each in callbacks):
        raise ElasticRunError(
            "the Trainer has an Elastic among its callbacks already. One is enough."
        )
    callbacks.insert(0, Elastic(**options))
    return trainer


def _exact(reduce: Any) -> Any:
    """Return a mean over devices of whole numbers, too: Lightning's rounds them down.

    It is a plain function, since metrics keep it and are copied deeply.
    """

    def reduce_exactly(tensor: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(tensor, torch.Tensor) and not tensor.is_floating_point():
            tensor = tensor.to(torch.get_default_dtype())
        return reduce(tensor, *arguments, **options)

    return reduce_exactly


def _do_nothing() -> None:
    """Leave signals to the job."""


def _show_progress(trainer: Trainer, num_batches: int) -> None:
    """Show the progress of an epoch that goes on; Lightning would show none."""
    bar: Any = trainer.progress_bar_callback
    if bar is not None:
        bar.on_train_epoch_start(trainer, trainer.lightning_module)
    if isinstance(bar, TQDMProgressBar):
        shown = bar.train_progress_bar
        shown.initial = shown.n = num_batches
        shown.refresh()
