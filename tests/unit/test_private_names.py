"""Each private name of others that elasticrun uses exists, and is in a table.

A version of torch, torchmetrics or Python that has lost one shows here, with what is
lost by that, and not years later in a training. Lightning, transformers and accelerate
have tables of their own beside what uses them, which refuse a version.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from torch.autograd.graph import _engine_run_backward

import elasticrun

ROOT = Path(elasticrun.__file__).parent
LOGGERS = "lightning.fabric.loggers"
RENDEZVOUS = "torch.distributed.elastic.rendezvous.dynamic_rendezvous"

# What is lost without several names.
LEAVING = "The others wait until the heartbeats of a node that left look too old."
LOGS = "The logs of Lightning's loggers begin anew."
NO_METRICS = "No metric is recognized, and none is kept."
PROFILES = "Every forward pass, or every batch, pays for an entry in profiles."
ROOTS = "What a backward pass under way was called for is not found."
SLOW_END = "The end of a replica takes 40 ms more."

# Where a name is found, and what is lost without it.
NAMES = {
    # The standard library's.
    "atexit._run_exitfuncs": "A forked replica ends without what it registered.",
    "multiprocessing.context.ForkProcess._Popen": "A worker may never begin.",
    "threading._shutdown": "A forked replica does not wait for its threads.",
    "weakref.finalize._registry": SLOW_END,
    # Torch's: backward passes.
    "torch.Tensor._backward_hooks": "Steps after a measured one take longer.",
    "torch.Tensor._version": "What replayed code changes of a large tensor stays.",
    "torch._foreach_copy_": (
        "Nothing is remembered for a rescue of modules; with virtual replicas, no "
        "model trains in several processes."
    ),
    "torch._foreach_div": "With virtual replicas, no model trains.",
    "torch.autograd.Function._backward_cls._forward_cls": (
        "Weighed losses, and collectives in a backward pass, are not recognized."
    ),
    "torch.autograd.Variable._execution_engine.queue_callback": (
        "The weighing does not hear of the end of a backward pass."
    ),
    "torch.autograd.graph._engine_run_backward": ROOTS,
    "torch.utils._pytree": (
        "The tensors in what a sharded module returns are not found, so not weighed."
    ),
    # Torch's: modules, and what compiles and averages them.
    "torch._dynamo": "Each replica imports it, which takes over a second.",
    "torch.distributed._compute_bucket_assignment_by_size": (
        "With virtual replicas, no model trains in several processes."
    ),
    "torch.distributed.utils._verify_param_shape_across_processes": (
        "With virtual replicas, replicas with different models are not told apart."
    ),
    "torch.distributed.Reducer._reset_state": (
        "DDP reduces the first partial gradients, and forgets what was used."
    ),
    "torch.nn.Module()._buffers": "What is in a buffer that is not kept is lost.",
    "torch.nn.Module()._load_from_state_dict": (
        "Loading takes no pages of the file, but copies them."
    ),
    "torch.nn.Module()._modules": "A compiled module is not looked into.",
    "torch.nn.Module()._non_persistent_buffers_set": (
        "Which buffers are not kept is not known."
    ),
    "torch.nn.Module()._save_to_state_dict": "No module is ready for a rescue.",
    "torch.nn.Module().state_dict()._metadata": "Modules lose their states' versions.",
    "torch.nn.parallel.DistributedDataParallel._post_forward": PROFILES,
    "torch.nn.parallel.DistributedDataParallel._pre_forward": PROFILES,
    "torch.nn.parallel.DistributedDataParallel._run_ddp_forward": PROFILES,
    # Torch's: profiles, GPUs, workers, the end.
    "torch.autograd._profiler_enabled": PROFILES,
    "torch.autograd.profiler._is_profiler_enabled": PROFILES,
    "torch.cuda._is_in_bad_fork": "Replicas fork from what no fork can use GPUs after.",
    "torch.cuda._lazy_call": "A replica takes GPU memory while others still need it.",
    "torch.library._del_library": SLOW_END,
    "torch.utils.data.dataloader._MultiProcessingDataLoaderIter._shutdown_workers": (
        "Workers of a loop that raised live as long as the exception is kept."
    ),
    # Torch's: a node that leaves.
    f"{RENDEZVOUS}._RendezvousExitOp.__call__": LEAVING,
    f"{RENDEZVOUS}._DistributedRendezvousOpExecutor.run": LEAVING,
    f"{RENDEZVOUS}.DynamicRendezvousHandler._stop_heartbeats": LEAVING,
    # Of torchmetrics.
    "torchmetrics.SumMetric()._computed": "A metric's old value is seen after a load.",
    "torchmetrics.SumMetric()._defaults": NO_METRICS,
    "torchmetrics.SumMetric()._persistent": NO_METRICS,
    "torchmetrics.SumMetric()._reductions": NO_METRICS,
    "torchmetrics.SumMetric()._update_count": "A metric warns that it has no samples.",
    # Of setuptools.
    "setuptools._vendor": "A path that it adds counts as one of the script.",
}

# A module, a text in its file, and what is lost without it.
TEXTS = [
    (
        "multiprocessing.spawn",
        "process.current_process()._inheriting = True",
        "A worker that imports the program becomes a replica.",
    ),
    ("torch.autograd.graph", "t_outputs", ROOTS),
    (
        "torch.nn.utils.spectral_norm",
        'self.name + "_orig"',
        "What it makes of a parameter is said to be in no checkpoint.",
    ),
    ("torch.library", "weakref.finalize(", SLOW_END),
    (
        "datasets.iterable_dataset",
        "self._distributed = ",
        "A streamed data set that was split by node loses samples silently.",
    ),
    (RENDEZVOUS, "self._op_executor.run(exit_op, deadline)", LEAVING),
    (
        "torch.utils.data.sampler",
        "self._num_samples = num_samples",
        "A sampler of fewer samples, or of more, is taken for one of all.",
    ),
    (
        "torch.optim.lr_scheduler",
        "opt._opt_called = True",
        "After a restart torch warns that no optimizer has stepped before.",
    ),
    (
        "torch.optim.lr_scheduler",
        "self._step_count == 1",
        "A scheduler's first warning shows a line of elasticrun's.",
    ),
    (
        "torch.optim.lr_scheduler",
        "self._schedulers = ",
        "A damaged state within a SequentialLR crashes in a step.",
    ),
    (
        "torch.optim.lr_scheduler",
        "self._milestones = ",
        "Other milestones of a SequentialLR are ignored without a word.",
    ),
    (
        "torch.optim.lr_scheduler",
        "_schedule_phases",
        "The saved plan of another OneCycleLR crashes behind its last step.",
    ),
    (
        "torch.optim.lr_scheduler",
        "_get_lr_called_within_step",
        "Torch warns when a scheduler is loaded.",
    ),
    (
        "torch.amp.grad_scaler",
        "_growth_tracker",
        "A damaged state of a GradScaler crashes in a step.",
    ),
    ("torch._dynamo.eval_frame", '"_orig_mod"', "A compiled module has other names."),
    (
        "torch._inductor.codecache",
        '"_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"',
        "A variable that compiling sets counts as one of the script.",
    ),
    (
        "torchmetrics.collections",
        "self._groups_checked",
        "A group of metrics is kept without what the first of it has counted.",
    ),
    # Of Lightning and TRL, what their tables have not.
    *[
        (f"{LOGGERS}.csv_logs", text, LOGS)
        for text in ("self._experiment", "self._fs", "self._version")
    ],
    *[
        (f"{LOGGERS}.tensorboard", text, LOGS)
        for text in ("self._experiment", "self._version")
    ],
    *[
        (
            "lightning.pytorch.trainer.connectors.logger_connector.result",
            text,
            "Averages that were begun are not kept.",
        )
        for text in ("class _Metadata", "class _Sync")
    ],
    *[
        (
            "lightning.pytorch.utilities.combined_loader",
            text,
            "Loaders together go on with other numbers of batches.",
        )
        for text in ("self._mode",)
    ],
    ("trl.trainer.sft_trainer", "self._total_train_tokens", "Tokens count anew."),
    ("trl.trainer.sft_trainer", "self._metrics", "Averages that it logs begin anew."),
]

# With an underscore, and yet documented.
PUBLIC = {"_asdict", "_fields", "_replace", "_exit", "_current_frames", "_getframe"}
PUBLIC |= {"_make", "_typeshed"}
# Our own, used from another folder: of a loader, and of a replica's stack.
OURS = {"_pass", "_shares", "_run_script"}

PRIVATE = re.compile(r"\b_[A-Za-z]\w*")


@pytest.mark.parametrize("path", NAMES)
def test_a_private_name_is_still_there(path: str) -> None:
    first, *rest = path.split(".")
    found: Any = pytest.importorskip(first)
    for part in rest:
        name = part.removesuffix("()")
        if not hasattr(found, name) and hasattr(found, "__path__"):
            found = import_module(f"{found.__name__}.{name}")
        else:
            assert hasattr(found, name), f"{path} is gone. {NAMES[path]}"
            found = getattr(found, name)
        if name != part:
            found = found()


@pytest.mark.parametrize(("module", "text", "lost"), TEXTS)
def test_a_private_text_is_still_there(module: str, text: str, lost: str) -> None:
    first, *rest = module.split(".")
    spec = find_spec(first)
    if spec is None:
        pytest.skip(f"{first} is not installed")
    (folder,) = spec.submodule_search_locations or ()
    source = Path(folder, *rest).with_suffix(".py").read_text(encoding="utf-8")
    assert text in source, f"`{text}` is gone from {module}. {lost}"


def test_the_roots_of_a_backward_pass_are_a_local_variable() -> None:
    assert "t_outputs" in _engine_run_backward.__code__.co_varnames


# Every private name in the package is its own, or in a table. The linter imports
# nothing, and reads names in programs.
TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for path in sorted(ROOT.rglob("*.py"))
    if "lint" not in path.parts
}


def defined(tree: ast.AST) -> Iterator[str]:
    """Yield the names that a module defines, in functions and classes, too."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [node.attr] if ast.unparse(node.value) in ("self", "cls") else []


