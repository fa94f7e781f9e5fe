"""What names outside the project mean: constructors, effects, draws, collectives."""

from __future__ import annotations

import re

ELASTIC_ROOTS = ("elasticrun", "adaptdl")
ELASTIC_NAMES = frozenset(
    [
        "AdaptiveDataLoader",
        "AdaptiveDataParallel",
        "CombinedLoader",
        "remaining_epochs_until",
        "Variables",
        "State",
        "Accumulator",
        "register",
        "once",
        "rank",
        "local_rank",
        "world_size",
        "generation",
        "init",
        "save_all_states",
        "request_checkpoint",
        "request_stop",
        "load_state",
        "current_epoch",
        "finished_epochs",
        "current_dataloader",
        "device",
        "replica_rank",
        "num_replicas",
        "num_restarts",
        "init_process_group",
        "ElasticSampler",
    ]
)
LOADERS = frozenset(("AdaptiveDataLoader", "CombinedLoader"))

# Collective calls of torch.distributed, and of elasticrun.
COLLECTIVES = frozenset(
    [
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "all_gather_into_tensor",
        "barrier",
        "broadcast",
        "broadcast_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "gather",
        "gather_object",
        "scatter",
        "scatter_object_list",
        "all_to_all",
        "all_to_all_single",
        "monitored_barrier",
        "new_group",
    ]
)
ELASTIC_COLLECTIVES = frozenset(("init", "save_all_states", "init_process_group"))
STATE_MAKERS = frozenset(
    [
        "AdaptiveDataLoader",
        "CombinedLoader",
        "AdaptiveDataParallel",
        "register",
        "Variables",
        "State",
        "Accumulator",
    ]
)

_OPTIMIZER = re.compile(
    r"(?:^|\.)(?:\w*Adam\w*|SGD\w*|\w*RMS[pP]rop\w*|Adagrad|Adadelta|Adafactor|LBFGS|"
    r"Lamb|LAMB|Lion\w*|LARS|Lars|Rprop|ASGD|Shampoo|SOAP|Muon|Sophia\w*|Novograd|"
    r"AdaBelief|Ranger\w*|Prodigy|\w*Optimizer|create_optimizer\w*)$"
)
_SCHEDULER = re.compile(
    r"(?:^|\.)(?:\w+LR|LRScheduler|_LRScheduler|\w*LRScheduler|\w*Scheduler|"
    r"ReduceLROnPlateau|CosineAnnealingWarmRestarts|get_\w*schedule\w*|get_scheduler|"
    r"create_scheduler\w*|SWALR)$"
)
_EMA = re.compile(
    r"(?:^|\.)(?:AveragedModel|\w*E(?:MA|ma)(?:[A-Z]\w*)?|"
    r"ExponentialMovingAverage|Moving\w*Average\w*Model)$"
)
_MODEL = re.compile(
    r"^(?:torch\.nn\.(?!functional|init|utils)(?:\w+\.)*(?!\w*Loss$)[A-Z]\w*|"
    r"torchvision\.models\.[\w.]+|timm\.(?:models\.)?create_model|"
    r"transformers\.\w*(?:Model|For\w+)(?:\.from_pretrained|\.from_config)?|"
    r"segmentation_models_pytorch\.\w+|torch\.hub\.load|torchvision\.ops\.MLP)$"
)
_MODEL_WRAPPER = re.compile(
    r"(?:^|\.)(?:DistributedDataParallel|DDP|DataParallel|FullyShardedDataParallel|"
    r"FSDP|compile|convert_sync_batchnorm|fully_shard|script|get_peft_model|optimize)$"
)
_RNG = re.compile(
    r"^(?:numpy\.random\.(?:default_rng|RandomState|Generator)|random\.Random|"
    r"torch\.Generator)$"
)
_TRACKER = re.compile(
    r"(?:^|\.)(?:SummaryWriter|wandb\.init|mlflow\.start_run|neptune\.init(?:_run)?|"
    r"comet_ml\.Experiment|Experiment|Task\.init|aim\.Run|swanlab\.init|"
    r"trackio\.init|Live)$"
)
# Trackers that begin another run with each start unless told which one to continue.
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
WRAPPERS = frozenset(
    [
        "enumerate",
        "tqdm",
        "trange",
        "zip",
        "islice",
        "iter",
        "list",
        "tuple",
        "sorted",
        "reversed",
        "cycle",
        "chain",
        "map",
        "filter",
        "track",
        "count",
    ]
)

