"""elasticrun: training loops that go on at the same sample after every restart."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elasticrun.checkpoint.atomic import AtomicDirectory as AtomicDirectory
    from elasticrun.checkpoint.atomic import atomic_save as atomic_save
    from elasticrun.data.combined import CombinedLoader as CombinedLoader
    from elasticrun.data.combined import current_dataloader as current_dataloader
    from elasticrun.data.loader import AdaptiveDataLoader as AdaptiveDataLoader
    from elasticrun.data.samplers import ElasticSampler as ElasticSampler
    from elasticrun.data.samplers import LengthGroups as LengthGroups
    from elasticrun.data.samplers import RandomWindows as RandomWindows
    from elasticrun.data.samplers import WeightedDraws as WeightedDraws
    from elasticrun.data.streams.files import ParquetRows as ParquetRows
    from elasticrun.data.streams.files import ResidentShards as ResidentShards
    from elasticrun.data.streams.files import TarShards as TarShards
    from elasticrun.data.streams.files import TextLines as TextLines
    from elasticrun.data.streams.files import TokenFiles as TokenFiles
    from elasticrun.data.streams.mixed import Mixed as Mixed
    from elasticrun.data.streams.packed import Packed as Packed
    from elasticrun.data.streams.streams import Streams as Streams
    from elasticrun.data.streams.uncounted import Endless as Endless
    from elasticrun.data.streams.uncounted import Uncounted as Uncounted
    from elasticrun.errors import AgreementError as AgreementError
    from elasticrun.errors import CheckpointError as CheckpointError
    from elasticrun.errors import CheckpointWarning as CheckpointWarning
    from elasticrun.errors import ElasticRunError as ElasticRunError
    from elasticrun.errors import JobStopped as JobStopped
    from elasticrun.errors import LoopOrderError as LoopOrderError
    from elasticrun.errors import StateNameError as StateNameError
    from elasticrun.job.accumulator import Accumulator as Accumulator
    from elasticrun.job.current import current_job as current_job
    from elasticrun.job.current import device as device
    from elasticrun.job.current import generation as generation
    from elasticrun.job.current import init as init
    from elasticrun.job.current import load_state as load_state
    from elasticrun.job.current import local_rank as local_rank
    from elasticrun.job.current import rank as rank
    from elasticrun.job.current import request_checkpoint as request_checkpoint
    from elasticrun.job.current import request_stop as request_stop
    from elasticrun.job.current import save_all_states as save_all_states
    from elasticrun.job.current import world_size as world_size
    from elasticrun.job.foreign import ForeignLoop as ForeignLoop
    from elasticrun.job.log_file import LogFile as LogFile
    from elasticrun.job.remaining import current_epoch as current_epoch
    from elasticrun.job.remaining import finished_epochs as finished_epochs
    from elasticrun.job.remaining import (
        remaining_epochs_until as remaining_epochs_until,
    )
    from elasticrun.job.remaining import remaining_steps_until as remaining_steps_until
    from elasticrun.job.states import State as State
    from elasticrun.job.states import Variables as Variables
    from elasticrun.job.states import once as once
    from elasticrun.job.states import register as register
    from elasticrun.launcher.launch import launch as launch
    from elasticrun.parallel.module import AdaptiveDataParallel as AdaptiveDataParallel

# Handed on at first use (PEP 562), so that importing elasticrun does not import torch.
_NAMES = {
    "checkpoint.atomic": "AtomicDirectory atomic_save",
    "data.combined": "CombinedLoader current_dataloader",
    "data.loader": "AdaptiveDataLoader",
    "data.samplers": "ElasticSampler LengthGroups RandomWindows WeightedDraws",
    "data.streams.files": "ParquetRows ResidentShards TarShards TextLines TokenFiles",
    "data.streams.mixed": "Mixed",
    "data.streams.packed": "Packed",
    "data.streams.streams": "Streams",
    "data.streams.uncounted": "Endless Uncounted",
    "errors": "AgreementError CheckpointError CheckpointWarning ElasticRunError "
    "JobStopped LoopOrderError StateNameError",
    "job.accumulator": "Accumulator",
    "job.current": "current_job device generation init load_state local_rank rank "
    "request_checkpoint request_stop save_all_states world_size",
    "job.foreign": "ForeignLoop",
    "job.log_file": "LogFile",
    "job.states": "State Variables once register",
    "job.remaining": "current_epoch finished_epochs remaining_epochs_until "
    "remaining_steps_until",
    "launcher.launch": "launch",
    "parallel.module": "AdaptiveDataParallel",
}
_MODULE_OF = {name: module for module in _NAMES for name in _NAMES[module].split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return import_module("elasticrun.checkpoint.manifest").version()
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'elasticrun' has no attribute {name!r}")
    module = import_module(f"elasticrun.{_MODULE_OF[name]}")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
