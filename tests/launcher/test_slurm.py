"""The recipe of docs/usage.md on a real Slurm, and replicas that srun starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.testing import read_trace
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import PROGRAM, REPOSITORY, variables
from tests.support.slurm import Slurm, cluster
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow

RECIPE = re.compile(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", re.DOTALL)
# What must be another thing on a machine that has neither GPUs nor time.
CHANGES = {
    " --gpus-per-node=4": "",
    "--replicas 4": "--replicas 1 --no-lint",
    "train.py": f"{PROGRAM} $HOME --pace 0.7",
}


@pytest.fixture
def slurm(stage: Stage, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    programs = stage.root / "bin"
    programs.mkdir()
    command = programs / "elasticrun"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m elasticrun "$@"\n')
    command.chmod(0o755)
    own = variables(stage, HOME=stage.root)
    own["PATH"] = f"{programs}:{own['PATH']}"
    with cluster(tmp_path_factory.mktemp("slurm"), own) as slurm:
        yield slurm


def recipe(stage: Stage) -> Path:
    """Return the batch script of the documentation."""
    [text] = RECIPE.findall((REPOSITORY / "docs" / "usage.md").read_text())
    for before, after in CHANGES.items():
        assert before in text
        text = text.replace(before, after)
    path = stage.root / "recipe.sh"
    path.write_text(text)
    return path


def test_the_recipe_goes_on_whatever_ends_an_allocation(
    stage: Stage, slurm: Slurm
) -> None:
    """scontrol requeue, preemption, and the warning before the time limit."""
    output = stage.root / "output"
    options = ["--parsable", "--time=10", "--job-name=test", f"--output={output}"]
    job = slurm.run("sbatch", *options, recipe(stage)).strip()

    def generation() -> int:
        return max((line["generation"] for line in read_trace(stage.trace)), default=-1)

    def trains(least: int) -> bool:
        slurm.hurry(job)
        assert slurm.show(job)["JobState"] not in ("FAILED", "CANCELLED"), (
            output.read_text()
        )
        number = generation()
        return number >= least and stage.num_delivered(0, generation=number) > 2

    def wait_until_it_trains(least: int) -> int:
        wait_until(lambda: trains(least), f"generation {least}")
        return generation()

    wait_until_it_trains(0)
    slurm.run("scontrol", "requeue", job)
    number = wait_until_it_trains(1)
    mark = stage.root / "marks" / "preempted"
    wrap = f"--wrap=touch {mark}"
    slurm.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", wrap,
              f"--output={output}-2", "--wait")  # fmt: skip
    assert mark.exists()
    number = wait_until_it_trains(number + 1)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_until(lambda: "SIGUSR1: saving" in output.read_text(), "the warning")
    wait_until(lambda: slurm.show(job)["JobState"] == "PENDING", "the queue")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    wait_until_it_trains(number + 1)
    wait_until(lambda: slurm.show(job)["JobState"] == "COMPLETED", "its end")
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)
    assert {line["world_size"] for line in read_trace(stage.trace)} == {2}


TASK = """
import elasticrun
loader = elasticrun.AdaptiveDataLoader(list(range(12)), 6)
for batch in loader:
    pass
print("rank", elasticrun.rank(), "of", elasticrun.world_size())
"""


def test_tasks_of_srun_are_replicas(stage: Stage, slurm: Slurm) -> None:
    script = stage.root / "script.py"
    script.write_text(TASK)
    said = slurm.run("srun", "--ntasks=3", "--nodes=2", sys.executable, script)
    assert sorted(said.splitlines()) == [f"rank {rank} of 3" for rank in range(3)]
