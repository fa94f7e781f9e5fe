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

# What is needed here of Lightning's Trainer, and is not public.
INTERNALS = """
    strategy.process_dataloader strategy.reduce strategy.batch_to_device
    lightning_module._on_before_batch_transfer
    _accelerator_connector.use_distributed_sampler
    _signal_connector.register_signal_handlers
    _checkpoint_connector._loaded_checkpoint _checkpoint_connector.dump_checkpoint
    _checkpoint_connector.resume_start _checkpoint_connector.restore_model
    _logger_connector._callback_metrics _logger_connector._logged_metrics
    _logger_connector._progress_bar_metrics _logger_connector._first_loop_iter
    fit_loop._combined_loader fit_loop._restarting fit_loop.epoch_progress
    fit_loop.setup_data fit_loop.on_advance_end
    fit_loop.epoch_loop._results.update_metrics
    fit_loop.epoch_loop.automatic_optimization._make_closure
    fit_loop.epoch_loop.automatic_optimization._make_step_fn
    fit_loop.epoch_loop.automatic_optimization._make_backward_fn
    fit_loop.epoch_loop.batch_progress fit_loop.epoch_loop.on_advance_end
    fit_loop.epoch_loop.reset fit_loop.epoch_loop.restarting fit_loop._data_fetcher
    fit_loop.epoch_loop._should_check_val_fx fit_loop.epoch_loop.val_loop.setup_data
    fit_loop.epoch_loop.val_loop._results.update_metrics
    validate_loop._results.update_metrics test_loop._results.update_metrics _results
    fit_loop.epoch_loop.val_loop._seen_batches_per_dataloader
"""

# The same of what is not the Trainer's.
INTERNALS_BESIDE = """
    ModelCheckpoint._last_global_step_saved ModelCheckpoint._last_checkpoint_saved
    _ResultMetric._update_count
"""


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
