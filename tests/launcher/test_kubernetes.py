"""The manifest of the documentation, on a Kubernetes that is pretended."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.launcher.running import (
    REPOSITORY,
    WITHOUT_TORCH,
    processes_of,
    run,
    variables,
)
from tests.support.kubelet import PretendedJob, skip_without_namespaces
from tests.support.stage import Stage

pytestmark = [pytest.mark.slow(40), pytest.mark.wide]

MANIFEST = REPOSITORY / "docs" / "howto" / "kubernetes.yaml"
VOLUME = "/mnt/checkpoints"
NUM_SAMPLES = 9000
# Each batch takes its time, until the test has seen enough.
SCRIPT = """
import os, time
from pathlib import Path

import torch.distributed as dist

import elasticrun

shm = os.statvfs("/dev/shm")
print("shm", shm.f_blocks * shm.f_frsize)
loader = elasticrun.AdaptiveDataLoader(range(9000), 6, shuffle=True, num_workers=1)
for _ in elasticrun.remaining_epochs_until(1):
    for batch in loader:
        if elasticrun.world_size() > 1:
            dist.all_reduce(batch.sum())
        if Path("/mnt/checkpoints/fail").exists():
            raise ValueError("the loss is not a number")
        if not Path("/mnt/checkpoints/finish").exists():
            time.sleep(0.1)
