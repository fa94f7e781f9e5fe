"""Which versions and which arguments of a Trainer of transformers are refused."""

from __future__ import annotations

import inspect
from typing import Any

import transformers.trainer
from transformers import Trainer

from elasticrun.errors import ElasticRunError
from elasticrun.job.current import current_job

# What is used of the Trainer and its module beside public names: of a function the
# parameters that it must have, of what is set when it begins to train None. A version
# without one of them is refused.
PRIVATE: dict[str, str | None] = {
    "_finalize_training": "trial num_train_samples start_time",
    "_get_collator_with_removed_columns": "data_collator description",
    "_get_dataloader": "dataset description batch_size sampler_fn is_training",
    "_get_num_items_in_batch": "batch_samples device",
    "_init_training_state": "max_steps num_update_steps_per_epoch num_train_epochs "
    "resume_from_checkpoint trial",
    "_load_rng_state": "checkpoint",
    "_prepare_for_training": "max_steps train_dataloader resume_from_checkpoint",
    "_run_epoch": "epoch train_dataloader steps_in_epoch start_time "
    "resume_from_checkpoint epochs_trained steps_trained_in_current_epoch",
    "_track_num_input_tokens": "inputs",
    "skip_first_batches": "dataloader num_batches",
    "_globalstep_last_logged": None,
    "_initial_global_step": None,
    "_initial_num_input_tokens_seen": None,
    "_total_loss_scalar": None,
    "_tr_loss": None,
}


def check_version() -> None:
    """Refuse a version of transformers that does not do as is relied upon."""
    for name, parameters in PRIVATE.items():
        if parameters is None:
            continue
        function = getattr(Trainer, name, getattr(transformers.trainer, name, None))
        known = () if function is None else inspect.signature(function).parameters
        if missing := [each for each in parameters.split() if each not in known]:
            raise _gone(f"{name}({', '.join(missing)})")


def check_attributes(trainer: Any) -> None:
    """Refuse it where a Trainer that begins to train shows that."""
    for name, parameters in PRIVATE.items():
        if parameters is None and not hasattr(trainer, name):
            raise _gone(name)


def _gone(what: str) -> ElasticRunError:
    return ElasticRunError(
        f"the Trainer of transformers {transformers.__version__} has no {what}, "
        "without which training cannot go on where it was. docs/integrations.md says "
        "which versions are tested; install one of them."
    )


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
                "docs/integrations.md says what works, and what to do instead."
            )
    world_size = current_job().world_size
    if args.world_size != world_size:
        raise ElasticRunError(
            f"the Trainer has {args.world_size} processes, but the job {world_size} "
            "replicas, so it would not train all of a global batch. Start the script "
            "with `elasticrun run` or torchrun; on CPUs make "
            "TrainingArguments(use_cpu=True), without which it takes part in no "
            "process group."
        )
