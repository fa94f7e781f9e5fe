"""A training on a Ray cluster, whose nodes are raylets of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticrun import ElasticRunError
from tests.launcher.running import (
    elasticrun,
    processes_of,
    temporary,
    variables,
    wait_until_nothing_is_left,
)
from tests.support.stage import DEADLINE, Stage, wait_until

# 240 MB, with which nothing else is tested, so requirements-dev.txt leaves it out.
pytest.importorskip("ray", reason="pip install ray")

import ray

from elasticrun.integrations.ray import INTERNALS, run

pytestmark = [pytest.mark.slow(40), pytest.mark.wide]

NUM_SAMPLES = 9000
SCRIPT = """
import sys, time
import torch.distributed as dist
import elasticrun
from tests.support.stage import Stage
from pathlib import Path

stage = Stage(Path(sys.argv[1]))
loader = elasticrun.AdaptiveDataLoader(range(9000), 6, shuffle=True)
for _ in elasticrun.remaining_epochs_until(1):
    for batch in loader:
        if elasticrun.world_size() > 1:
            dist.all_reduce(batch.sum())
        if stage.has("fail"):
            raise ValueError("the loss is not a number")
        if not stage.has("finish"):
            time.sleep(0.2)  # A pace, in which nodes come and go in one epoch.
"""
DRIVER = """
import sys
from elasticrun.integrations.ray import run

words = ["--replicas", "1", "--name", "test", "--save-interval", "1"]
words += ["--max-restarts", "0", sys.argv[1] + "/script.py", sys.argv[1]]
run(words, sys.argv[1] + "/checkpoints", nodes=(1, 3), resources={"CPU": 1, "w": 1})
print("finished")
"""


class Driven:
    """A cluster of raylets, and the process that calls `run` on it."""

    def __init__(self, stage: Stage, cluster: Any) -> None:
        self.stage = stage
        self.cluster = cluster
        self.process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return (self.stage.root / "driver.log").read_text()

    def start(self) -> None:
        (self.stage.root / "script.py").write_text(SCRIPT)
        with (self.stage.root / "driver.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", DRIVER, str(self.stage.root)],
                env=variables(self.stage, RAY_ADDRESS=self.cluster.address),
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def add_node(self) -> Any:
        size = 80 << 20
        own = {"num_cpus": 1, "resources": {"w": 1}, "object_store_memory": size}
        return self.cluster.add_node(**own)

    def drain(self, node: Any) -> None:
        """Announce that a node will be taken away, as an autoscaler does."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        command += ["--address", self.cluster.address, "--node-id", node.node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "spot", "--deadline-remaining-seconds", "600"]
        subprocess.run(command, env=variables(self.stage), check=True)

    def kill(self, node: Any) -> None:
        """Let a machine die: everything on it ends at once."""
        for process in raylet_of(node).children(recursive=True):
            process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def wait_until_trains(self, size: int, *, after: int = -1) -> int:
        """Wait for a generation of so many replicas that trains; return its number."""

        def newest() -> tuple[int, int]:
            paths = self.stage.trace.glob("*.jsonl")
            found = [int(p.stem.partition("-")[0]) for p in paths if p.stat().st_size]
            return max(found, default=-1), found.count(max(found, default=-1))

        def trains() -> bool:
            assert self.process.poll() is None, self.output
            generation, number = newest()
            return generation > after and number == size

        wait_until(trains, f"{size} replicas\n{self.output}")
        return newest()[0]

    def wait(self) -> int:
        return self.process.wait(DEADLINE)


