"""The recipe of docs/howto/slurm.md on a real Slurm, and replicas that srun starts."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elasticrun.testing import read_trace
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import PROGRAM, REPOSITORY, processes_of, variables
from tests.support.slurm import Slurm, cluster
from tests.support.stage import Stage, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.wide]

RECIPE = re.compile(r"```sh\n(#!/bin/bash\n#SBATCH.*?)```", re.DOTALL)
MORTAL = REPOSITORY / "tests" / "support" / "scripts" / "mortal.py"
MOST_GENERATIONS = 12
# Each is held behind the place at which the one before it can have been stopped.
HOLDS = [f"--hold {number}:{3 * number + 3}" for number in range(MOST_GENERATIONS)]
# What must be another thing on a machine that has neither GPUs nor time.
CHANGES = {
    " --gpus-per-node=4": "",
    "--replicas 4": "--replicas 1 --no-lint --address 127.0.0.1",
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
    [text] = RECIPE.findall((REPOSITORY / "docs" / "howto" / "slurm.md").read_text())
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


def wait_until_held(stage: Stage, slurm: Slurm, jobs: list[str], least: int) -> int:
    """Wait until two replicas of a generation are held; return its number."""
    found: list[int] = []

    def is_held() -> bool:
        for job in jobs:
            slurm.hurry(job)
            state = slurm.show(job)["JobState"]
            assert state not in ("FAILED", "CANCELLED"), outputs(stage)
        found.extend(
            number
            for number in range(least, MOST_GENERATIONS)
            if stage.has(f"held-{number}-0", f"held-{number}-1")
        )
        return bool(found)

    wait_until(is_held, f"generation {least}")
    return found[0]


def outputs(stage: Stage) -> str:
    return "".join(path.read_text() for path in sorted(stage.root.glob("output*")))


def end_of(stage: Stage, slurm: Slurm, *jobs: str) -> None:
    """Let the jobs come to their end, and check what was trained."""
    for generation in range(MOST_GENERATIONS):
        stage.mark(f"go-{generation}")

    def have_ended() -> bool:
        for job in jobs:
            slurm.hurry(job)
        return {slurm.show(job)["JobState"] for job in jobs} == {"COMPLETED"}

    wait_until(have_ended, "its end")
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)
    assert 2 in {line["world_size"] for line in read_trace(stage.trace)}


def test_the_recipe_goes_on_whatever_ends_an_allocation(
    stage: Stage, slurm: Slurm
) -> None:
    """scontrol requeue, preemption, and the warning before the time limit."""
    output = stage.root / "output"
    options = ["--parsable", "--time=10", "--job-name=test", f"--output={output}"]
    job = slurm.run("sbatch", *options, recipe(stage)).strip()

    number = wait_until_held(stage, slurm, [job], 0)
    slurm.run("scontrol", "requeue", job)
    number = wait_until_held(stage, slurm, [job], number + 1)
    mark = stage.root / "marks" / "preempted"
    wrap = f"--wrap=touch {mark}"
    slurm.run("sbatch", "--partition=high", "--nodes=4", "--exclusive", wrap,
              f"--output={output}-2", "--wait")  # fmt: skip
    assert mark.exists()
    number = wait_until_held(stage, slurm, [job], number + 1)
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=1")
    wait_until(lambda: "SIGUSR1: saving" in output.read_text(), "the warning")
    wait_until(lambda: slurm.show(job)["JobState"] == "PENDING", "the queue")
    slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=10")
    end_of(stage, slurm, job)


def test_the_time_limit_saves_without_a_warning(stage: Stage, slurm: Slurm) -> None:
    """SIGTERM comes to all, and SIGKILL after KillWait; the same command resumes."""
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


def test_nodes_of_an_array_come_and_go(stage: Stage, slurm: Slurm) -> None:
    """Both are sent back into the queue: none is special."""
    options = ["--parsable", "--time=10", "--job-name=test", "--array=0-1"]
    options += ["--nodes=1", f"--output={stage.root}/output-%a"]
    job = slurm.run("sbatch", *options, recipe(stage)).strip()
    tasks = [f"{job}_{number}" for number in range(2)]
    number = wait_until_held(stage, slurm, tasks, 0)
    for task in tasks:
        slurm.run("scontrol", "requeue", task)
        number = wait_until_held(stage, slurm, tasks, number + 1)
    end_of(stage, slurm, *tasks)


def test_a_node_leaves_before_the_allocation_shrinks(
    stage: Stage, slurm: Slurm
) -> None:
    output = stage.root / "output"
    options = ["--parsable", "--time=10", "--job-name=test", f"--output={output}"]
    job = slurm.run("sbatch", *options, recipe(stage)).strip()
    wait_until_held(stage, slurm, [job], 0)
    names = ["scontrol", "show", "hostnames", slurm.show(job)["NodeList"]]
    *stay, leaves = slurm.run(*names).split()
    step = ["--overlap", "--nodes=1", "--ntasks=1", f"--jobid={job}", "-w", leaves]
    pid = launcher_on(stage, leaves)  # All nodes are this machine, and one name.
    said = slurm.run("srun", *step, "elasticrun", "leave", pid)
    assert "saving and leaving" in said
    slurm.run("scontrol", "update", f"JobId={job}", f"NodeList={','.join(stay)}")
    for generation in range(MOST_GENERATIONS):
        stage.mark(f"go-{generation}")
    # The step ends with the highest code of its tasks, so the script asks for more.
    wait_until(lambda: slurm.show(job)["JobState"] == "PENDING", "the queue")
    assert "finished after" in outputs(stage)
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)
    assert {line["world_size"] for line in read_trace(stage.trace)} == {1, 2}
    slurm.run("scancel", job)


def launcher_on(stage: Stage, node: str) -> int:
    """Return the launcher that a step has started on a node."""
    for pid in processes_of(stage):
        process = psutil.Process(pid)
        is_launcher = process.cmdline()[1:4] == ["-m", "elasticrun", "run"]
        if is_launcher and process.environ().get("SLURMD_NODENAME") == node:
            return pid
    raise AssertionError(f"no launcher on {node}")


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


def test_a_task_that_dies_is_rescued_by_another_one(
    stage: Stage, slurm: Slurm, tmp_path: Path
) -> None:
    """The step fails; the same command again goes on where it was."""
    task = ["srun", "--ntasks=2", "--nodes=1", sys.executable, MORTAL]
    calm = {"ELASTICRUN_CHECKPOINT_DIR": str(tmp_path / "calm")}
    [end] = re.findall("END .*", slurm.run(*task, **calm))
    dies = {
        "ELASTICRUN_RESCUE": "always",
        "DEATHS": '[[0, "backward", 0, 4], [1, "forward", 1, 2]]',
    }
    for _ in range(2):
        with pytest.raises(AssertionError, match="Killed"):
            slurm.run(*task, **dies)
    assert re.findall("END .*", slurm.run(*task, **dies)) == [end]
    assert [each.get("rescue") for each in stage.committed()[:2]] == [
        "by rank 1 after the death of rank 0",
        "by rank 0 after the death of rank 1",
    ]
