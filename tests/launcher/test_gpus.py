"""Replicas can use GPUs whatever their program, or the forkserver for it, imports.

The GPUs are pretended: no machine that runs these tests needs one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.launcher.running import REPOSITORY, Running, running
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow

PRETENDED = REPOSITORY / "tests" / "support" / "pretended_gpus"

TRAIN = """
import os, time
import torch
import {module}
import elasticrun

elasticrun.init("checkpoints", save_interval="off")
print(elasticrun.generation(), elasticrun.device(), flush=True)
loader = elasticrun.AdaptiveDataLoader(range(40), 4)
for epoch in elasticrun.remaining_epochs_until(2):
    for batch in loader:
        if elasticrun.generation() == 0 and epoch == 1 and loader.batch_index == 3:
            open("held", "w").write(str(os.getpid()))
            while True:
                time.sleep(0.01)
"""


ON_GPU = {
    "PYTHONPATH": os.pathsep.join(
        map(str, [PRETENDED, PRETENDED / "site-packages", REPOSITORY])
    ),
    "NUM_GPUS": 1,
}
OWN_INTERPRETER = "a forked replica could not use GPUs, so it starts an interpreter of"


def test_torch_says_whether_a_fork_can_use_gpus() -> None:
    """By a private name; without it replicas would no longer be forked.

    By another one those wait that run beside a generation which has the GPUs.
    """
    assert torch.cuda._is_in_bad_fork() is False
    assert callable(torch.cuda._lazy_call)


@pytest.mark.wide
def test_an_import_that_asks_for_gpus_is_left_to_the_replicas(tmp_path: Path) -> None:
    stage = Stage(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(module="asks_for_gpus"))
    with running(stage, "--replicas", 1, script=script, **ON_GPU) as job:
        pid = pid_of_held(stage)
        wait_until(lambda: job.status()["state"] == "training")
        [member] = job.status()["members"]
        assert (member["gpu_memory"], member["gpu_utilization"]) == (0, 7)
        refused = job.ask("scale", 2, job.pid)
        assert refused.returncode != 0
        assert (
            "2 replicas: the job trains on GPUs, and each replica needs"
            in refused.stderr
        )
        os.kill(pid, signal.SIGKILL)
        assert job.wait() == 0, job.events
    assert devices(job) == ["0 cuda:0", "1 cuda:0"]
    assert "could not use GPUs" not in job.events  # It was known before the fork.


def pid_of_held(stage: Stage) -> int:
    """Return the replica that is held in the second epoch, once it is."""
    path = stage.root / "held"
    wait_until(lambda: path.exists() and path.read_text(), "the second epoch")
    return int(path.read_text())


def devices(job: Running) -> list[str]:
    """Return each generation with its device."""
    lines = [line.split() for line in job.output.splitlines() if "cuda" in line]
    return [" ".join(words[-2:]) for words in lines]


@pytest.mark.wide
def test_a_fork_that_turns_out_to_be_barred_begins_anew(stage: Stage) -> None:
    """As by a plug-in of torch; nothing showed when the forkserver had imported it."""
    plug_in = stage.root / "site" / "asks_later-1.dist-info"
    plug_in.mkdir(parents=True)
    (plug_in / "METADATA").write_text("Name: asks_later\nVersion: 1\n")
    text = "[torch.backends]\nasks = asks_later:ask\n"
    (plug_in / "entry_points.txt").write_text(text)
    more = ON_GPU | {"PYTHONPATH": f"{ON_GPU['PYTHONPATH']}:{plug_in.parent}"}
    script = stage.root / "train.py"
    script.write_text(TRAIN.format(module="math"))
    options = ["--replicas", 1, "--max-restarts", 1]
    with running(stage, *options, script=script, **more) as job:
        os.kill(pid_of_held(stage), signal.SIGKILL)
        assert job.wait() == 0, job.events
    assert devices(job) == ["0 cuda:0", "1 cuda:0"]
    assert job.events.count(OWN_INTERPRETER) == 2
    assert job.events.count("crashed at") == 1  # By the kill.
