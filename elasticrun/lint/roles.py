"""What names mean: the roles of constructors, base classes and plain names."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import TypeVar

from elasticrun.lint.naming import named
from elasticrun.lint.values import Kind

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


def is_iterated_sampler(dotted: str) -> bool:
    """Return whether an external class is a sampler that can only be iterated."""
    return made_by(dotted) == "sampler"


# The kind of object that calling an external name makes; the first that fits.
_MAKERS: dict[Kind, str] = {
    "plain_loader": "DataLoader$",
    "sampler": (  # one that can only be iterated
        r"^torch(?:data)?\.[\w.]*\.(?:Random|WeightedRandom|SubsetRandom|Sequential|"
        r"Distributed|Batch)?Sampler$"
    ),
    "scaler": "GradScaler",
    "ema": _ending(r"""
        AveragedModel \w*E(?:MA|ma)(?:[A-Z]\w*)? ExponentialMovingAverage
        Moving\w*Average\w*Model
    """),
    "scheduler": _ending(r"""
        \w+LR LRScheduler _LRScheduler \w*LRScheduler \w*Scheduler ReduceLROnPlateau
        CosineAnnealingWarmRestarts get_\w*schedule\w* get_scheduler
        create_scheduler\w* SWALR
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
    is_role = kind in ("sampler", "scheduler", "optimizer", "ema", "model")
    return kind if kind is not None and is_role else ""


def class_role(name: str) -> str:
    """Return what the name of a class of the project says about it."""
    return _first(_CLASS_NAMES, name) or ""


_HINTS = {
    "scheduler": r"(?:^|_)(?:(?:lr_?)?sched(?:uler?)?s?\d*(?:_?[a-z])?|lr_?sched\w*)$",
    "optimizer": r"(?:^|_)opt(?:im|imizer|im_?[a-z]|imizer_?\w)?\d*$|^optim\w*$",
    "ema": r"(?:^|_)(?:ema|swa)(?:_?(?:model|net))?$",
    "scaler": r"(?:^|_)(?:grad_?)?scaler$",
    "loader": r"(?:^|_)(?:data_?)?(?:loader|dl)s?\d*$|loader$",
    "tracker": r"(?:^|_)(?:writer|tb|tracker|wandb_run)$",
    "model": r"(?:^|_)(?:model|net|network|ddp)$",
    "rank": r"(?:^|_)(?:rank|is_main(?:_process)?|is_master)$",
}


@functools.cache
def hint(name: str) -> str:
    """Return what a name alone suggests that a value is, or an empty text."""
    return _first(_HINTS, name.rpartition(".")[2].lower()) or ""
