"""Nodes that find each other through the checkpoint directory: none is special."""

from __future__ import annotations

import json
import os
import signal
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import psutil
import pytest

from elasticrun.checkpoint.storage.lock import lock_file
from elasticrun.replicas.store import serve_store_at
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    HOLDS,
    Running,
    Start,
    running,
    sizes,
    wait_until_nothing_is_left,
)
from tests.support.object_store import Bucket
from tests.support.places import Content
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow(30)

FOLDER = "rendezvous"


@pytest.fixture
def start(stage: Stage) -> Iterator[Start]:
    """Return what starts one node more."""
    with ExitStack() as stack:
        number = 0

        def start_node(*options: object, nodes: str, **more: object) -> Running:
            nonlocal number
            number += 1
            own = ["--nodes", nodes, "--address", "127.0.0.1", "--replicas", 1]
            own += ["--max-restarts", 0, "--save-interval", 0, *options]
            name = f"-{number}"
            return stack.enter_context(running(stage, *own, name=name, **more))

        yield start_node


def written(stage: Stage) -> dict[str, Any]:
    """Return what stands there of who serves."""
    path = stage.checkpoints / FOLDER / "endpoint.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def who_serves(stage: Stage, nodes: list[Running]) -> Running:
    """Return the node that listens where the others are told to look."""
    port = written(stage)["port"]
    for node in nodes:
        launcher = psutil.Process(node.pid)
        for process in launcher.children(recursive=True):
            listens = process.net_connections("tcp")
            if any(c.status == "LISTEN" and c.laddr.port == port for c in listens):
                return node
    raise AssertionError(f"no node listens at {port}")


def finish(stage: Stage, *nodes: Running, is_calm: bool) -> None:
    assert [node.wait() for node in nodes] == [0] * len(nodes), nodes[0].events
    wait_until_nothing_is_left(stage)
    assert all("crashed" not in node.events for node in nodes)
    for epoch in range(NUM_EPOCHS):
        assert stage.delivered(epoch=epoch) == list(range(NUM_SAMPLES))
    if is_calm:
        stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_the_node_that_serves_leaves_and_costs_nothing(
    stage: Stage, start: Start
) -> None:
    """Neither do those that come then, or leave again."""
    options = ["--", *HOLDS, "--hold", "3:35"]
    first = start(*options, nodes="1:2")
    first.wait_until_held(0, 1)
    second = start(*options, nodes="1:2")
    first.wait_until_said("another node has come: saving at the next boundary")
    stage.mark("stop-0")
    second.wait_until_held(1, 2)
    assert who_serves(stage, [first, second]) is first
    first.process.terminate()
    second.wait_until_said("SIGTERM: saving at the next boundary, on all nodes")
    stage.mark("stop-1")
    assert first.wait() == 143
    second.wait_until_held(2, 1)
    assert who_serves(stage, [second]) is second
    third = start(*options, nodes="1:2")
    second.wait_until_said("another node has come: saving at the next boundary")
    stage.mark("stop-2")
    third.wait_until_held(3, 2)
    stage.mark("go-3")
    finish(stage, second, third, is_calm=True)
    assert sizes(stage) == {0: 1, 1: 2, 2: 1, 3: 2}
    assert "has lost a node" not in second.events


@pytest.mark.wide
def test_the_node_that_serves_is_killed_and_the_others_go_on(
    stage: Stage, start: Start
) -> None:
    nodes = [start("--", "--hold", "0:9", nodes="2:3") for _ in range(3)]
    nodes[0].wait_until_held(0, 3)
    dies = who_serves(stage, nodes)
    stay = [node for node in nodes if node is not dies]
    os.kill(dies.pid, signal.SIGKILL)
    stay[0].wait_until_said("generation 0 has lost a node")
    finish(stage, *stay, is_calm=False)
    assert sizes(stage) == {0: 3, 1: 2}


@pytest.mark.wide
def test_what_a_dead_node_has_written_is_not_believed(
    stage: Stage, start: Start
) -> None:
    """Nor is a store of somebody else's that is at its address now."""
    folder = stage.checkpoints / FOLDER
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    stale = {"host": "127.0.0.1", "port": port, "token": "old", "name": "test"}
    file = folder / "endpoint.json"
    file.write_text(json.dumps(stale))
    with lock_file(folder / "lock"):  # Who has it has not written yet.
        node = start(nodes="1:2")
        other = serve_store_at("127.0.0.1")
        looking = "looking for the endpoint in"
        wait_until(lambda: (folder / "lock").stat().st_size, "the lock")
        file.write_text(json.dumps({**stale, "port": other.port}))
        node.wait_until_said(
            "another process answers there than the one that wrote the address"
        )
        file.write_text(json.dumps({**stale, "name": "digits"}))
        node.wait_until_said("another job, digits, meets there")
        assert looking in node.events
    finish(stage, node, is_calm=True)
    assert written(stage)["token"] != "old"


@pytest.mark.wide
def test_a_node_that_another_one_overrules_gives_way(
    stage: Stage, start: Start
) -> None:
    """As where a file system has no locks that all nodes see."""
    nodes = [start("--", "--hold", "0:9", nodes="2") for _ in range(2)]
    nodes[0].wait_until_held(0, 2)
    before = written(stage)
    serves = who_serves(stage, nodes)
    (stage.checkpoints / FOLDER / "endpoint.json").unlink()
    serves.wait_until_said("another node serves the rendezvous now")
    finish(stage, *nodes, is_calm=False)
    assert sizes(stage) == {0: 2, 1: 2}
    assert written(stage)["token"] != before["token"]


@pytest.mark.wide
def test_nodes_meet_in_an_object_store(
    stage: Stage, start: Start, bucket: Bucket
) -> None:
    options = ["--checkpoint-dir", bucket.url, "--save-interval", "off"]
    options += ["--", "--hold", "0:9"]
    nodes = [start(*options, nodes="2") for _ in range(2)]
    nodes[0].wait_until_held(0, 2)
    assert Content(bucket.url).read(f"{FOLDER}/endpoint.json")
    stage.mark("go-0")
    finish(stage, *nodes, is_calm=True)
    assert sizes(stage) == {0: 2}


@pytest.mark.wide
def test_a_node_is_told_to_leave_and_a_signal_after_that_hurries_nobody(
    stage: Stage, start: Start
) -> None:
    first = start("--", *HOLDS, nodes="1:2")
    first.wait_until_held(0, 1)
    second = start("--", *HOLDS, nodes="1:2")
    first.wait_until_said("another node has come: saving at the next boundary")
    stage.mark("stop-0")
    second.wait_until_held(1, 2)
    with ThreadPoolExecutor(1) as threads:
        leaving = threads.submit(first.ask, "leave", first.pid)
        second.wait_until_said("the leave command: saving at the next boundary")
        first.process.terminate()
        stage.mark("stop-1")
        answer = leaving.result()
    assert answer.returncode == 0
    assert answer.stderr == f"elasticrun: test ({first.pid}) in {stage.checkpoints}\n"
    assert answer.stdout.startswith("saving and leaving\n")
    assert first.wait() == 75
    assert "the leave command: saving at the next boundary\n" in first.events
    assert "ending at once" not in first.events
    stage.mark("go-2")
    finish(stage, second, is_calm=True)
    assert sizes(stage) == {0: 1, 1: 2, 2: 1}
