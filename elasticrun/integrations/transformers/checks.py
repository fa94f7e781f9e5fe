"""Refuses versions and arguments of a transformers Trainer that cannot resume."""

from __future__ import annotations

from typing import Any

import transformers

from elasticrun.errors import ElasticRunError
from elasticrun.integrations.checks import check_internals, check_num_processes

# What is needed here of transformers, and is not public.
INTERNALS = """
    Trainer._finalize_training Trainer._get_collator_with_removed_columns
    Trainer._get_dataloader Trainer._get_num_items_in_batch
    Trainer._init_training_state Trainer._load_rng_state
    Trainer._prepare_for_training Trainer._run_epoch Trainer._track_num_input_tokens
    trainer.skip_first_batches
"""

# The same of a Trainer that begins to train.
INTERNALS_IN_TRAINING = """
    _globalstep_last_logged _initial_global_step _initial_num_input_tokens_seen
    _total_loss_scalar _tr_loss
"""

_TESTED = "transformers 5.23"


def check_version() -> None:
    """Refuse a version of transformers that does not do as is relied upon."""
    name = f"transformers {transformers.__version__}"
    check_internals(name, transformers, INTERNALS, tested=_TESTED)


def check_in_training(trainer: Any) -> None:
    """Refuse it where only a Trainer that begins to train shows that."""
    name = f"the Trainer of transformers {transformers.__version__}"
    check_internals(name, trainer, INTERNALS_IN_TRAINING, tested=_TESTED)


def check(trainer: Any) -> None:
    """Refuse what would not be the same after a restart or at other devices."""
    args, accelerator = trainer.args, trainer.accelerator
    config = args.accelerator_config
    kind = accelerator.distributed_type.value
    refused = {
        f"training by {kind}": kind not in ("NO", "MULTI_CPU", "MULTI_GPU"),
        "several devices in one process": args.n_gpu > 1,
        "a model on several devices": trainer.is_model_parallel,
        "a sharded model": trainer.is_distributed_loading_by_transformers,
        "parallelism_config": args.parallelism_config is not None,
        "auto_find_batch_size": args.auto_find_batch_size,
        "average_tokens_across_devices=False": not args.average_tokens_across_devices,
        "batch_eval_metrics": args.batch_eval_metrics,
        "enable_jit_checkpoint": args.enable_jit_checkpoint,
        "eval_on_start": args.eval_on_start,
        "eval_use_gather_object": args.eval_use_gather_object,
        "ignore_data_skip": args.ignore_data_skip,
        "split_batches": config.split_batches,
        "dispatch_batches": bool(config.dispatch_batches),
    }
    for what, is_asked_for in refused.items():
        if is_asked_for:
            raise ElasticRunError(
                f"an elastic Trainer does not support {what}: after a restart, or at "
                "another number of devices, it would not do what it did before. "
                "docs/migrating/trainer.md says what works, and what to do instead."
            )
    check_num_processes(
        "the Trainer",
        args.world_size,
        "Start the script with `elasticrun run` or torchrun; on CPUs make "
        "TrainingArguments(use_cpu=True), without which it takes part in no process "
        "group.",
    )
