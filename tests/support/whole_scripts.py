"""Whole scripts, run in replicas; left at steps of optimizers."""

from __future__ import annotations

import contextlib
import gzip
import importlib.util
import os
import signal
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from elasticrun import JobStopped, rank, world_size
from elasticrun.job import current
from tests.support.programs import request_stop_and_wait


@dataclass(frozen=True)
class Leave:
    """How and after how many steps of optimizers the last rank leaves a script."""

    how: Literal["stop", "kill"]
    after: int


@dataclass
class Run:
    """Runs a script's source in a directory, as a replica or by itself.

    Attributes:
        directory: Has the checkpoints, the trace, what each rank printed, and in `work`
            what the script writes.
        argv: The script's path and arguments, as it finds them.
    """

    source: str
    directory: Path
    leave: Leave | None = None
    argv: tuple[str, ...] = ("script",)

    def __call__(self) -> list[np.ndarray] | None:
        """Return what the optimizers' parameters are at the end; None after a stop."""
        (self.directory / "work").mkdir(parents=True, exist_ok=True)
        os.chdir(self.directory / "work")
        os.environ["ELASTICRUN_CHECKPOINT_DIR"] = str(self.directory / "checkpoints")
        os.environ["ELASTICRUN_TRACE"] = str(self.directory / "trace")
        os.environ["ELASTICRUN_SAVE_INTERVAL"] = "off"
        os.environ["ELASTICRUN_SAVE_EVERY"] = "3"
        os.environ["ELASTICRUN_JOB"] = "port"
        sys.modules["sklearn.datasets"] = digits_alone()
        sys.argv = list(self.argv)
        sys.path.insert(0, os.path.dirname(self.argv[0]))
        torch.set_num_threads(1)
        self._optimizers: dict[int, Optimizer] = {}
        self._num_steps = 0
        printed = self.directory / f"printed-{os.environ['RANK']}"
        hook = register_optimizer_step_post_hook(self._after_step)
        try:
            with (
                printed.open("a", buffering=1) as output,
                contextlib.redirect_stdout(output),
                contextlib.suppress(JobStopped),
            ):
                exec(compile(self.source, "script", "exec"), {"__name__": "__main__"})
                return [
                    parameter.detach().numpy().copy()
                    for optimizer in self._optimizers.values()
                    for group in optimizer.param_groups
                    for parameter in group["params"]
                ]
        finally:
            hook.remove()
            current.close_current_job()
        return None

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._optimizers.setdefault(id(optimizer), optimizer)
        self._num_steps += 1
        if self.leave is None or self._num_steps != self.leave.after:
            return
        if rank() != world_size() - 1:
            return
        if self.leave.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        request_stop_and_wait()


def run_each(*runs: Run) -> list[list[np.ndarray] | None]:
    """Run scripts one after another in this process."""
    return [run() for run in runs]


def printed(directory: Path) -> list[str]:
    """Return what rank 0 printed, once where a killed replica's steps came again."""
    return list(dict.fromkeys((directory / "printed-0").read_text().splitlines()))


def digits_alone() -> types.ModuleType:
    """Return scikit-learn's digits without the second that importing it takes."""
    module = types.ModuleType("sklearn.datasets")
    module.__dict__["load_digits"] = load_digits
    return module


def load_digits() -> types.SimpleNamespace:
    spec = importlib.util.find_spec("sklearn")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (folder,) = spec.submodule_search_locations
    with gzip.open(Path(folder, "datasets", "data", "digits.csv.gz")) as file:
        rows = np.loadtxt(file, delimiter=",")
    return types.SimpleNamespace(
        images=rows[:, :-1].reshape(-1, 8, 8), target=rows[:, -1].astype(int)
    )
