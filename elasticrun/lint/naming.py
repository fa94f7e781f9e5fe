"""Names: what they mean in torch, elasticrun and elsewhere; expressions as text.

What calls do by their names stands in walk/table.py.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Mapping
from typing import TypeVar

from elasticrun.lint.values import Kind


def named(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


def last_name(node: ast.expr) -> str:
    """Return `c` for `c` and for `a.b.c`, and an empty text for anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def written(node: ast.AST) -> str:
    """Return an expression as text, made once for each node."""
    if isinstance(node, ast.Name):
        return node.id
    text: str | None = getattr(node, "_elasticrun_text", None)
    if text is None:
        if isinstance(node, ast.Attribute) and last_name(node.value):
            text = f"{written(node.value)}.{node.attr}"
        else:
            text = ast.unparse(node)
        node._elasticrun_text = text  # type: ignore[attr-defined]
    return text


ELASTIC_ROOTS = ("elasticrun", "adaptdl")

ELASTIC_NAMES = named("""
    AdaptiveDataLoader AdaptiveDataParallel CombinedLoader remaining_epochs_until
    remaining_steps_until WeightedDraws LengthGroups RandomWindows Variables State
    Accumulator register once rank local_rank world_size generation init save_all_states
    request_checkpoint request_stop load_state current_epoch finished_epochs
    current_dataloader device replica_rank num_replicas num_restarts init_process_group
    ElasticSampler LogFile
""")

LOADERS = named("AdaptiveDataLoader CombinedLoader")

_OTHER_LOADER = re.compile(r"^Adaptive\w*(?:Iterator|Loader)$")
_What = TypeVar("_What", bound=str)


def _ending(names: str) -> str:
    """Return a pattern of dotted names that end in one of some names."""
    return rf"(?:^|\.)(?:{'|'.join(names.split())})$"


def _first(patterns: Mapping[_What, str], name: str) -> _What | None:
    """Return what the first pattern means that is found in a name."""
    found = (what for what, names in patterns.items() if re.search(names, name))
    return next(found, None)


_MODEL_WRAPPER = _ending("""
    DistributedDataParallel DDP DataParallel FullyShardedDataParallel FSDP compile
    convert_sync_batchnorm fully_shard script get_peft_model optimize
""")


_CLASS_NAMES = {
    "ema": r"(?:^|_)Ema(?:$|[A-Z_])|EMA|MovingAverage(?:Model|Weights)|^ModelEma",
    "scheduler": r"Scheduler|Schedule$|LR$|Warmup(?:Cosine|Linear|$)",
}


@functools.cache
def elastic_name(dotted: str) -> str:
    """Return the public elasticrun name behind a dotted one, or an empty text."""
    last = dotted.rpartition(".")[2]
    if _OTHER_LOADER.search(last) and dotted.startswith(ELASTIC_ROOTS):
        return "AdaptiveDataLoader"
    if dotted == "elasticrun.integrations.accelerate.prepare":
        return "prepare"
    if last not in ELASTIC_NAMES:
        return ""
    if dotted.split(".", 1)[0] in ELASTIC_ROOTS:
        return last
    unmistakable = ("Adaptive", "remaining_epochs", "remaining_steps")
    return last if last.startswith(unmistakable) else ""


# The kind of object that calling an external name makes; the first that fits.
_MAKERS: dict[Kind, str] = {
    "plain_loader": "DataLoader$",
    "scaler": "GradScaler",
    "ema": _ending(r"""
        AveragedModel \w*E(?:MA|ma)(?:[A-Z]\w*)? ExponentialMovingAverage
        Moving\w*Average\w*Model
    """),
    "scheduler": _ending(r"""
        \w+(?<![A-Z])LR \w*Scheduler ReduceLROnPlateau CosineAnnealingWarmRestarts
        get_\w*schedule\w* create_scheduler\w* SWALR
    """),
    "optimizer": _ending(r"""
        \w*Adam\w* SGD\w* \w*RMS[pP]rop\w* Adagrad Adadelta Adafactor LBFGS Lamb LAMB
        Lion\w* LARS Lars Rprop ASGD Shampoo SOAP Muon Sophia\w* Novograd AdaBelief
        Ranger\w* Prodigy \w*Optimizer create_optimizer\w*
    """),
    "tracker": _ending(r"""
        SummaryWriter wandb\.init mlflow\.start_run neptune\.init(?:_run)?
        comet_ml\.Experiment Experiment Task\.init aim\.Run swanlab\.init trackio\.init
        Live
    """),
    "rng": (
        r"^(?:numpy\.random\.(?:default_rng|RandomState|Generator)|random\.Random|"
        r"torch\.Generator|gym(?:nasium)?\.(?:make(?:_vec)?|vector\.\w+))$"
    ),
    "model": (
        r"^(?:torch\.nn\.(?!functional|init|utils)(?:\w+\.)*(?!\w*Loss$)[A-Z]\w*|"
        r"torchvision\.models\.[\w.]+|timm\.(?:models\.)?create_model|"
        r"transformers\.\w*(?:Model|For\w+)(?:\.from_pretrained|\.from_config)?|"
        r"segmentation_models_pytorch\.\w+|torch\.hub\.load|torchvision\.ops\.MLP)$"
    ),
}


@functools.cache
def made_by(dotted: str) -> Kind | None:
    """Return the kind of object that calling an external name makes, if it is known."""
    if is_model_wrapper(dotted):
        return None
    return _first(_MAKERS, dotted)


@functools.cache
def is_model_wrapper(dotted: str) -> bool:
    """Return whether calling an external name wraps the model that it is given."""
    return (
        not dotted.startswith("re.") and re.search(_MODEL_WRAPPER, dotted) is not None
    )


_BASES = {
    **dict.fromkeys(("Module", "PreTrainedModel", "LightningModule"), "model"),
    **dict.fromkeys(("Dataset", "IterableDataset", "VisionDataset"), "dataset"),
    "Optimizer": "optimizer",
}


def base_role(dotted: str) -> str:
    """Return what deriving from an external class makes of a class."""
    last = dotted.rpartition(".")[2]
    if dotted.split(".", 1)[0] in ELASTIC_ROOTS and last == "State":
        return "state"
    if elastic_name(dotted) in LOADERS:
        return "loader"
    if last in _BASES:
        return _BASES[last]
    kind = made_by(dotted)
    is_role = kind in ("scheduler", "optimizer", "ema", "model")
    return kind if kind is not None and is_role else ""


def class_role(name: str) -> str:
    """Return what the name of a class of the project says about it."""
    return _first(_CLASS_NAMES, name) or ""


_RANK = re.compile(r"(?:^|[._])(?:rank|is_main(?:_process)?|is_master)$")


@functools.cache
def is_rank(name: str) -> bool:
    """Return whether a name alone says that a value depends on the rank."""
    return _RANK.search(name.lower()) is not None


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
    **dict.fromkeys(named("num_valid loss_weight"), "valid"),
}

# Functions that a loader is given to without being iterated.
LOOKING = named("""
    len isinstance hasattr getattr setattr type str repr id callable print super vars
    dir format bool issubclass delattr
""")
