"""What calls do that are known by their names: one table for each way to call."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from elasticrun.lint.graph import (
    CONTENT,
    LOG,
    OPTIMIZER,
    SAVE,
    TRACK,
    VALUE,
    Sink,
    What,
)
from elasticrun.lint.naming import (
    CHANGING,
    FILE_WRITES,
    LOG_METHODS,
    TRACKER_METHODS,
    is_model_wrapper,
    made_by,
)
from elasticrun.lint.values import Value, key_of, unknown
from elasticrun.lint.walk import externals, methods
from elasticrun.lint.walk.expressions import attribute, environment_taints, item
from elasticrun.lint.walk.functions import Called, MethodCalled
from elasticrun.lint.walk.walk import Walk

Handler = Callable[[Walk, Any], Value | None]  # of a Called, or of a MethodCalled


class Row(NamedTuple):
    """What a call does.

    Attributes:
        event: What is noted of it.
        sink: Where the arguments go; where the result goes, if it is None.
        gives: What it returns: something unknown, nothing, its first argument, what
            a method is called on, or something unknown made of that and the arguments.
        role: That of the event.
        taint: What the result depends on.
        do: What does it where this is not all.
    """

    event: What | None = None
    sink: Sink | None = None
    gives: Literal["unknown", "nothing", "first", "receiver", "alike"] = "unknown"
    role: str = ""
    taint: str = ""
    do: Handler | None = None


def _table(*rows: tuple[Row, str]) -> dict[str, Row]:
    return {name: row for row, names in rows for name in names.split()}


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
    "betavariate normalvariate triangular expovariate"
)


def _within(module: str, names: str) -> str:
    return " ".join(f"{module}.{name}" for name in names.split())


# What is too little for a function of its own.


def _range(_: Walk, it: Called) -> Value:
    return Value("range", parts=it.args, taints=it.taints)


def _getattr(walk: Walk, it: Called) -> Value | None:
    name = key_of(it.args[1]) if len(it.args) > 1 else None
    return attribute(walk, it.args[0], name, it.node) if isinstance(name, str) else None


def _len(_: Walk, it: Called) -> Value | None:
    is_loader = any(each.kind == "loader" for each in it.args)
    return unknown(taints=it.taints | {"num_batches"}) if is_loader else None


def _environ(_: Walk, it: Called) -> Value | None:
    return unknown(environment_taints(it.args[0])) if it.args else None


def _get(walk: Walk, it: MethodCalled) -> Value | None:
    return item(walk, it.receiver, it.args[0], it.node) if it.args else None


def _count(_: Walk, it: MethodCalled) -> Value:
    pair = [unknown(), it.receiver]
    return Value("wrapped", "zip", parts=pair, node=it.node)


def _batches(_: Walk, it: MethodCalled) -> Value:
    return Value("wrapped", "batches", parts=[it.receiver], node=it.node)


# Functions, by their dotted names.
_FUNCTIONS = _table(
    (Row(do=externals.seed), """
        torch.manual_seed torch.random.manual_seed random.seed numpy.random.seed
        torch.cuda.manual_seed torch.cuda.manual_seed_all transformers.set_seed
        lightning.seed_everything lightning.pytorch.seed_everything
        pytorch_lightning.seed_everything accelerate.utils.set_seed
        timm.utils.random_seed
        numpy.random.default_rng random.Random numpy.random.RandomState
    """),
    (Row(do=externals.draw), _within("numpy.random", _NUMPY_DRAWS)),
    (Row(do=externals.draw), _within("torch", _TORCH_DRAWS)),
    (Row(do=externals.draw), _within("random", _PYTHON_DRAWS)),
    (Row(do=externals.draw), """
        torch.utils.data.random_split sklearn.model_selection.train_test_split
        sklearn.utils.shuffle sklearn.utils.resample
    """),
    (Row("logged", LOG, "nothing"), """
        print pprint.pprint logging.info logging.debug logging.warning logging.error
        logging.log logging.critical tqdm.write tqdm.tqdm.write warnings.warn
        sys.stdout.write sys.stderr.write rich.print rich.console.Console.print
        click.echo mlflow.log_param typer.echo
    """),
    (Row("logged", TRACK, "nothing"), """
        wandb.log mlflow.log_metric mlflow.log_metrics trackio.log swanlab.log
    """),
    (Row("sent", role="program"), """
        os.system subprocess.run subprocess.call subprocess.check_call subprocess.Popen
        os.popen
    """),
    (Row("sent"), """
        requests.post requests.put requests.patch requests.delete requests.request
        httpx.post httpx.put httpx.patch httpx.delete urllib.request.urlopen
        smtplib.SMTP.sendmail os.kill
    """),
    (Row("moved"), """
        os.rename os.renames os.replace os.remove os.unlink os.rmdir os.removedirs
        shutil.move shutil.rmtree os.mkdir os.makedirs os.link os.symlink
    """),
    (Row("saved", SAVE), """
        torch.save torch.jit.save numpy.save numpy.savez numpy.savetxt json.dump
        pickle.dump yaml.dump joblib.dump safetensors.torch.save_file
        safetensors.torch.save_model torchvision.utils.save_image
        torch.distributed.checkpoint.save numpy.savez_compressed torchaudio.save
        matplotlib.pyplot.savefig matplotlib.pyplot.imsave cv2.imwrite
        imageio.imwrite soundfile.write scipy.io.wavfile.write
        shutil.copy shutil.copy2 shutil.copyfile
    """),
    (Row("unfixed", taint="time"), """
        time.time time.time_ns time.monotonic time.perf_counter time.process_time
        time.monotonic_ns datetime.datetime.now datetime.datetime.utcnow
        datetime.date.today datetime.datetime.today time.strftime time.localtime
        time.ctime
    """),
    (Row("unfixed", taint="entropy"), """
        os.getpid os.urandom uuid.uuid4 uuid.uuid1 secrets.randbits secrets.randbelow
        secrets.token_bytes secrets.token_hex torch.seed torch.random.seed os.getppid id
    """),
    (Row(taint="rank"), """
        torch.distributed.get_rank torch.distributed.get_node_local_rank
        torch.distributed.get_group_rank
    """),
    (Row(taint="world_size"), """
        torch.distributed.get_world_size torch.cuda.device_count
    """),
    (Row(taint="exists"), """
        os.path.exists os.path.isfile os.path.isdir os.path.getsize os.path.lexists
        os.listdir os.stat
    """),
    (Row(taint="temporary"), """
        tempfile.mkdtemp tempfile.mkstemp tempfile.mktemp tempfile.gettempdir
        tempfile.TemporaryDirectory tempfile.NamedTemporaryFile
    """),
    (Row(sink=OPTIMIZER, do=externals.make), "torch.nn.Parameter"),
    (Row(do=_environ), "os.getenv os.environ.get"),
    (Row(do=externals.open_named), "open io.open gzip.open bz2.open codecs.open"),
    (Row(do=externals.copy), "copy.copy copy.deepcopy"),
    (Row(gives="first"), "csv.writer csv.DictWriter"),
    (Row(do=externals.next_), "next"),
    (Row(do=_range), "range"),
    (Row(do=_getattr), "getattr"),
    (Row(do=_len), "len"),
    (Row(do=externals.log_file), """
        logging.basicConfig logging.FileHandler logging.handlers.RotatingFileHandler
    """),
    (Row("signal"), "signal.signal"),
    (Row(do=externals.consume),
     "sum max min any all torch.optim.swa_utils.update_bn"),
    (Row(do=externals.make_list), "list tuple sorted set frozenset"),
    (Row(do=externals.field), "dataclasses.field"),
    (Row(do=externals.make_record), "collections.namedtuple"),
)  # fmt: skip

_COLLECTIVES = """
    all_reduce all_gather all_gather_object all_gather_into_tensor barrier broadcast
    broadcast_object_list reduce reduce_scatter reduce_scatter_tensor gather
    gather_object scatter scatter_object_list all_to_all all_to_all_single
    monitored_barrier new_group
