"""elasticrun: training loops that go on at the same sample after every restart."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticrun.atomic import AtomicDirectory as AtomicDirectory
    from elasticrun.atomic import atomic_save as atomic_save
    from elasticrun.current import current_dataloader as current_dataloader
    from elasticrun.current import current_job as current_job
    from elasticrun.current import device as device
    from elasticrun.current import generation as generation
    from elasticrun.current import init as init
    from elasticrun.current import load_state as load_state
    from elasticrun.current import local_rank as local_rank
    from elasticrun.current import rank as rank
    from elasticrun.current import request_checkpoint as request_checkpoint
    from elasticrun.current import request_stop as request_stop
    from elasticrun.current import save_all_states as save_all_states
    from elasticrun.current import world_size as world_size
    from elasticrun.data.elastic_sampler import ElasticSampler as ElasticSampler
    from elasticrun.data.loader import AdaptiveDataLoader as AdaptiveDataLoader
    from elasticrun.epoch import current_epoch as current_epoch
    from elasticrun.epoch import finished_epochs as finished_epochs
    from elasticrun.epoch import remaining_epochs_until as remaining_epochs_until
    from elasticrun.errors import AgreementError as AgreementError
    from elasticrun.errors import CheckpointError as CheckpointError
    from elasticrun.errors import CheckpointWarning as CheckpointWarning
    from elasticrun.errors import ElasticRunError as ElasticRunError
    from elasticrun.errors import JobStopped as JobStopped
    from elasticrun.errors import LoopOrderError as LoopOrderError
    from elasticrun.errors import StateNameError as StateNameError
    from elasticrun.launcher.calling import launch as launch
    from elasticrun.metrics import Accumulator as Accumulator
    from elasticrun.parallel import AdaptiveDataParallel as AdaptiveDataParallel
    from elasticrun.states import State as State
    from elasticrun.states import Variables as Variables
    from elasticrun.states import once as once
    from elasticrun.states import register as register

# Handed on at first use (PEP 562), so that importing elasticrun does not import torch.
_MODULES = {
    "elasticrun.atomic": ("AtomicDirectory", "atomic_save"),
    "elasticrun.current": (
        "current_dataloader",
        "current_job",
        "device",
        "generation",
        "init",
        "load_state",
        "local_rank",
        "rank",
        "request_checkpoint",
        "request_stop",
        "save_all_states",
        "world_size",
    ),
    "elasticrun.data.elastic_sampler": ("ElasticSampler",),
    "elasticrun.data.loader": ("AdaptiveDataLoader",),
    "elasticrun.epoch": (
        "current_epoch",
        "finished_epochs",
        "remaining_epochs_until",
    ),
    "elasticrun.errors": (
        "AgreementError",
        "CheckpointError",
        "CheckpointWarning",
        "ElasticRunError",
        "JobStopped",
        "LoopOrderError",
        "StateNameError",
    ),
    "elasticrun.launcher.calling": ("launch",),
    "elasticrun.metrics": ("Accumulator",),
    "elasticrun.parallel": ("AdaptiveDataParallel",),
    "elasticrun.states": ("State", "Variables", "once", "register"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("elasticrun.version").version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'elasticrun' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
