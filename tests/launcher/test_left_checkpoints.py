"""A rescaling leaves its checkpoint in memory: whoever dies then, nothing is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from elasticrun.checkpoint.storage.place import UNFORCED_NAME
from elasticrun.testing import read_trace
from tests.launcher.running import (
    Running,
    run,
    running,
    wait_until_nothing_is_left,
)
from tests.support.stage import Stage, wait_until

OWN = """
from torch import nn

def build(width):
    return nn.Sequential(nn.Linear(5, width), nn.ReLU(), nn.Linear(width, 1))
"""
SCRIPT = """
import argparse
import hashlib
import os
import signal
from pathlib import Path

import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import elasticrun
import own
from tests.support.loops import is_stop_due
from tests.support.stage import Stage, wait_until

parser = argparse.ArgumentParser()
parser.add_argument("stage", type=lambda text: Stage(Path(text)))
parser.add_argument("--scaled-at", type=int, default=-1)
parser.add_argument("--dies-in-save", type=int, default=0)
args = parser.parse_args()


class Fragile(elasticrun.State):
    num_saves = 0

    def save(self, fileobj):
        self.num_saves += 1
        if elasticrun.generation() == 0 and self.num_saves == args.dies_in_save:
            os.kill(os.getpid(), signal.SIGKILL)
        fileobj.write(b"whole")

    def load(self, fileobj):
        assert fileobj.read() == b"whole"


torch.manual_seed(3)
elasticrun.init(virtual_replicas=2)
inputs = torch.randn(96, 5)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())
net = own.build(8)
optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
model = elasticrun.AdaptiveDataParallel(net, optimizer)
scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2])
elasticrun.register(scheduler=scheduler)
fragile = Fragile("fragile")
loader = elasticrun.AdaptiveDataLoader(data, 8, shuffle=True)
begins = True
for epoch in elasticrun.remaining_epochs_until(3):
    for x, y in loader:
        if epoch == 0 and loader.batch_index == 3:
            elasticrun.save_all_states()
        optimizer.zero_grad()
        mse_loss(model(x), y).backward()
        optimizer.step()
        generation = elasticrun.generation()
        if generation == 0 and loader.batch_index == args.scaled_at:
            args.stage.mark("waits")
            wait_until(is_stop_due, "a scale")
        if generation > 0 and begins:  # Before any boundary of this generation.
            begins = False
            args.stage.mark(f"begun-{generation}")
            args.stage.wait_for(f"go-{generation}")
    scheduler.step()
if elasticrun.rank() == 0:
    values = [each.detach().numpy().tobytes() for each in net.parameters()]
    print("END", hashlib.sha256(b"".join(values)).hexdigest(), flush=True)
"""


def write_script(stage: Stage) -> Path:
    (stage.root / "own.py").write_text(OWN)
    script = stage.root / "train.py"
    script.write_text(SCRIPT)
    return script


def end_of(job: Running) -> str:
    return job.output[job.output.index("END") :]


def end_of_calm(folder: Path) -> str:
    """Return what comes of a training that nobody interrupts."""
    folder.mkdir()
    calm = Stage(folder)
    script = write_script(calm)
    return end_of(run(calm, "--replicas", 2, "--", calm.root, script=script))


def first_batches(stage: Stage) -> dict[int, int]:
    """Return the first batch of each generation."""
    lines = read_trace(stage.trace)[::-1]
    return {line["generation"]: line["batch"] for line in lines}


def scaled_and_held(job: Running) -> None:
    """Rescale a job, and hold what follows before its first boundary."""
    wait_until(lambda: job.stage.has("waits"), "the batch where it is rescaled")
    assert job.ask("scale", 1).returncode == 0
    wait_until(lambda: job.stage.has("begun-1"), f"generation 1\n{job.events}")


@pytest.mark.slow(30)
def test_whoever_is_killed_before_it_is_on_the_disk_nothing_is_lost(
    stage: Stage, tmp_path: Path
) -> None:
    script = write_script(stage)
    program = ["--", stage.root, "--scaled-at", 7]
    left = stage.checkpoints / "checkpoint-00000002" / UNFORCED_NAME

    with running(stage, "--replicas", 2, *program, script=script) as job:
        scaled_and_held(job)
        assert left.exists()
        # A new replica dies: the others read the same.
        os.kill(job.status()["members"][0]["pid"], signal.SIGKILL)
        wait_until(lambda: stage.has("begun-2"), f"generation 2\n{job.events}")
        assert left.exists()
        # And so does the launcher, with all that it has started.
        job.process.kill()
        wait_until_nothing_is_left(stage)
    assert left.exists()
    stage.mark("go-3")
    again = run(stage, "--replicas", 1, *program, script=script)
    assert again.wait() == 0, again.events
    assert not left.exists()
    assert end_of(again) == end_of_calm(tmp_path / "calm")
    assert first_batches(stage) == {0: 0, 1: 8, 2: 8, 3: 8}


@pytest.mark.slow(30)
@pytest.mark.wide
def test_who_is_killed_while_it_leaves_one_costs_at_most_what_came_after_the_last(
    stage: Stage, tmp_path: Path
) -> None:
    script = write_script(stage)
    program = ["--", stage.root, "--scaled-at", 7, "--dies-in-save", 2]
    stage.mark("go-1")
    with running(stage, "--replicas", 2, *program, script=script) as job:
        scaled_and_held(job)
        assert job.wait() == 0, job.events
    # The other replica may save where both were.
    assert first_batches(stage)[1] in (3, 8)
    assert end_of(job) == end_of_calm(tmp_path / "calm")


@pytest.mark.slow
@pytest.mark.wide
def test_what_a_killed_machine_has_not_on_its_disk_is_gone_back_from(
    stage: Stage,
) -> None:
    script = write_script(stage)
    program = ["--", stage.root, "--scaled-at", 7]
    with running(stage, "--replicas", 2, *program, script=script) as job:
        scaled_and_held(job)
        job.process.kill()
        wait_until_nothing_is_left(stage)
    path = stage.checkpoints / "checkpoint-00000002" / "model"
    path.write_bytes(bytes(path.stat().st_size))  # As a power cut may leave it.
    stage.mark("go-2")
    again = run(stage, "--replicas", 1, *program, script=script, name="again")
    assert "The machine went down before it was on the disk" in again.events
    assert first_batches(stage)[2] == 3
