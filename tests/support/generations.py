"""Generations of a job in this process, one after another, at world size 1."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from elasticrun import JobStopped
from elasticrun.replicas.environment import Environment
from elasticrun.testing import Job, Settings, use_job

JOB = "test"  # The name that a script's file gives a job outside of tests.


class Crash(BaseException):
    """The replica dies here; nothing is saved."""


@contextmanager
def generation(
    directory: str | os.PathLike[str] | None = None,
    *,
    save_interval: float | str = "off",
    keep: int = 3,
    trace_dir: str | None = None,
    **settings: Any,
) -> Iterator[Job]:
    """Be a new process of the job: another start, and generators in any condition."""
    scramble_generators()
    given = Settings.read(
        {},
        job=JOB,
        checkpoint_dir=directory,
        save_interval=save_interval,
        keep=keep,
        trace_dir=trace_dir,
        **settings,
    )
    with use_job(Job(Environment(), given)) as job:
        yield job


def run_once(
    script: Callable[[], Any],
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Run one generation of a script; return its result, or None if it ended early."""
    with generation(directory, **options):
        try:
            return script()
        except (JobStopped, Crash):
            return None


def scramble_generators() -> None:
    """Leave the generators as a fresh process finds them: in no known state."""
    seed = int.from_bytes(os.urandom(4), "little")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def draw_from_each() -> tuple[float, float, float]:
    """Return a number from Python's, NumPy's and torch's generators."""
    return random.random(), float(np.random.rand()), float(torch.rand(()))
