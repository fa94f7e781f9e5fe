"""Which versions of Lightning, and which arguments of its Trainer, are refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,  # A descendant of DDP's.
    SingleDeviceStrategy,
)
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
)

from elasticrun.errors import ElasticRunError
from elasticrun.integrations.checks import check_internals, check_num_processes

# What is not public of Lightning's Trainer, and what for it is needed here.
INTERNALS = {
    "strategy.process_dataloader": "puts what is iterated in place of a loader",
    "strategy.reduce": "is a mean over devices, of whole numbers, too",
    "strategy.batch_to_device": "moves a micro-batch",
    "lightning_module._on_before_batch_transfer": "prepares one for it",
    "_accelerator_connector.use_distributed_sampler": "would share batches out again",
    "_signal_connector.register_signal_handlers": "would communicate in handlers",
    "_checkpoint_connector._loaded_checkpoint": "is what a fit goes on from",
    "_checkpoint_connector.dump_checkpoint": "is what Lightning keeps",
    "_checkpoint_connector.resume_start": "loads a checkpoint of Lightning's",
    "_checkpoint_connector.restore_model": "loads weights, which the job does itself",
    "_logger_connector._callback_metrics": "is what was logged last, for callbacks",
    "_logger_connector._logged_metrics": "is the same, for loggers",
    "_logger_connector._progress_bar_metrics": "is the same, for the progress bar",
    "_logger_connector._first_loop_iter": "says whether averages begin anew",
    "fit_loop._combined_loader": "has the loaders that deliver together",
    "fit_loop._restarting": "would repeat, or skip, a part of a batch",
    "fit_loop.epoch_progress": "counts epochs",
    "fit_loop.setup_data": "asks for the loaders for training",
    "fit_loop.on_advance_end": "is the end of an epoch",
    "fit_loop.epoch_loop._results.update_metrics": "keeps what is logged in a batch",
    "fit_loop.epoch_loop.automatic_optimization._make_closure": "trains with a batch",
    "fit_loop.epoch_loop.automatic_optimization._make_step_fn": "is a part of it",
    "fit_loop.epoch_loop.automatic_optimization._make_backward_fn": "is another one",
    "fit_loop.epoch_loop.batch_progress": "counts batches",
    "fit_loop.epoch_loop.on_advance_end": "is the end of a batch, and validates",
    "fit_loop.epoch_loop.reset": "is the beginning of an epoch",
    "fit_loop.epoch_loop.restarting": "is the same as that of the loop around it",
    "fit_loop._data_fetcher": "knows which batch is the last one",
    "fit_loop.epoch_loop._should_check_val_fx": "says whether a validation follows",
    "fit_loop.epoch_loop.val_loop.setup_data": "asks for the loaders for validation",
    "fit_loop.epoch_loop.val_loop._results.update_metrics": "is that of a validation",
    "validate_loop._results.update_metrics": "is that of one without training",
    "test_loop._results.update_metrics": "is that of a test",
    "_results": "is the one that is used now",
    "fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader": "counts for loggers",
}

# The same of what is not the Trainer's.
INTERNALS_BESIDE = {
    "ModelCheckpoint._last_global_step_saved": "says which step it has written",
    "ModelCheckpoint._last_checkpoint_saved": "says where to",
    "_ResultMetric._update_count": "says whether there is anything to average",
}


def check_version(trainer: Trainer) -> None:
    """Refuse a version of Lightning that is not known here."""
    version, tested = lightning.__version__, "Lightning 2.1 to 2.6"
    check_internals(
        f"the Trainer of Lightning {version}", trainer, INTERNALS, tested=tested
    )
    beside = SimpleNamespace(
        ModelCheckpoint=ModelCheckpoint(),
        _ResultMetric=_ResultMetric(_Metadata("training_step", "loss"), is_tensor=True),
    )
    check_internals(f"Lightning {version}", beside, INTERNALS_BESIDE, tested=tested)


def check_arguments(trainer: Trainer) -> None:
    """Refuse what a restart would change without a word."""
    for what, why in _refused(trainer).items():
        raise ElasticRunError(f"Elastic does not support {what}: {why}.")
    check_num_processes(
        "the Trainer",
        trainer.world_size,
        "Make it as Trainer(..., **Elastic.devices()).",
    )


def _refused(trainer: Any) -> dict[str, str]:
    """Return what the Trainer is told to do that is not supported, and why not."""
    refused = {}
    strategy, plain = trainer.strategy, (SingleDeviceStrategy, DDPStrategy)
    if not isinstance(strategy, plain) or isinstance(strategy, DeepSpeedStrategy):
        refused[f"the strategy {type(strategy).__name__}"] = (
            "of its states each device has a part, and Lightning puts these together "
            "for its own checkpoints alone. Shard with fully_shard in a loop of your "
            "own, as docs/howto/own-ddp.md says"
        )
    if trainer.overfit_batches:
        refused["overfit_batches"] = (
            "Lightning makes the loaders anew for it. Give fit a loader without a "
            "shuffle over a torch.utils.data.Subset"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        refused["reload_dataloaders_every_n_epochs"] = (
            "a job knows its loaders by the order in which they are made, and makes "
            "fewer of them when it resumes. Keep the loader, and let its data set "
            "return other samples, of the same number"
        )
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        refused["val_check_interval as a time"] = (
            "each device has its own clock, which a restart sets back. Give a number "
            "of batches"
        )
    return refused