_NUMPY_DRAWS = (
    "rand randn randint random choice permutation shuffle normal uniform beta binomial "
    "poisson random_sample standard_normal integers"
)
_TORCH_DRAWS = (
    "rand randn randint randperm bernoulli multinomial normal rand_like randn_like "
    "randint_like"
)
_PYTHON_DRAWS = (
    "random randint uniform choice choices sample shuffle gauss randrange getrandbits "
    "betavariate normalvariate betavariate triangular expovariate"
)
DRAWS = frozenset(
    [f"numpy.random.{name}" for name in _NUMPY_DRAWS.split()]
    + [f"torch.{name}" for name in _TORCH_DRAWS.split()]
    + [f"random.{name}" for name in _PYTHON_DRAWS.split()]
    + ["torch.utils.data.random_split", "sklearn.model_selection.train_test_split"]
    + ["sklearn.utils.shuffle", "sklearn.utils.resample"]
)
RNG_METHODS = frozenset(f"{_NUMPY_DRAWS} {_PYTHON_DRAWS} random_".split())
SEEDERS = frozenset(
    [
        "torch.manual_seed",
        "torch.random.manual_seed",
        "random.seed",
        "numpy.random.seed",
        "torch.cuda.manual_seed",
        "torch.cuda.manual_seed_all",
        "transformers.set_seed",
        "lightning.seed_everything",
        "lightning.pytorch.seed_everything",
        "pytorch_lightning.seed_everything",
        "accelerate.utils.set_seed",
        "timm.utils.random_seed",
        "numpy.random.default_rng",
        "random.Random",
        "numpy.random.RandomState",
    ]
)
TIME = frozenset(
    [
        "time.time",
        "time.time_ns",
        "time.monotonic",
        "time.perf_counter",
        "time.process_time",
        "time.monotonic_ns",
        "datetime.datetime.now",
        "datetime.datetime.utcnow",
        "datetime.date.today",
        "datetime.datetime.today",
        "time.strftime",
        "time.localtime",
        "time.ctime",
    ]
)
ENTROPY = frozenset(
    [
        "os.getpid",
        "os.urandom",
        "uuid.uuid4",
        "uuid.uuid1",
        "secrets.randbits",
        "secrets.randbelow",
        "secrets.token_bytes",
        "secrets.token_hex",
        "torch.seed",
        "torch.random.seed",
        "torch.initial_seed",
        "os.getppid",
        "id",
        "hash",
    ]
) - {"torch.initial_seed", "hash"}
RANK = frozenset(
    [
        "torch.distributed.get_rank",
        "torch.distributed.get_node_local_rank",
        "torch.distributed.get_group_rank",
    ]
)
WORLD_SIZE = frozenset(("torch.distributed.get_world_size", "torch.cuda.device_count"))
RANK_VARIABLES = frozenset(("RANK", "LOCAL_RANK", "SLURM_PROCID", "GROUP_RANK"))
WORLD_VARIABLES = frozenset(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"))

ENVIRONMENT = ".".join(("os", "environ"))
ENVIRONMENT_READERS = frozenset((f"{ENVIRONMENT}.get", "os.getenv"))

EXISTENCE = frozenset(
    [
        "os.path.exists",
        "os.path.isfile",
        "os.path.isdir",
        "os.path.getsize",
        "os.path.lexists",
        "os.listdir",
        "os.stat",
    ]
)
OUTSIDE = frozenset(
    [
        "requests.post",
        "requests.put",
        "requests.patch",
        "requests.delete",
        "requests.request",
        "httpx.post",
        "httpx.put",
        "httpx.patch",
        "httpx.delete",
        "urllib.request.urlopen",
        "smtplib.SMTP.sendmail",
        "os.system",
        "subprocess.run",
        "subprocess.call",
        "subprocess.check_call",
        "subprocess.Popen",
        "os.popen",
        "os.kill",
    ]
)
RUNS_PROGRAM = frozenset(
    [
        "os.system",
        "subprocess.run",
        "subprocess.call",
        "subprocess.check_call",
        "subprocess.Popen",
        "os.popen",
    ]
)
UNREPEATABLE = frozenset(
    [
        "os.rename",
        "os.renames",
        "os.replace",
        "os.remove",
        "os.unlink",
        "os.rmdir",
        "os.removedirs",
        "shutil.move",
        "shutil.rmtree",
        "os.mkdir",
        "os.link",
        "os.symlink",
    ]
)
SAVES = frozenset(
    [
        "torch.save",
        "torch.jit.save",
        "numpy.save",
        "numpy.savez",
        "numpy.savetxt",
        "json.dump",
        "pickle.dump",
        "yaml.dump",
        "joblib.dump",
        "safetensors.torch.save_file",
        "safetensors.torch.save_model",
        "torchvision.utils.save_image",
        "torch.distributed.checkpoint.save",
    ]
)
SAVE_METHODS = frozenset(
    [
        "save_pretrained",
        "to_csv",
        "to_json",
        "to_parquet",
        "savefig",
        "write_text",
        "write_bytes",
        "save",
        "push_to_hub",
        "save_checkpoint",
    ]
)
LOGGERS = frozenset(
    [
        "print",
        "pprint.pprint",
        "logging.info",
        "logging.debug",
        "logging.warning",
        "logging.error",
        "logging.log",
        "logging.critical",
        "wandb.log",
        "mlflow.log_metric",
        "mlflow.log_metrics",
        "tqdm.write",
        "tqdm.tqdm.write",
        "warnings.warn",
        "sys.stdout.write",
        "sys.stderr.write",
        "rich.print",
        "rich.console.Console.print",
        "click.echo",
        "mlflow.log_param",
        "trackio.log",
        "typer.echo",
        "swanlab.log",
    ]
)
TRACKING = frozenset(
    "wandb.log mlflow.log_metric mlflow.log_metrics trackio.log swanlab.log".split()
)
LOG_METHODS = frozenset(
    [
        "info",
        "debug",
        "warning",
        "error",
        "critical",
        "exception",
        "log",
        "add_scalar",
        "add_scalars",
        "add_histogram",
        "add_image",
        "add_text",
        "add_figure",
        "add_graph",
        "log_metric",
        "log_metrics",
        "set_postfix",
        "set_postfix_str",
        "set_description",
        "print",
        "add_images",
        "report_scalar",
        "log_dict",
        "log_scalar",
        "add_hparams",
        "add_embedding",
        "add_video",
        "add_pr_curve",
        "add_histograms",
        "write_scalars",
    ]
)
TRACKER_METHODS = frozenset(
    [
        "log",
        "add_scalar",
        "add_scalars",
        "add_histogram",
        "add_image",
        "add_text",
        "log_metric",
        "log_metrics",
        "log_artifact",
    ]
)
# Builtins that only look at what they are given.
LOOKING = frozenset(
    [
        "len",
        "isinstance",
        "hasattr",
        "getattr",
        "setattr",
        "type",
        "str",
        "repr",
        "id",
        "callable",
        "print",
        "super",
        "vars",
        "dir",
        "format",
        "bool",
        "issubclass",
        "delattr",
    ]
)
CONSUMING = frozenset(
    ["sum", "list", "tuple", "set", "dict", "sorted", "max", "min", "any", "all"]
)
ITERATED_SAMPLERS = frozenset(
    [
        "torch.utils.data.RandomSampler",
        "torch.utils.data.WeightedRandomSampler",
        "torch.utils.data.SubsetRandomSampler",
        "torch.utils.data.SequentialSampler",
        "torch.utils.data.DistributedSampler",
        "torch.utils.data.BatchSampler",
        "torch.utils.data.sampler.RandomSampler",
        "torch.utils.data.sampler.BatchSampler",
        "torch.utils.data.sampler.WeightedRandomSampler",
        "torch.utils.data.sampler.SubsetRandomSampler",
        "torch.utils.data.sampler.SequentialSampler",
        "torch.utils.data.distributed.DistributedSampler",
        "torchdata.stateful_dataloader.sampler.RandomSampler",
    ]
)
SAMPLER_BASES = frozenset(
    ["torch.utils.data.Sampler", "torch.utils.data.sampler.Sampler"]
)

_ALIASES = {
    "np": "numpy",
    "F": "torch.nn.functional",
    "tqdm.auto.tqdm": "tqdm",
}
_CLASS_NAME_ROLES = (
    (
        "ema",
        re.compile(
            r"(?:^|_)E(?:MA|ma)(?:$|[A-Z_])|EMA|MovingAverage(?:Model|Weights)|"
            r"^ModelEma"
        ),
    ),
    ("scheduler", re.compile(r"Scheduler|Schedule$|LR$|Warmup(?:Cosine|Linear|$)")),
)


def elastic_name(dotted: str) -> str:
    """Return the public elasticrun name behind a dotted one, or an empty text."""
    last = dotted.rpartition(".")[2]
    if last not in ELASTIC_NAMES:
        return ""
    if dotted.split(".", 1)[0] in ELASTIC_ROOTS:
        return last
    unmistakable = ("Adaptive", "remaining_epochs")
    return last if last.startswith(unmistakable) else ""


def made_by(dotted: str) -> str:
    """Return the kind of object that calling an external name makes."""
    if dotted.endswith("torch.utils.data.DataLoader") or dotted.endswith(
        ("DataLoader", "MultiEpochsDataLoader")
    ):
        return "plain_loader"
    if _MODEL_WRAPPER.search(dotted) and not dotted.startswith("re."):
        return "model_wrapper"
    if "GradScaler" in dotted:
        return "scaler"
    if _EMA.search(dotted):
        return "ema"
    if _SCHEDULER.search(dotted):
        return "scheduler"
    if _OPTIMIZER.search(dotted):
        return "optimizer"
    if _TRACKER.search(dotted):
        return "tracker"
    if _RNG.match(dotted):
        return "rng"
    if _MODEL.match(dotted):
        return "model"
    return ""


def base_role(dotted: str) -> str:
    """Return what deriving from an external class makes of a class."""
    last = dotted.rpartition(".")[2]
    if dotted.split(".", 1)[0] in ELASTIC_ROOTS and last == "State":
        return "state"
    if elastic_name(dotted) in LOADERS:
        return "loader"
    if last in ("Module", "PreTrainedModel", "LightningModule"):
        return "model"
    if last in ("Dataset", "IterableDataset", "VisionDataset"):
        return "dataset"
    if last == "Optimizer":
        return "optimizer"
    if dotted in SAMPLER_BASES or dotted in ITERATED_SAMPLERS:
        return "sampler"
    kind = made_by(dotted)
    return kind if kind in ("scheduler", "optimizer", "ema", "model") else ""


def class_role(name: str) -> str:
    """Return what the name of a class of the project says about it."""
    for role, pattern in _CLASS_NAME_ROLES:
        if pattern.search(name):
            return role
    return ""


_HINTS = (
    (
        "scheduler",
        re.compile(
            r"(?:^|_)(?:lr_?)?sched(?:ule|uler)?s?\d*(?:_?[a-z])?$|"
            r"(?:^|_)lr_?sched\w*$"
        ),
    ),
    (
        "optimizer",
        re.compile(
            r"(?:^|_)opt(?:im|imizer|im_?[a-z]|imizer_?\w)?\d*$|"
            r"^optim\w*$"
        ),
    ),
    ("ema", re.compile(r"(?:^|_)(?:ema|swa)(?:_?(?:model|net))?$")),
    ("scaler", re.compile(r"(?:^|_)(?:grad_?)?scaler$")),
    ("loader", re.compile(r"(?:^|_)(?:data_?)?(?:loader|dl)s?\d*$|loader$")),
    ("tracker", re.compile(r"(?:^|_)(?:writer|tb|tracker|wandb_run)$")),
    ("model", re.compile(r"(?:^|_)(?:model|net|network|ddp)$")),
    ("rank", re.compile(r"(?:^|_)(?:rank|is_main(?:_process)?|is_master)$")),
)


def hint(name: str) -> str:
    """Return what a name alone suggests that a value is, or an empty text."""
    name = name.rpartition(".")[2].lower()
    for kind, pattern in _HINTS:
        if pattern.search(name):
            return kind
    return ""