def raylet_of(node: Any) -> psutil.Process:
    [raylet] = node.all_processes["raylet"]
    return psutil.Process(raylet.process.pid)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def driven(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    from ray.cluster_utils import Cluster

    own = variables(stage, RAY_TMPDIR=temporary(stage), RAY_AUTH_MODE="disabled")
    for name in ("ELASTICRUN_JOB", "ELASTICRUN_CHECKPOINT_DIR"):
        del own[name]
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    driven = Driven(stage, cluster)
    try:
        yield driven
    finally:
        cluster.shutdown()
        for pid in processes_of(stage):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def finish(driven: Driven) -> None:
    driven.stage.mark("finish")
    assert driven.wait() == 0, driven.output
    assert "\nfinished\n" in driven.output
    assert driven.stage.delivered() == list(range(NUM_SAMPLES))


def check_nothing_is_left(driven: Driven) -> None:
    """No process but Ray's own, and no socket of a launcher."""
    driven.cluster.shutdown()
    wait_until_nothing_is_left(driven.stage)
    assert list(temporary(driven.stage).glob("elasticrun-*/*")) == []


def test_a_version_that_lacks_what_is_not_public_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in INTERNALS:
        *_, owner, last = name.split(".")
        assert owner == "state"
        monkeypatch.delattr(type(ray._private.state.state), last)
        with pytest.raises(ElasticRunError, match=f"has no {name}, which says"):
            run([], "checkpoints", nodes=(1, 2), resources={})
    with pytest.raises(ValueError, match=r"give \(MIN, MAX\) with 1 <= MIN <= MAX"):
        run([], "checkpoints", nodes=(2, 1), resources={})


def test_nodes_are_drained_and_added_at_no_cost(driven: Driven) -> None:
    nodes = [driven.add_node(), driven.add_node()]
    driven.start()
    last = driven.wait_until_trains(2)
    nodes.append(driven.add_node())
    last = driven.wait_until_trains(3, after=last)
    driven.drain(nodes[0])
    last = driven.wait_until_trains(2, after=last)
    finish(driven)
    driven.stage.check_exactly_once(NUM_SAMPLES)
    check_nothing_is_left(driven)


def test_a_node_that_dies_costs_what_came_after_the_last_checkpoint(
    driven: Driven,
) -> None:
    nodes = [driven.add_node(), driven.add_node()]
    driven.start()
    last = driven.wait_until_trains(2)
    driven.kill(nodes[0])
    last = driven.wait_until_trains(1, after=last)
    driven.add_node()
    driven.wait_until_trains(2, after=last)
    finish(driven)


def test_a_launcher_saves_when_ray_is_lost_on_its_node(driven: Driven) -> None:
    nodes = [driven.add_node(), driven.add_node()]
    driven.start()
    last = driven.wait_until_trains(2)
    driven.cluster.remove_node(nodes[0], allow_graceful=False)
    driven.wait_until_trains(1, after=last)
    finish(driven)
    driven.stage.check_exactly_once(NUM_SAMPLES)
    check_nothing_is_left(driven)


def launchers_of(driven: Driven, node: Any = None) -> list[int]:
    """Return the launchers of a node, or of all of them."""
    found = []
    for pid in processes_of(driven.stage):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            is_launcher = {"run", "--lifeline"} <= {*process.cmdline()}
            if is_launcher and (node is None or raylet_of(node) in process.parents()):
                found.append(pid)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_job_saves_when_who_runs_it_ends(driven: Driven, number: int) -> None:
    driven.add_node()
    driven.add_node()
    driven.start()
    last = driven.wait_until_trains(2)
    driven.process.send_signal(number)
    assert driven.wait() != 0
    if number == signal.SIGINT:  # It has waited.
        assert launchers_of(driven) == []
    wait_until(lambda: not launchers_of(driven), "the end of the launchers")
    driven.start()
    driven.wait_until_trains(2, after=last)
    finish(driven)
    driven.stage.check_exactly_once(NUM_SAMPLES)


def test_a_node_that_is_told_to_leave_is_not_taken_again(driven: Driven) -> None:
    """Until the job is stopped."""
    nodes = [driven.add_node(), driven.add_node()]
    driven.start()
    last = driven.wait_until_trains(2)
    [launcher] = launchers_of(driven, nodes[0])
    elasticrun(driven.stage, "leave", launcher)
    last = driven.wait_until_trains(1, after=last)
    nodes.append(driven.add_node())
    driven.wait_until_trains(2, after=last)
    assert [len(launchers_of(driven, node)) for node in nodes] == [0, 1, 1]
    elasticrun(driven.stage, "stop", *launchers_of(driven, nodes[1]))
    assert driven.wait() == 1
    assert "the job was stopped (exit code 75); the same call goes on" in driven.output
    check_nothing_is_left(driven)


def test_a_job_that_fails_raises(driven: Driven) -> None:
    driven.add_node()
    driven.start()
    driven.wait_until_trains(1)
    driven.stage.mark("fail")
    assert driven.wait() == 1
    assert "ElasticRunError: the job failed (exit code 1)" in driven.output
    check_nothing_is_left(driven)
