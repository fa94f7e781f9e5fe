"""A training on a Ray cluster, whose nodes are raylets of this machine."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elasticrun import ElasticRunError
from tests.integrations.raylets import (
    Driven,
    check_nothing_is_left,
    raylet_of,
    raylets,
)
from tests.launcher.running import elasticrun, processes_of
from tests.support.stage import Stage, wait_until

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


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def driven(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    with raylets(stage, monkeypatch) as driven:
        (stage.root / "script.py").write_text(SCRIPT)
        yield driven


def finish(driven: Driven) -> None:
    driven.stage.mark("finish")
    assert driven.wait() == 0, driven.output
    assert "\nfinished\n" in driven.output
    assert driven.stage.delivered() == list(range(NUM_SAMPLES))


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
    driven.start(DRIVER)
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
    driven.start(DRIVER)
    last = driven.wait_until_trains(2)
    driven.kill(nodes[0])
    last = driven.wait_until_trains(1, after=last)
    driven.add_node()
    driven.wait_until_trains(2, after=last)
    finish(driven)


def test_a_launcher_saves_when_ray_is_lost_on_its_node(driven: Driven) -> None:
    nodes = [driven.add_node(), driven.add_node()]
    driven.start(DRIVER)
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
    driven.start(DRIVER)
    last = driven.wait_until_trains(2)
    driven.process.send_signal(number)
    assert driven.wait() != 0
    if number == signal.SIGINT:  # It has waited.
        assert launchers_of(driven) == []
    wait_until(lambda: not launchers_of(driven), "the end of the launchers")
    driven.start(DRIVER)
    driven.wait_until_trains(2, after=last)
    finish(driven)
    driven.stage.check_exactly_once(NUM_SAMPLES)


def test_a_node_that_is_told_to_leave_is_not_taken_again(driven: Driven) -> None:
    """Until the job is stopped."""
    nodes = [driven.add_node(), driven.add_node()]
    driven.start(DRIVER)
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
    driven.start(DRIVER)
    driven.wait_until_trains(1)
    driven.stage.mark("fail")
    assert driven.wait() == 1
    assert "ElasticRunError: the job failed (exit code 1)" in driven.output
    check_nothing_is_left(driven)