def of_frameworks() -> Iterator[str]:
    """Yield what the tables of integrations name."""
    for path, tree in TREES.items():
        for node in tree.body if "integrations" in path.parts else []:
            if ast.unparse(node).startswith("INTERNALS"):
                yield ast.unparse(node)


def private_names() -> Iterator[tuple[str, str]]:
    """Yield each private name that neither the folder nor a base of ours defines."""
    of_folder: dict[Path, set[str]] = defaultdict(set)
    for path, tree in TREES.items():
        of_folder[path.parent] |= set(defined(tree))
    of_all = set().union(*of_folder.values())
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            own, names = of_folder[path.parent], []
            if isinstance(node, ast.Attribute):
                names = [node.attr]
                own = of_all if ast.unparse(node.value) == "self" else own
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                names = PRIVATE.findall(ast.unparse(node))
            elif isinstance(node, ast.Constant) and "integrations" not in path.parts:
                names = [node.value] if isinstance(node.value, str) else []
            for name in names:
                if PRIVATE.fullmatch(name) and name not in own:
                    yield name, f"{path.relative_to(ROOT)}:{node.lineno} uses {name}"


def test_each_private_name_of_others_is_in_a_table() -> None:
    of_tables = " ".join([*NAMES, *(text for _, text, _ in TEXTS), *of_frameworks()])
    known = {*PRIVATE.findall(of_tables), *PUBLIC, *OURS}
    unknown = [place for name, place in private_names() if name not in known]
    assert unknown == [], "say in NAMES or TEXTS what is lost without it"