"""


def documents(name: str) -> list[Any]:
    yaml = pytest.importorskip("yaml", reason="requirements-dev.txt installs it")
    return list(yaml.safe_load_all((MANIFEST.parent / name).read_text()))


@pytest.fixture
def manifest() -> Any:
    return documents(MANIFEST.name)[0]


@pytest.fixture
def job(stage: Stage, manifest: Any) -> Iterator[PretendedJob]:
    skip_without_namespaces()
    (stage.root / "script.py").write_text(SCRIPT)

    def command(words: list[str]) -> list[str]:
        """Return it for a machine without GPUs, of which all pods have one address."""
        assert (words[0], words[-1]) == ("elasticrun", "train.py")
        own = ["--replicas", "1", "--address", "127.0.0.1", "--save-interval", "1"]
        options = [*words[1:-1], *own, "--max-restarts", "0"]
        return [sys.executable, "-m", *words[:1], *options, f"{VOLUME}/script.py"]

    own = variables(stage, TMPDIR="/mnt", ELASTICRUN_TRACE=f"{VOLUME}/trace")
    del own["ELASTICRUN_JOB"], own["ELASTICRUN_CHECKPOINT_DIR"]
    with ExitStack() as stack:
        job = PretendedJob(manifest, stage.root, command=command, variables=own)
        stack.callback(job.close)
        yield job


def wait_until_trains(
    job: PretendedJob, stage: Stage, number: int, *, after: int = -1
) -> int:
    """Wait for a generation in which all pods train that there are to be.

    A pod that was started just now would not hear a signal: its process 1 has no
    handler yet.

    Args:
        after: The generation before.

    Returns:
        Its number.
    """

    def newest() -> tuple[int, int]:
        """Return the newest generation, and how many of it have trained a batch."""
        paths = (stage.root / "trace").glob("*.jsonl")
        found = [int(p.stem.partition("-")[0]) for p in paths if p.stat().st_size]
        number = max(found, default=-1)
        return number, found.count(number)

    def trains() -> bool:
        assert job.state == "Running", job.ended
        generation, size = newest()
        return generation > after and size == len(job.pods) == number

    job.wait_until(trains, f"{number} pods")
    return newest()[0]


def finish(job: PretendedJob, stage: Stage) -> None:
    (stage.root / "finish").touch()
    job.wait_until(lambda: job.state != "Running", "the end")
    assert job.state == "Complete", job.ended
    assert processes_of(stage) == []
    assert stage.delivered() == list(range(NUM_SAMPLES))


def test_pods_are_evicted_added_and_removed_at_no_cost(
    job: PretendedJob, stage: Stage
) -> None:
    last = wait_until_trains(job, stage, 3)
    for _ in range(2):  # Each time one that has been there longest: none is special.
        pod = job.pods[0]
        job.evict(pod)
        last = wait_until_trains(job, stage, 3, after=last)
        assert job.ended[-1] == (pod.name, 143, "Ignore")
    job.scale(2)
    last = wait_until_trains(job, stage, 2, after=last)
    assert job.ended[-1][1:] == (143, "Deleted")
    job.suspend()
    job.wait_until(lambda: not job.pods, "the end of all")
    job.resume()
    job.scale(3)
    wait_until_trains(job, stage, 3, after=last)
    finish(job, stage)
    stage.check_exactly_once(NUM_SAMPLES)
    assert {code for _, code, action in job.ended if action == "Succeeded"} == {0}
    logs = stage.root / "train" / "logs"
    said = "".join(path.read_text() for path in logs.glob("*/*.log"))
    assert f"shm {16 << 30}\n" in said
    assert "runs on node 0 (train-" in said


def test_a_pod_that_is_killed_costs_what_came_after_the_last_checkpoint(
    job: PretendedJob, stage: Stage, manifest: Any
) -> None:
    """With 64 MiB of shared memory, too."""
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    container["volumeMounts"] = [
        each for each in container["volumeMounts"] if each["name"] != "shm"
    ]
    last = wait_until_trains(job, stage, 3)
    victim = job.pods[0]
    victim.signal(signal.SIGKILL)
    wait_until_trains(job, stage, 3, after=last)
    assert job.ended == [(victim.name, 137, "Count")]
    finish(job, stage)
    logs = stage.root / "train" / "logs"
    said = "".join(path.read_text() for path in logs.glob("*/*.log"))
    assert f"shm {64 << 20}\n" in said


def test_a_program_that_fails_is_not_started_again(
    job: PretendedJob, stage: Stage
) -> None:
    wait_until_trains(job, stage, 3)
    (stage.root / "fail").touch()
    job.wait_until(lambda: job.state == "Failed" and not job.pods, "the failure")
    assert (1, "FailJob") in {end[1:] for end in job.ended}
    assert len(job.ended) == 3


def validate(manifest: Any, *, error: str = "") -> None:
    """By the schemas of the oldest and the newest version that are known."""
    schemas = pytest.importorskip(
        "kubernetes_validate", reason="requirements-dev.txt installs it"
    )
    for version in ("1.31", schemas.latest_version()):
        if not error:
            schemas.validate(manifest, version, strict=True)
            continue
        with pytest.raises(schemas.ValidationError, match=error):
            schemas.validate(manifest, version, strict=True)


def test_the_manifest_is_valid(manifest: Any) -> None:
    validate(manifest)
    manifest["spec"]["podReplacementPolice"] = "Failed"
    validate(manifest, error="podReplacementPolice")


def test_kueues_manifest_is_the_same_in_a_queue(manifest: Any) -> None:
    [queued] = documents("kueue.yaml")
    validate(queued)
    del queued["metadata"]["labels"], queued["metadata"]["annotations"]
    assert queued == manifest


def pytorchjob() -> tuple[list[str], Any]:
    """Return the command of a pod, and its template in an object that is known."""
    [job] = documents("pytorchjob.yaml")
    template = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    [container] = template["spec"]["containers"]
    known = {"apiVersion": "v1", "kind": "PodTemplate", "template": template}
    return container["command"], known


def trainjob() -> tuple[list[str], Any]:
    job, runtime = documents("trainjob.yaml")
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    [node] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    known = {"apiVersion": "batch/v1", "kind": "Job", "spec": node["template"]["spec"]}
    return job["spec"]["trainer"]["command"], known


# What Kubeflow 1.9 and its Trainer 2.3 set for torchrun.
BY_PYTORCHJOB = {"PET_NNODES": 3}
BY_TRAINJOB = {
    "PET_NNODES": 3,
    "PET_NPROC_PER_NODE": 8,
    "PET_NODE_RANK": 0,
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": 29400,
}


@pytest.mark.parametrize(
    ("load", "own"), [(pytorchjob, BY_PYTORCHJOB), (trainjob, BY_TRAINJOB)]
)
def test_kubeflows_manifests_are_valid_and_their_command_runs(
    stage: Stage,
    manifest: Any,
    load: Callable[[], tuple[list[str], Any]],
    own: dict[str, object],
) -> None:
    """The schemas of Kubeflow's own objects are not at hand; those of pods are."""
    command, known = load()
    validate({**known, "metadata": {"name": "train"}})
    [container] = manifest["spec"]["template"]["spec"]["containers"]
    assert command == container["command"]
    script = stage.root / "script.py"
    script.write_text("import os; print('of', os.environ['WORLD_SIZE'])")
    here = {"/mnt/checkpoints/train": str(stage.checkpoints), "auto": "2"}
    options = [here.get(word, word) for word in command[2:-1]]
    options += ["--address", "127.0.0.1", *WITHOUT_TORCH]
    node = run(stage, *options, script=script, **own)
    assert node.process.returncode == 0, node.events
    assert "[1] of 2\n" in node.output
