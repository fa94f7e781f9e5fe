"""Replicas can use GPUs whatever their program, or the forkserver for it, imports.

The GPUs are pretended: no machine that runs these tests needs one.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.launcher.running import REPOSITORY, running
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow

PRETENDED = REPOSITORY / "tests" / "support" / "pretended_gpus"

TRAIN = """
import os, time
import torch
{top}import asks_for_gpus
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


def test_torch_says_whether_a_fork_can_use_gpus() -> None:
    """By a private name; without it replicas would no longer be forked."""
    assert torch.cuda._is_in_bad_fork() is False


@pytest.mark.parametrize("top", ["", "print('begins')\n"], ids=["first", "later"])
def test_an_import_that_asks_for_gpus_is_left_to_the_replicas(
    tmp_path: Path, top: str
) -> None:
    """Below the first line the forkserver learns it only for the second generation."""
    stage = Stage(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(TRAIN.format(top=top))
    path = [PRETENDED, PRETENDED / "site-packages", REPOSITORY]
    with running(
        stage,
        "--replicas",
        1,
        script=script,
        PYTHONPATH=os.pathsep.join(map(str, path)),
        NUM_GPUS=1,
    ) as job:
        wait_until(lambda: (tmp_path / "held").exists(), "the second epoch")
        wait_until(lambda: job.status()["state"] == "training")
        refused = job.ask("scale", 2, job.pid)
        assert refused.returncode != 0
        assert "2 replicas: the job trains on GPUs, of which 1 can be" in refused.stderr
        os.kill(int((tmp_path / "held").read_text()), signal.SIGKILL)
        assert job.wait() == 0, job.events
    lines = [line for line in job.output.splitlines() if "cuda" in line]
    assert [line.split()[-2:] for line in lines] == [["0", "cuda:0"], ["1", "cuda:0"]]
