"""Lightning: a Trainer whose fit goes on where it was, at any number of devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn

from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.data.loader import AdaptiveDataLoader
from elasticrun.errors import ElasticRunError, JobStopped
from elasticrun.job.current import current_job
from elasticrun.job.foreign import ForeignLoop
from elasticrun.job.states import State, register
from elasticrun.replicas.gathering import gather

# What a checkpoint of Lightning's has besides what is needed to go on.
_NOT_KEPT = ("state_dict", "hyper_parameters", "hparams_name", "hparams_type")
_METRICS = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


class Elastic(Callback):
    """Gives a Trainer's `fit` a place in the job, and keeps what it knows.

        train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
        valid = AdaptiveDataLoader(valid_set, batch_size=256, even_batches=False)
        trainer = Trainer(max_epochs=10, callbacks=[Elastic()], **Elastic.devices())
        trainer.fit(model, train, valid)

    The job saves and stops between two batches of training, after the validation that
    belongs to the first, and not while gradients are accumulated. The module, its
    optimizers and schedulers, the progress of all loops, callbacks, and the averages
    over the epoch that `self.log` has begun are in each checkpoint. Losses are weighed
    by the replica's share in the global batch.

    Collective: `fit` is called on every replica, once in a job.
    Replay: `fit` goes on where the job was; give it no `ckpt_path`.

    Raises:
        ElasticRunError: The Trainer is told to do what is not supported.
        TypeError: `fit` gets a loader that is no `AdaptiveDataLoader`.
    """

    def __init__(self) -> None:
        self._loop: ForeignLoop | None = None
        self._is_in_epoch = False
        self._has_finished = False
        self._num_waiting = 0

    @staticmethod
    def devices() -> dict[str, Any]:
        """Return the Trainer's arguments that follow from the job."""
        job = current_job()
        return {
            "accelerator": "cpu" if job.device.type == "cpu" else "gpu",
            "devices": job.world_size,
            "strategy": "ddp" if job.world_size > 1 else "auto",
            "use_distributed_sampler": False,  # A loader of ours shares batches out.
            "num_sanity_val_steps": 0,  # They would come again at each restart.
        }

    # Before anything of the fit is restored.

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Take over the loaders, and load what the job has."""
        if stage != "fit":
            return
        _check(trainer, pl_module)
        self._trainer = trainer
        self._loop = ForeignLoop("Trainer.fit")
        strategy: Any = trainer.strategy
        strategy.process_dataloader = self._stand_in
        signals: Any = trainer._signal_connector
        signals.register_signal_handlers = _leave_signals
        epoch_loop: Any = trainer.fit_loop.epoch_loop
        self._reset_of_lightning = epoch_loop.reset
        epoch_loop.reset = self._reset_epoch
        register(module=pl_module)
        self._state = _FitState(trainer)
        loaded = self._state.loaded
        if loaded is not None:
            weights = {"state_dict": pl_module.state_dict()}  # They are loaded already.
            trainer._checkpoint_connector._loaded_checkpoint = {
                **loaded["checkpoint"],
                **weights,
            }
            trainer.should_stop = loaded["should_stop"]

    def _stand_in(self, loader: Any) -> Any:
        """Return what Lightning iterates in place of a loader."""
        is_fitting = self._trainer.state.fn == TrainerFn.FITTING
        if not isinstance(loader, AdaptiveDataLoader):
            if not is_fitting:
                return loader
            raise TypeError(
                f"fit() got a {type(loader).__name__}, whose batches depend on the "
                "number of devices and whose place is lost at a restart. Make it an "
                "AdaptiveDataLoader(data, batch_size) with the batch size of all "
                "devices together."
            )
        is_for_training = is_fitting and self._trainer.training
        return _Batches(loader, self if is_for_training else None)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put back the averages over the epoch, and what was logged last."""
        loaded, epoch_loop = self._state.loaded, trainer.fit_loop.epoch_loop
        sums = {} if loaded is None else loaded["sums"]
        _keep_means_exact(epoch_loop._results, sums if current_job().rank == 0 else {})
        _keep_means_exact(epoch_loop.val_loop._results, {})
        if loaded is not None:
            for name in _METRICS:
                getattr(trainer._logger_connector, name).update(loaded[name])

    def _reset_epoch(self) -> None:
        """Reset the loop of an epoch; ours are never left within a batch.

        Lightning would skip a validation, and the schedulers on a plateau.
        """
        epoch_loop: Any = self._trainer.fit_loop.epoch_loop
        was_restarting = epoch_loop.restarting
        self._reset_of_lightning()
        if was_restarting:
            epoch_loop.restarting = False  # And the loops within.
            self._trainer.fit_loop._restarting = False

    # In the loop.

    def batches(self, loader: AdaptiveDataLoader[Any]) -> Iterator[Any]:
        """Yield an epoch's batches; what is behind a `yield` comes after the batch.

        That is after its step, logs, validation and callbacks, as Lightning asks for
        the next one only then.
        """
        loop = self._loop
        fit_loop: Any = self._trainer.fit_loop
        assert loop is not None
        if self._is_in_epoch:  # Of the one before, all hooks have run.
            loop.end()
        self._num_waiting = 0
        epoch, step = loop.begin(
            int(self._trainer.num_training_batches),
            epoch=fit_loop.epoch_progress.current.processed,
            step=fit_loop.epoch_loop.batch_progress.current.completed,
        )
        self._is_in_epoch = True
        for batch, share in loader.read(epoch, step):
            loop.take(share)
            if not loop.is_step:
                raise ElasticRunError(
                    f"`{loader.name}` has max_local_batch_size, whose micro-batches "
                    "would be steps of Lightning's. Leave it out; "
                    "accumulate_grad_batches with a smaller batch_size saves memory, "
                    "too."
                )
            yield batch
            self._num_waiting += 1
            if (fit_loop.batch_idx + 1) % self._trainer.accumulate_grad_batches == 0:
                num_steps, self._num_waiting = self._num_waiting, 0
                loop.pass_boundary(num_steps)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor
    ) -> None:
        """Weigh the loss by this replica's share in the global batch."""
        weight = 1.0 if self._loop is None else self._loop.loss_weight
        if weight != 1.0 and loss.requires_grad:
            hook: Any = loss.register_hook
            hook(lambda gradient: gradient * weight)

    # After it.

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finish the last epoch; a checkpoint is written."""
        assert self._loop is not None
        if self._is_in_epoch:
            self._is_in_epoch = False
            self._loop.end()
        self._loop.finish()
        self._has_finished = True

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Walk past a fit that was finished before the restart."""
        if not self._has_finished and self._loop is not None:
            self._loop.finish()

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Leave the epoch unfinished."""
        if self._loop is not None and not isinstance(exception, JobStopped):
            self._is_in_epoch = False
            self._loop.leave()


class _Batches:
    """Stands for a loader where Lightning iterates it.

    Args:
        elastic: Of the loader for training; the place of others does not matter.
    """

    def __init__(
        self, loader: AdaptiveDataLoader[Any], elastic: Elastic | None
    ) -> None:
        self._loader = loader
        self._elastic = elastic
        self.dataset = loader.dataset

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # Lazily: Lightning asks for an iterator before it has restored its counters.
        if self._elastic is not None:
            return self._elastic.batches(self._loader)
        return (batch for batch, _ in self._loader.read(0))


class _FitState(State):
    """What Lightning saves itself, but for the weights, and what it leaves out."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__("lightning")
        self._trainer = trainer
        self._captured: dict[str, Any] = {}
        self.loaded: dict[str, Any] | None = None

    def sync(self) -> None:
        trainer, connector = self._trainer, self._trainer._logger_connector
        checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        self._captured = {
            "checkpoint": {
                key: value
                for key, value in checkpoint.items()
                if key.removeprefix("datamodule_") not in _NOT_KEPT
            },
            "sums": _sums_of_all(trainer.fit_loop.epoch_loop._results),
            "should_stop": trainer.should_stop,
            **{name: dict(getattr(connector, name)) for name in _METRICS},
        }

    def save(self, fileobj: BinaryIO) -> None:
        save_values(self._captured, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        self.loaded = load_values(fileobj)


def _sums_of_all(results: Any) -> dict[str, list[float]]:
    """Return what the averages over the epoch have come to on all replicas. Collective.

    Returns:
        By its key, the value and, of a mean, the number of samples.
    """
    own = {
        key: [
            metric.meta.reduce_fx.__name__,
            float(metric.value),
            float(metric.cumulated_batch_size) if metric.meta.is_mean_reduction else 0,
        ]
        for key, metric in results.items()
        if metric.is_tensor and metric.meta.on_epoch and not metric.has_reset
    }
    merged: dict[str, list[float]] = {}
    for of_replica in gather(own):
        for key, (reduction, value, number) in of_replica.items():
            if key in merged:
                merge = {"max": max, "min": min}.get(reduction, float.__add__)
                known, before = merged[key]
                value, number = merge(known, value), before + number
            merged[key] = [value, number]
    return merged


def _keep_means_exact(results: Any, sums: dict[str, list[float]]) -> None:
    """Let means over replicas have their samples counted, and go on from `sums`.

    Lightning averages the numbers of samples as integers, and rounds them down.
    """
    update_of_lightning = results.update_metrics

    def update_metrics(key: str, value: Any, batch_size: int) -> None:
        metric = results[key]
        if metric.is_tensor:
            dtype = metric.value.dtype
            if metric.meta.is_mean_reduction:
                metric.cumulated_batch_size = metric.cumulated_batch_size.to(dtype)
                zero = metric._defaults["cumulated_batch_size"]
                metric._defaults["cumulated_batch_size"] = zero.to(dtype)
            if key in sums:
                before, number = sums.pop(key)
                metric.value = torch.full_like(metric.value, before)
                if metric.meta.is_mean_reduction:
                    metric.cumulated_batch_size.fill_(number)
        update_of_lightning(key, value, batch_size)

    results.update_metrics = update_metrics


def _leave_signals() -> None:
    """Leave signals to the job; Lightning's handlers would communicate in them."""


def _check(trainer: Trainer, pl_module: LightningModule) -> None:
    """Refuse what a restart would change without a word."""
    world_size = current_job().world_size
    given: Any = trainer
    refused = {
        "a strategy other than DDP": not isinstance(
            trainer.strategy, (SingleDeviceStrategy, DDPStrategy)
        ),
        "manual optimization": not pl_module.automatic_optimization,
        "max_steps": trainer.max_steps != -1,
        "overfit_batches": bool(given.overfit_batches),
        "reload_dataloaders_every_n_epochs": bool(
            given.reload_dataloaders_every_n_epochs
        ),
        "check_val_every_n_epoch=None": trainer.check_val_every_n_epoch is None,
        "num_sanity_val_steps other than 0": bool(trainer.num_sanity_val_steps),
        "ckpt_path": trainer.ckpt_path is not None,
    }
    for what, is_asked_for in refused.items():
        if is_asked_for:
            raise ElasticRunError(
                f"Elastic does not support {what}: after a restart the Trainer would "
                "not go on as it would have. docs/integrations.md says what works; "
                "Trainer(**Elastic.devices()) sets what follows from the job."
            )
    if trainer.world_size != world_size:
        raise ElasticRunError(
            f"the Trainer has {trainer.world_size} devices, but the job {world_size} "
            "replicas. Make it as Trainer(..., **Elastic.devices())."
        )
