"""Prepares a replica before a checked program runs in it."""

from __future__ import annotations

import functools
import os
import sys
from types import FrameType
from typing import Any

import torch

from elasticrun.check.replica.checked_job import (
    CheckedJob,
    Recorder,
    can_be_read,
    read_state,
)
from elasticrun.check.replica.fields import (
    VARIABLE_PREFIX,
    Field,
    fields_of_generators,
    is_of_state,
    is_own_file,
)
from elasticrun.check.replica.file_watch import (
    FILE_PREFIX,
    flush_opened_files,
    know_opened_files,
)
from elasticrun.check.replica.guard import guard_files
from elasticrun.check.scenarios import Plan, decode_plan
from elasticrun.job import current
from elasticrun.job.current import job_if_any

_MOST_LOOKS = 20_000
_ABSENT = object()


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


class LineWatch:
    """Traces the program's own files: states and files while they are replayed."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._root = os.path.dirname(plan.directory)
        self._watched = set(plan.watched)
        self._files = [name for name in plan.watched if name.startswith(FILE_PREFIX)]
        self._variables = [
            name.removeprefix(VARIABLE_PREFIX)
            for name in plan.watched
            if name.startswith(VARIABLE_PREFIX)
        ]
        self._has_random = any(name.startswith("random.") for name in plan.watched)
        self._last: dict[str, Field] = {}
        self._line: tuple[str, int] | None = None
        self._num_looks = 0
        self._is_looking = False

    def start(self) -> None:
        """Begin to look, at what this thread runs: the program's, and no other."""
        sys.settrace(self._on_call)

    def _on_call(self, frame: FrameType, *_: Any) -> Any:
        if not is_own_file(frame.f_code.co_filename, self._root):
            return None
        return self._on_line

    def _on_line(self, frame: FrameType, event: str, _: Any) -> Any:
        if self._is_looking or event == "exception":
            return self._on_line
        job = job_if_any()
        if isinstance(job, CheckedJob) and not job.is_closed:
            is_last = self._plan.generation > 0 and self._plan.until is None
            if job.recorder is None or (is_last and not job.progress.is_replaying):
                sys.settrace(None)
                return None
            self._is_looking = True  # A state that is read may run the program's code.
            try:
                self._look(job, job.recorder)
            finally:
                self._is_looking = False
        self._line = (frame.f_code.co_filename, frame.f_lineno)
        return self._on_line

    def _look(self, job: CheckedJob, recorder: Recorder) -> None:
        self._num_looks += 1
        if self._num_looks > _MOST_LOOKS:
            sys.settrace(None)
            return
        found = self._read(job, recorder)
        for name, field in found.items():
            # A state is registered as it is, but a variable may come with its value.
            is_new = name not in self._last and not name.startswith(VARIABLE_PREFIX)
            if self._line and not is_new and self._last.get(name, _ABSENT) != field:
                path, line = self._line
                recorder.note("line", field=name, path=path, line=line)
        self._last = found

    def _read(self, job: CheckedJob, recorder: Recorder) -> dict[str, Field]:
        found: dict[str, Field] = {}
        if self._variables:
            own = recorder.variables(job, only=self._variables)
            found |= {f"{VARIABLE_PREFIX}{name}": field for name, field in own.items()}
        if self._has_random:
            found |= fields_of_generators(job.device)
        if job.progress.is_replaying:
            for state in job.states:
                is_wanted = any(is_of_state(name, state.name) for name in self._watched)
                if is_wanted and can_be_read(state, job.world_size):
                    found |= read_state(state, job.world_size)
            if self._files:
                flush_opened_files()
                files = recorder.changed_files()
                for name in self._files:
                    found[name] = files.get(name.removeprefix(FILE_PREFIX))
        return {name: field for name, field in found.items() if name in self._watched}
