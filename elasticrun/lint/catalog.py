"""Names outside the project that tell what calls, attributes and variables are about.

What calls do by their names stands in walk/table.py.
"""

from __future__ import annotations

from elasticrun.lint.naming import named

# Methods of any object.

LOG_METHODS = named("""
    info debug warning error critical exception log add_scalar add_scalars add_histogram
    add_image add_text add_figure add_graph log_metric log_metrics set_postfix
    set_postfix_str set_description print add_images report_scalar log_dict log_scalar
    add_hparams add_embedding add_video add_pr_curve add_histograms write_scalars
""")
TRACKER_METHODS = named("""
    log add_scalar add_scalars add_histogram add_image add_text log_metric log_metrics
    log_artifact
""")
FILE_WRITES = named("write writelines writerow writerows writeheader")
GROWING = named("append extend insert appendleft extendleft")
CHANGING = GROWING | named("add update setdefault pop popleft")

# Trackers: the arguments by which a run goes on.

TRACKER_KEYS = {
    "wandb.init": ("id", "resume"),
    "mlflow.start_run": ("run_id",),
    "neptune.init_run": ("with_id", "custom_run_id"),
    "neptune.init": ("run", "with_id"),
    "comet_ml.Experiment": ("experiment_key",),
    "comet_ml.start": ("experiment_key",),
    "clearml.Task.init": ("continue_last_task", "reuse_last_task_id"),
    "aim.Run": ("run_hash",),
    "swanlab.init": ("id", "resume"),
    "trackio.init": ("resume",),
}

# What attributes and variables of the environment depend on.

ENVIRONMENT = "os.environ"
TAINTS_OF_VARIABLES = {
    **dict.fromkeys(named("RANK LOCAL_RANK SLURM_PROCID GROUP_RANK"), "rank"),
    **dict.fromkeys(named("WORLD_SIZE LOCAL_WORLD_SIZE SLURM_NTASKS"), "world_size"),
}
TAINTS_OF_ATTRIBUTES = {
    **dict.fromkeys(
        named("""
            rank local_rank global_rank is_main_process process_index
            is_local_main_process is_world_master is_master replica_rank
        """),
        "rank",
    ),
    **dict.fromkeys(named("world_size num_processes num_replicas"), "world_size"),
    "is_step": "is_step",
    **dict.fromkeys(named("num_valid loss_weight"), "valid"),
}

# Functions that a loader is given to without being iterated.
LOOKING = named("""
    len isinstance hasattr getattr setattr type str repr id callable print super vars
    dir format bool issubclass delattr
""")
