"""Prepares a replica before a checked program runs in it."""

from __future__ import annotations

import functools
import os
import sys
from typing import Any

import torch

from elasticrun.check.replica.checked_job import CheckedJob
from elasticrun.check.replica.file_watch import know_opened_files
from elasticrun.check.replica.guard import guard_files
from elasticrun.check.replica.line_watch import LineWatch
from elasticrun.check.runs.plan import decode_plan
from elasticrun.job import current


def observe(order: dict[str, Any]) -> None:
    """Have this replica's program do what the plan in its order says."""
    plan = decode_plan(order["plan"])
    os.chdir(plan.directory)
    import_from_copy(plan.home, plan.directory)
    know_opened_files()
    guard_files(plan.writable, plan.guarded)
    if plan.is_float64:
        compute_in_double_precision()
    current.make_jobs_with(functools.partial(CheckedJob, plan))
    if plan.watched and order["rank"] == 0:
        LineWatch(plan).start()


def import_from_copy(home: str, copy: str) -> None:
    """Import modules of the user's directory from its copy."""
    for number, entry in enumerate(sys.path):
        if entry == home or entry.startswith(home + os.sep):
            moved = copy + entry.removeprefix(home)
            if os.path.isdir(moved):
                sys.path[number] = moved


def compute_in_double_precision() -> None:
    """Compute in double precision: new tensors, and the inputs of modules."""
    torch.set_default_dtype(torch.float64)
    widen: Any = _widen  # Its result stands for the arguments.
    torch.nn.modules.module.register_module_forward_pre_hook(widen)


def _widen(_: torch.nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        each.double()
        if isinstance(each, torch.Tensor) and each.dtype == torch.float32
        else each
        for each in arguments
    )
