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
MOST_GENERATIONS = 12
# Each is held behind the place at which the one before it can have been stopped.
HOLDS = [f"--hold {number}:{3 * number + 3}" for number in range(MOST_GENERATIONS)]
# What must be another thing on a machine that has neither GPUs nor time.
CHANGES = {
    " --gpus-per-node=4": "",
    "--replicas 4": "--replicas 1 --no-lint",
    "train.py": f"{PROGRAM} $HOME {' '.join(HOLDS)}",
}
WARNING = " --signal=B:USR1@120"


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


def recipe(stage: Stage, *, is_warned: bool = True) -> Path:
    """Return the batch script of the documentation."""
    [text] = RECIPE.findall((REPOSITORY / "docs" / "usage.md").read_text())
    for before, after in CHANGES.items():
        assert before in text
        text = text.replace(before, after)
    if not is_warned:
        assert WARNING in text
        text = text.replace(WARNING, "")
    path = stage.root / "recipe.sh"
    path.write_text(text)
    for generation in range(MOST_GENERATIONS):
        stage.mark(f"stop-{generation}")
    return path


def end_of(stage: Stage, slurm: Slurm, job: str) -> None:
    """Let the job come to its end, and check what it has trained."""
    for generation in range(MOST_GENERATIONS):
        stage.mark(f"go-{generation}")

    def has_ended() -> bool:
        slurm.hurry(job)
        return slurm.show(job)["JobState"] == "COMPLETED"

    wait_until(has_ended, "its end")
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)
    assert 2 in {line["world_size"] for line in read_trace(stage.trace)}


def test_the_recipe_goes_on_whatever_ends_an_allocation(
    stage: Stage, slurm: Slurm
) -> None:
    """scontrol requeue, preemption, and the warning before the time limit."""
    output = stage.root / "output"
    options = ["--parsable", "--time=10", "--job-name=test", f"--output={output}"]
    job = slurm.run("sbatch", *options, recipe(stage)).strip()

    def held(least: int) -> int | None:
        slurm.hurry(job)
        assert slurm.show(job)["JobState"] not in ("FAILED", "CANCELLED"), (
            output.read_text()
        )
        for number in range(least, MOST_GENERATIONS):
            if stage.has(f"held-{number}-0", f"held-{number}-1"):
                return number
        return None

    def wait_until_held(least: int) -> int:
        wait_until(lambda: held(least) is not None, f"generation {least}")
        number = held(least)
        assert number is not None
        return number

    number = wait_until_held(0)
    slurm.run("scontrol", "requeue", job)
    number = wait_until_held(number + 1)
    mark = stage.root / "marks" / "preempted"
    wrap = f"--wrap=touch {mark}"
    slurm.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", wrap,
              f"--output={output}-2", "--wait")  # fmt: skip
    assert mark.exists()
    number = wait_until_held(number + 1)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_until(lambda: "SIGUSR1: saving" in output.read_text(), "the warning")
    wait_until(lambda: slurm.show(job)["JobState"] == "PENDING", "the queue")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    end_of(stage, slurm, job)


def test_the_time_limit_saves_without_a_warning(stage: Stage, slurm: Slurm) -> None:
    """SIGTERM comes to all, and SIGKILL after KillWait; the same command goes on."""
    output = stage.root / "output"
    script = recipe(stage, is_warned=False)
    options = ["--parsable", "--job-name=test", f"--output={output}"]
    job = slurm.run("sbatch", *options, "--time=1", script).strip()
    wait_until(lambda: slurm.show(job)["JobState"] == "TIMEOUT", "the time limit")
    said = output.read_text()
    assert "SIGTERM: saving at the next boundary" in said
    assert "stopped; checkpoint 1 is saved" in said
    job = slurm.run("sbatch", *options, "--time=10", script).strip()
    end_of(stage, slurm, job)


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