"""
_COLLECTIVE = (
    rf"^(?:torch\.distributed|dist)\b.*\.(?:{'|'.join(_COLLECTIVES.split())})$"
)

# Functions of whole modules; then come those that make objects, which naming.py knows.
_PATTERNS = {
    _COLLECTIVE: Row(do=externals.agree),
    r"^torch\.nn\.init\.|(?:^|\.)prune(?:\.|$)": Row(do=externals.change_weights),
    r"^sklearn\.(?:model_selection|utils)\.": Row(do=externals.split),
    r"^pathlib\.": Row(gives="alike", taint="path"),
    r"^gym(?:nasium)?\.wrappers\.": Row(gives="first"),
}

# Functions and classes of any module, by the last part of their names.
_OF_ANY_MODULE = _table(
    (Row(), "clip_grad_norm_ clip_grad_value_ backward"),
    (Row(do=lambda _, it: Value("opaque", it.name)), """
        Thread Process ThreadPoolExecutor ProcessPoolExecutor
    """),
    (Row(do=externals.iterator), "iter cycle"),
    (Row(do=externals.wrap), """
        enumerate tqdm trange zip islice reversed chain map filter track count
    """),
    (Row(do=externals.make_collection), "deque defaultdict OrderedDict Counter"),
    (Row(taint="rank"), "is_main_process is_main is_master get_rank is_rank_zero"),
    (Row(do=externals.make_dict), """
        dict vars SimpleNamespace Namespace AttrDict EasyDict Box
    """),
)  # fmt: skip

# What elasticrun itself offers, by its public names; the others do nothing of note.
ELASTIC = _table(
    (Row(do=externals.make_loader), "AdaptiveDataLoader CombinedLoader"),
    (Row(do=externals.make_parallel), "AdaptiveDataParallel"),
    (Row(do=externals.prepare), "prepare"),
    (Row(do=externals.register_all), "register"),
    (Row(sink=SAVE, do=externals.make_variables), "Variables"),
    (Row(do=externals.make_accumulator), "Accumulator"),
    (Row(do=externals.until), "remaining_epochs_until remaining_steps_until"),
    (Row("collective"), "init save_all_states init_process_group"),
    (Row(taint="rank"), "rank local_rank replica_rank"),
    (Row(taint="world_size"), "world_size num_replicas"),
    (Row(taint="generation"), "generation num_restarts"),
    (Row("collective", taint="once"), "once"),
    (Row("state"), "LogFile"),
    (Row(taint="epoch"), "current_epoch finished_epochs"),
)


@functools.cache
def function_row(name: str) -> Row | None:
    """Return what calling a function or class does, if that is known by its name."""
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    for pattern, row in _PATTERNS.items():
        if re.search(pattern, name):
            return row
    if is_model_wrapper(name):
        return Row(do=externals.wrap_model)
    if made_by(name):
        return Row(do=externals.make)
    return _OF_ANY_MODULE.get(name.rpartition(".")[2])


# Methods.

_OTHERWISE = "*"  # any other method

_MODEL = _table(
    (Row("trained", gives="receiver", role="weights"),
     "apply reset_parameters init_weights"),
    (Row(gives="receiver"), """
        to cuda cpu half float double bfloat16 train eval detach
        contiguous share_memory compile type channels_last
    """),
    (Row("set up", gives="receiver"), "requires_grad_"),
    (Row("weighed"), "weigh"),  # which is told a loader, and does not loop over it
    (Row(do=methods.parameters), """
        parameters named_parameters buffers named_buffers state_dict values items
        children modules named_modules keys
    """),
)  # fmt: skip

_CONTAINER = _table(
    (Row(do=methods.clear), "clear"),
    (Row(sink=CONTENT, do=methods.change), " ".join(CHANGING)),
    (Row(gives="receiver"), "union difference copy"),
    (Row(do=_get), "get"),
    (Row(do=methods.items), "items values keys"),
)

# Methods of objects whose role is known; with none here it is that of any object.
_METHODS: dict[str, dict[str, Row]] = {
    "file": dict.fromkeys(FILE_WRITES, Row("written", SAVE, "nothing")),
    "tracker": {
        **dict.fromkeys(LOG_METHODS | TRACKER_METHODS, Row("logged", TRACK)),
        "__enter__": Row(sink=TRACK, gives="receiver"),
        _OTHERWISE: Row(sink=TRACK),
    },
    "rng": _table(
        (Row(do=methods.seed), "manual_seed seed"),
        (Row(do=methods.draw), f"{_NUMPY_DRAWS} {_PYTHON_DRAWS} random_ step"),
        (Row(do=methods.reset), "reset"),
    ),
    "accumulator": {
        "synchronized": Row("collective", gives="receiver"),
        _OTHERWISE: Row(),
    },
    "loader": {
        "enumerate": Row(do=_count),
        "batches": Row(do=_batches),
        "autoscale": Row("collective"),
        _OTHERWISE: Row(),
    },
    **dict.fromkeys(("list", "set", "dict"), _CONTAINER),
    "scheduler": _table(
        (Row("trained", OPTIMIZER, "nothing", "scheduler"), "step step_update"),
    ),
    "optimizer": {
        "step": Row(sink=OPTIMIZER, do=methods.step),
        "add_param_group": Row("set up", OPTIMIZER, "receiver"),
    },
    "scaler": {
        "load_state_dict": Row(sink=OPTIMIZER, do=methods.load),
        "step": Row(sink=VALUE, do=methods.step),
        "update": Row("trained", VALUE, "nothing", "scaler"),
        "scale": Row(sink=VALUE, gives="first"),
        _OTHERWISE: Row(sink=VALUE, gives="nothing"),
    },
    "ema": {
        **_MODEL,
        **_table(
            (Row("trained", OPTIMIZER, "nothing", "ema"),
             "update update_parameters step update_average"),
        ),
    },
    "model": _MODEL,
    "param": {
        "requires_grad_": Row("set up", gives="receiver"),
        "backward": Row("backward", OPTIMIZER),
        _OTHERWISE: Row(sink=OPTIMIZER, do=methods.change_parameters),
    },
    # Any other object, or one whose role says nothing of the method.
    "any": {
        "load_state_dict": Row(sink=OPTIMIZER, do=methods.load),
        **dict.fromkeys(LOG_METHODS - TRACKER_METHODS, Row("logged", LOG, "alike")),
        **dict.fromkeys(LOG_METHODS & TRACKER_METHODS, Row("logged", TRACK, "alike")),
        **dict.fromkeys(FILE_WRITES, Row("written", gives="alike")),
        **_table(
            (Row("saved", SAVE, "alike"), """
                save_pretrained to_json to_parquet savefig save push_to_hub
                save_checkpoint
            """),
            (Row(sink=SAVE, do=methods.save), "write_text write_bytes to_csv"),
            (Row(do=methods.parameters), "parameters named_parameters"),
            (Row("backward"), "backward"),
            (Row(do=methods.gather),
             "gather gather_for_metrics all_gather all_reduce reduce"),
            (Row(gives="alike"), """
                split splitlines strip rstrip lower upper read_text readline decode
            """),
            (Row(gives="alike", taint="exists"), "exists is_file is_dir"),
            (Row(do=methods.open_path), "open"),
            (Row(do=methods.move), "rename replace unlink rmdir mkdir"),
            (Row(do=methods.send),
             "post put patch sendmail send_message publish"),
            (Row(do=methods.execute), "execute executemany"),
        ),
        **dict.fromkeys(CHANGING, Row(sink=CONTENT, do=methods.change)),
        "topk": Row(do=methods.topk),
        **dict.fromkeys(("sum", "count_nonzero"), Row(do=methods.add_up)),
    },
}  # fmt: skip


def method_row(role: str, name: str) -> Row | None:
    """Return what a method does of an object with a role; None if that is not known."""
    rows = _METHODS.get(role, {})
    return rows.get(name) or rows.get(_OTHERWISE)
