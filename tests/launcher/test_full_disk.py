"""A disk that fills up under the launcher's eyes, before a generation has begun."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.launcher.running import REPOSITORY, Running, running
from tests.support.full_disk import small_disk
from tests.support.stage import Stage, freeze, wait_until

pytestmark = pytest.mark.slow

SCRIPT = f"""
import os, pathlib, sys
sys.path.insert(0, {str(REPOSITORY)!r})
import torch
from torch.utils.data import TensorDataset
from elasticrun import AdaptiveDataLoader, init, remaining_epochs_until
from tests.support.full_disk import fill

own = pathlib.Path("pid-" + os.environ["RANK"])
if not own.exists() and os.environ["RANK"] == "0":
    fill("checkpoints/x")
own.write_text(str(os.getpid()))
init()
loader = AdaptiveDataLoader(TensorDataset(torch.ones(8, 1)), batch_size=4)
for epoch in remaining_epochs_until(1):
    for (x,) in loader:
        print("trained", flush=True)
"""


@contextmanager
def waiting(stage: Stage) -> Iterator[Running]:
    """Start a job of two replicas, which wait for room as long as there is none."""
    script = stage.root / "script.py"
    script.write_text(SCRIPT)
    options = ["--replicas", 2, "--hang-timeout", 6, "--log-dir", stage.root / "logs"]
    with small_disk(stage.checkpoints), running(stage, *options, script=script) as job:
        job.wait_until_said("waiting for room")
        yield job


@pytest.mark.wide
def test_waiting_for_room_is_no_hang_but_a_replica_may_hang_meanwhile(
    stage: Stage,
) -> None:
    with waiting(stage) as job:
        said, hangs = "waiting for room", "passed no boundary"
        wait_until(lambda: job.events.count(said) == 4 or hangs in job.events)
        assert hangs not in job.events  # After 7 seconds.
        freeze(int((stage.root / "pid-1").read_text()))
        job.wait_until_said("rank 1 passed no boundary for 6 s")
        assert job.wait() == 1


def test_a_stop_ends_a_job_that_waits_for_room_at_once(stage: Stage) -> None:
    with waiting(stage) as job:
        job.process.terminate()
        assert job.wait() == 143
        assert "SIGTERM: ending; nothing was trained" in job.events
        assert "saving at the next boundary" not in job.events
