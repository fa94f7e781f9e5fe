"""Fixtures of all tests: a clean environment, a job, generators given back."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, settings

from elasticrun.job import current
from elasticrun.testing import Job
from tests.support.generations import generation
from tests.support.held import Held, held_writer
from tests.support.object_store import Bucket, Door, credentials, s3_server

_NULL_HANDLER = logging.NullHandler()
_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)

# A shell that starts the tests in its background lets them ignore SIGINT, `nohup` lets
# them ignore SIGHUP, and with them every process that a test interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How long an example takes says nothing here: the machine may be busy. All runs have
# the same examples, so that a test fails for whoever broke it; `pytest
# --hypothesis-profile search` draws others.
settings.register_profile(
    "search", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "elasticrun", settings.get_profile("search"), derandomize=True
)
settings.load_profile("elasticrun")

# One forkserver serves the replicas and the workers of loaders. Whoever starts it first
# must have it import torch, or every replica would take seconds to do so itself.
multiprocessing.set_forkserver_preload(["elasticrun.testing.preloaded"])


def _is_fit_for_tests(folder: str) -> bool:
    """Return whether there is room for what tests write, some of which they execute."""
    return (
        os.access(folder, os.W_OK)
        and shutil.disk_usage(folder).free > 4 << 30
        and not os.statvfs(folder).f_flag & os.ST_NOEXEC
    )


# Many tests save at each boundary, and would mostly wait until a disk has it. Whoever
# wants one says where: PYTEST_DEBUG_TEMPROOT=/tmp.
if sys.platform == "linux" and _is_fit_for_tests("/dev/shm"):
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return how many processes run the tests, which mostly wait for others."""
    return min(4 * (os.cpu_count() or 1), 8)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let the longest tests come first, so that none of them runs on alone at the end.

    Processes of xdist begin with a part of the list each, and steal from its end.
    """
    seconds = {
        item: mark.args[0]
        for item in items
        if (mark := item.get_closest_marker("slow")) is not None and mark.args
    }
    longest = sorted(seconds, key=seconds.__getitem__, reverse=True)
    others = [item for item in items if item not in seconds]
    num = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    items[:] = []
    for part in range(num):
        start, stop = (len(others) * each // num for each in (part, part + 1))
        items += [*longest[part::num], *others[start:stop]]


@pytest.fixture(autouse=True)
def clean_env(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the variables of whoever runs the tests."""
    for name in list(os.environ):
        if name in _VARIABLES or name.startswith("ELASTICRUN_"):
            monkeypatch.delenv(name)
    if sys.argv[0] == "-c":  # In a process of xdist's.
        monkeypatch.setattr(sys, "argv", ["pytest", *sys.argv[1:]])


@pytest.fixture(autouse=True)
def messages_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let messages go to `caplog`, as a script lets them go to its own handlers."""
    monkeypatch.setattr(logging.getLogger("elasticrun"), "handlers", [_NULL_HANDLER])


@pytest.fixture(autouse=True)
def no_job_left() -> Iterator[None]:
    """Close a job that a test has started by its first use."""
    yield
    current.close_current_job()


@pytest.fixture(autouse=True)
def generators_given_back() -> Iterator[None]:
    """Let no test depend on what another one drew or seeded."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """Install a job that keeps its checkpoints in `tmp_path`."""
    with generation(tmp_path / "checkpoints") as installed:
        yield installed


@pytest.fixture
def group() -> Iterator[None]:
    """Let this process be the only member of a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def held() -> Iterator[Held]:
    """Hold every save in flight until the test lets it go."""
    with held_writer() as held:
        yield held


@pytest.fixture(scope="session")
def s3_door() -> Iterator[Door]:
    """Run an S3-compatible server, once for all tests that want one."""
    for needed in ("s3fs", "moto", "flask", "flask_cors"):
        pytest.importorskip(needed, reason="requirements-dev.txt installs it")
    with s3_server() as port:
        yield Door(port)


@pytest.fixture
def bucket(s3_door: Door, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """Return an empty bucket, which this process can reach."""
    for name, value in credentials(s3_door.port).items():
        monkeypatch.setenv(name, value)
    s3_door.reopen()
    yield Bucket(s3_door)
    s3_door.reopen()
