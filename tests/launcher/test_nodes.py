"""Several launchers, each a node of its own: they join, leave, die, and go on."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
import torch
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from elasticrun.checkpoint.events import read_events
from elasticrun.testing import run_generation
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    HOLDS,
    PROGRAM,
    Running,
    Start,
    impatient,
    processes_of,
    running,
    sizes,
    wait_until_nothing_is_left,
)
from tests.support.stage import Stage, freeze, wait_until

pytestmark = pytest.mark.slow(20)

LEARNING = PROGRAM.with_name("learning.py")


def ends(*nodes: Running) -> list[int]:
    codes = [node.wait() for node in nodes]
    wait_until_nothing_is_left(nodes[0].stage)
    return codes


def check_every_sample_was_trained(stage: Stage) -> None:
    for epoch in range(NUM_EPOCHS):
        assert stage.delivered(epoch=epoch) == list(range(NUM_SAMPLES))


@pytest.mark.wide
def test_two_nodes_train_one_job_to_its_end(stage: Stage, start: Start) -> None:
    options = ["--start", "exec", "--", "--hold", "0:9", "--workers", 1]
    first = start("--replicas", 2, *options, nodes="2")
    second = start("--replicas", 1, *options, nodes="2:2")
    first.wait_until_held(0, 3)
    wait_until(lambda: len(first.ask("status").stdout.split("\n\n")) == 2)
    text = first.ask("status").stdout
    numbers = re.findall(r"replicas? on node (\d), 3 on 2 nodes, generation 0", text)
    assert sorted(numbers) == ["0", "1"]  # Whoever comes first may get either.
    host = re.escape(socket.gethostname())
    assert re.search(f"  nodes        0 {host}, 1 {host} [(]this one[)]\n", text)
    assert re.search(f"started as node [01] [(]{host}[)], 3 on 2 nodes", first.events)
    for node in (first, second):
        with open(f"/proc/{node.pid}/status") as file:
            [resident] = [line for line in file if line.startswith("VmRSS:")]
        assert int(resident.split()[1]) < 60 * 1024
    stage.mark("go-0")
    assert ends(first, second) == [0, 0]
    assert sizes(stage) == {0: 3}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)
    logs = stage.checkpoints / "logs" / "generation-0000"
    kept = sorted(logs.glob("*.log"))
    assert [path.name for path in kept] == [f"rank-{rank}.log" for rank in range(3)]
    for path in kept:
        rank = path.stem.removeprefix("rank-")
        where = f"elasticrun: rank {rank} runs on node [01] [(]{host}[)]\n"
        assert re.match(where, path.read_text())
    # Both tell of their starts, and one of all else.
    kinds = Counter(event["event"] for event in read_events(stage.checkpoints))
    assert {kind: kinds[kind] for kind in ("start", "begin", "leave", "end")} == {
        "start": 2,
        "begin": 1,
        "leave": 1,
        "end": 1,
    }
    again = start(*options, nodes="2")
    assert again.wait() == 0
    assert "test is finished" in again.events


CONTAINED = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.mark.skipif(
    subprocess.run([*CONTAINED, "true"], capture_output=True, check=False).returncode
    != 0,
    reason="no process namespace can be made here",
)
@pytest.mark.wide
def test_containers_on_one_host_are_nodes_of_their_own(
    stage: Stage, start: Start
) -> None:
    """With the host's network, they have one name, one address and one number."""
    options = ["--", "--hold", "0:9"]
    nodes = [start(*options, nodes="2", before=CONTAINED) for _ in range(2)]
    stage.wait_for("held-0-0", "held-0-1")
    text = nodes[0].ask("status").stdout
    assert sorted(re.findall(r"on node (\d), 2 on 2 nodes", text)) == ["0", "1"]
    stage.mark("go-0")
    assert ends(*nodes) == [0, 0]
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_why_nobody_is_met_is_said(stage: Stage) -> None:
    """A name that is unknown, and a port where something listens that says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        expected = {
            "nowhere.invalid:29400": "",
            address: "another program listens there, not torch's store",
        }
        with ExitStack() as stack:
            for number, (endpoint, why) in enumerate(expected.items()):
                node = stack.enter_context(
                    running(
                        stage,
                        *("--nodes", "1:2", "--rdzv-endpoint", endpoint),
                        name=f"-{number}",
                    )
                )
                node.wait_until_said(f"looking for {endpoint} ({why}")
                node.process.terminate()
                assert node.wait() == 143


# A program of which the launcher hears nothing until it is asked to stop.
SILENT = f"""
import runpy
from elasticrun.launcher.replica.reporter import Reporter

look = Reporter.look
Reporter.look = lambda self: look(self) if self._stop else 0.05
runpy.run_path({str(PROGRAM)!r}, run_name="__main__")
"""


@pytest.mark.wide
def test_a_node_that_comes_and_goes_costs_nothing(stage: Stage, start: Start) -> None:
    """Also where its launcher has not heard yet that it trains."""
    silent = stage.root / "silent.py"
    silent.write_text(SILENT)
    holds = [*HOLDS, "--workers", 1]
    options = ["--max-restarts", 0, "--"]
    stays = start(*options, *holds, nodes="1:2")
    stays.wait_until_held(0, 1)
    comes = start(
        "--replicas", 2, *options, stage.root, *holds, nodes="1:2", script=silent
    )
    stays.wait_until_said("another node has come: saving at the next boundary")
    stage.mark("stop-0")
    stage.wait_for("held-1-0", "held-1-1", "held-1-2")
    comes.process.terminate()
    stays.wait_until_said("node 1")
    stage.mark("stop-1")
    assert comes.wait() == 143
    assert "stopped; checkpoint" in comes.events
    stays.wait_until_held(2, 1)
    assert stays.status()["restarts"] == 0
    stage.mark("go-2")
    assert ends(stays) == [0]
    assert sizes(stage) == {0: 1, 1: 3, 2: 1}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_a_hang_that_one_node_sees_prints_the_stacks_of_all(
    stage: Stage, start: Start
) -> None:
    options = ["--max-restarts", 0, "--", "--at", "0:1:5:hang"]
    sees, other = (
        start("--hang-timeout", timeout, *options, nodes="2", command=impatient(stage))
        for timeout in (1000, "off")
    )
    stage.wait_for("hangs-0-1")
    wait_until(lambda: sees.status()["state"] == "training")
    stage.mark("hung")
    logs = stage.checkpoints / "logs" / "generation-0000"

    def stacks() -> list[str]:
        return [(logs / f"rank-{rank}.log").read_text() for rank in (0, 1)]

    wait_until(lambda: all("in main" in text for text in stacks()), "the stacks")
    wait_until(lambda: "in act" in "".join(stacks()), "the stack of who hangs")
    stage.mark("dumped")
    assert ends(sees, other) == [1, 1]
    assert "no rank on this node passed a boundary for" in sees.events
    assert "a replica on another node hangs: printing the stacks" in other.events


@pytest.mark.wide
def test_too_few_nodes_wait_for_another_one(
    stage: Stage, start: Start, endpoint: str
) -> None:
    """Which is let in, however many have come and gone."""
    options = ["--max-restarts", 0, "--", *HOLDS]
    stays, goes = (start(*options, nodes="2") for _ in range(2))
    goes.wait_until_held(0, 2)
    goes.process.send_signal(signal.SIGINT)
    stays.wait_until_said("SIGINT: saving at the next boundary, on all nodes")
    stage.mark("stop-0")
    assert goes.wait() == 130
    pretend_many_rounds(endpoint)
    replacement = start(*options, nodes="2")
    stays.wait_until_held(1, 2)
    stage.mark("go-1")
    assert ends(stays, replacement) == [0, 0]
    assert sizes(stage) == {0: 2, 1: 2}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_a_node_that_is_killed_costs_what_came_after_the_last_checkpoint(
    stage: Stage, start: Start
) -> None:
    options = ["--max-restarts", 0, "--save-interval", 0, "--", *HOLDS, "--workers", 1]
    stays = start(*options, nodes="1:2")
    stays.wait_until_held(0, 1)
    dies = start("--replicas", 2, *options, nodes="1:2")
    stays.wait_until_said("another node has come")
    stage.mark("stop-0")
    stays.wait_until_held(1, 3)
    wait_until((stage.checkpoints / "checkpoint-00000019/manifest.json").exists)
    os.kill(dies.pid, signal.SIGKILL)
    stays.wait_until_said("generation 1 has lost a node: node 1")
    assert "restarting from checkpoint 19" in stays.events
    stage.mark("go-2")
    assert ends(stays) == [0]
    assert sizes(stage) == {0: 1, 1: 3, 2: 1}
    assert "crashed" not in stays.events
    check_every_sample_was_trained(stage)


@pytest.mark.wide
def test_a_machine_that_vanishes_is_told_once_and_holds_nobody_up(
    stage: Stage, start: Start
) -> None:
    """Nor does a replica that may rescue, but waits for it in a collective."""
    options = ["--max-restarts", 0, "--", *HOLDS]
    rescue = {"ELASTICRUN_RESCUE": "always"}
    stays = start(*options, nodes="1:2", **rescue)
    stays.wait_until_held(0, 1)
    vanishes = start(*options, nodes="1:2", **rescue)
    stays.wait_until_said("another node has come")
    stage.mark("stop-0")
    stays.wait_until_held(1, 2)
    machine = psutil.Process(vanishes.pid)
    for process in (machine, *machine.children(recursive=True)):
        process.suspend()  # No connection of its is closed.
    stage.mark("go-1")
    stays.wait_until_said("generation 1 has lost a node: node 1")
    vanishes.process.kill()
    stage.mark("go-2")
    assert stays.wait() == 0
    assert stays.events.count("no sign of life") == 2  # Of the end, and what follows.
    assert sizes(stage) == {0: 1, 1: 2, 2: 1}
    check_every_sample_was_trained(stage)


@pytest.mark.wide
@pytest.mark.parametrize("number", [0, 1])
def test_a_launcher_that_is_suspended_costs_nothing(
    stage: Stage, start: Start, number: int
) -> None:
    """Longer than its rendezvous process may be silent, which goes on speaking."""
    nodes = [start("--", *HOLDS, nodes="2") for _ in range(2)]
    nodes[0].wait_until_held(0, 2)
    freeze(nodes[number].pid)
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > 6.0)
    os.kill(nodes[number].pid, signal.SIGCONT)
    stage.mark("go-0")
    assert ends(*nodes) == [0, 0]
    assert all("is lost" not in node.events for node in nodes)
    assert sizes(stage) == {0: 2}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_a_node_that_dies_before_it_joins_costs_one_save(
    stage: Stage, start: Start
) -> None:
    options = ["--max-restarts", 0, "--", *HOLDS]
    stays = start(*options, nodes="1:2")
    stays.wait_until_held(0, 1)
    dies = start(*options, nodes="1:2")
    stays.wait_until_said("another node has come: saving at the next boundary")
    os.kill(dies.pid, signal.SIGKILL)
    stage.mark("stop-0")
    stays.wait_until_held(1, 1)
    stage.mark("go-1")
    assert ends(stays) == [0]
    assert stays.events.count("another node has come") == 1
    assert sizes(stage) == {0: 1, 1: 1}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_two_nodes_that_come_to_one_place_cost_one_save(
    stage: Stage, start: Start, endpoint: str
) -> None:
    options = ["--max-restarts", 0, "--", *HOLDS]
    nodes = [start(*options, nodes="1:2")]
    nodes[0].wait_until_held(0, 1)
    nodes += [start(*options, nodes="1:2") for _ in range(2)]
    wait_until(lambda: num_waiting(endpoint) == 2, "both")
    stage.mark("stop-0")
    stage.wait_for("held-1-0", "held-1-1")

    def texts() -> str:
        return "".join(node.events for node in nodes)

    # It says that only when the others would have counted one that had died.
    wait_until(lambda: "waiting at 127.0.0.1" in texts(), "the one that waits on")
    stage.mark("go-1")
    assert ends(*nodes) == [0, 0, 0]
    assert texts().count("another node has come") == 1
    assert sizes(stage) == {0: 1, 1: 2}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def num_waiting(endpoint: str) -> int:
    """Return how many nodes wait for the next round, as torch's agents see it."""
    host, _, port = endpoint.rpartition(":")
    store = TCPStore(host, int(port), wait_for_workers=False)
    parameters = RendezvousParameters("c10d", endpoint, "test", 1, 2)
    backend = C10dRendezvousBackend(store, "test")
    return create_handler(store, backend, parameters).num_nodes_waiting()


def pretend_many_rounds(endpoint: str) -> None:
    """Let it look as if nodes had come and gone just now, and many times."""
    host, _, port = endpoint.rpartition(":")
    store = TCPStore(host, int(port), wait_for_workers=False)
    [begun] = json.loads(store.get("elasticrun/rounds/test"))
    store.set("elasticrun/rounds/test", json.dumps([begun] * 20))


@pytest.mark.wide
def test_a_node_that_comes_where_many_come_and_go_waits(
    stage: Stage, start: Start, endpoint: str
) -> None:
    """The stable one trains meanwhile, and is not restarted for it at once."""
    stable = start("--", *HOLDS, nodes="1:2")
    stable.wait_until_held(0, 1)
    pretend_many_rounds(endpoint)
    comes = start("--", *HOLDS, nodes="1:2")
    comes.wait_until_said("nodes come and go again and again, so this one waits for")
    stage.mark("go-0")
    assert ends(stable, comes) == [0, 0]
    assert "another node has come" not in stable.events
    assert sizes(stage) == {0: 1}


@pytest.mark.wide
@pytest.mark.parametrize("command", ["stop", None])
def test_a_node_beyond_the_maximum_ends_with_the_job(
    stage: Stage, start: Start, command: str | None
) -> None:
    nodes = [start("--", *HOLDS, nodes="2") for _ in range(3)]
    stage.wait_for("held-0-0", "held-0-1")

    def waiting() -> list[Running]:
        return [node for node in nodes if "waiting at 127.0.0.1" in node.events]

    wait_until(waiting, "the one that waits")
    [member, *_] = [node for node in nodes if node not in waiting()]
    if command is None:
        stage.mark("go-0")
    else:
        with ThreadPoolExecutor(1) as threads:
            stopping = threads.submit(member.ask, command, member.pid)
            member.wait_until_said("saving at the next boundary")
            stage.mark("stop-0")
            assert stopping.result().returncode == 0
    assert ends(*nodes) == [0 if command is None else 75] * 3
    assert "is lost" not in waiting()[0].events
    assert sizes(stage) == {0: 2}


@pytest.mark.wide
def test_scaling_on_one_node_never_forms_a_smaller_world(
    stage: Stage, start: Start
) -> None:
    options = ["--max-restarts", 0, "--", *HOLDS]
    nodes = [start(*options, nodes="3:4") for _ in range(3)]
    for node in nodes:
        node.wait_until_held(0, 3)
    with ThreadPoolExecutor(1) as threads:
        scaling = threads.submit(nodes[1].ask, "scale", 2, nodes[1].pid)
        for node in nodes:
            node.wait_until_said("rescaling from 1 to 2 replicas")
        stage.mark("stop-0")
        more = scaling.result()
    assert more.returncode == 0, more.stderr
    assert more.stdout.endswith("generation 1 trains with 2 replicas\n")
    stage.mark("go-1")
    assert ends(*nodes) == [0, 0, 0]
    assert sizes(stage) == {0: 3, 1: 4}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.wide
def test_scaling_before_the_others_have_come_is_not_lost(
    stage: Stage, start: Start
) -> None:
    first = start(nodes="2")
    wait_until(lambda: first.ask("status").stdout.startswith("test"))
    with ThreadPoolExecutor(1) as threads:
        scaling = threads.submit(first.ask, "scale", 2)
        first.wait_until_said("rescaling from 1 to 2 replicas")
        second = start("--", *HOLDS, nodes="2")
        wait_until(lambda: 3 in sizes(stage).values())
        stage.mark("go-0")
        assert scaling.result().returncode == 0
    assert ends(first, second) == [0, 0]
    assert sizes(stage) == {0: 3}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def learn(*arguments: object) -> None:
    """Run the script in a replica of a test's own."""
    sys.argv = [str(LEARNING), *map(str, arguments)]
    runpy.run_path(str(LEARNING), run_name="__main__")


@pytest.mark.wide
def test_a_crash_on_one_node_restarts_all_and_is_named_on_all(
    stage: Stage, start: Start
) -> None:
    """And they learn what one machine does."""
    one, two = stage.root / "one.pt", stage.root / "two.pt"
    alone = {"ELASTICRUN_CHECKPOINT_DIR": str(stage.root / "one")}
    run_generation(learn, 2, one, variables=alone)
    options = ["--save-interval", 0, "--", two, "0:1:9"]
    nodes = [start(*options, nodes="2", script=LEARNING) for _ in range(2)]
    assert ends(*nodes) == [0, 0]
    for node in nodes:
        assert "rank 1 raised ValueError: the loss is not a number" in node.events
        # What boundary 9 has captured may still have been in flight.
        assert re.search("restart 1 of 3 from checkpoint (8|9)\n", node.events)
        assert "finished after" in node.events
    assert sizes(stage) == {0: 2, 1: 2}
    models = [torch.load(path, weights_only=True) for path in (one, two)]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def test_stop_ends_the_job_on_all_nodes(stage: Stage, start: Start) -> None:
    nodes = [start("--", *HOLDS, nodes="2") for _ in range(2)]
    nodes[1].wait_until_held(0, 2)
    with ThreadPoolExecutor(1) as threads:
        stopping = threads.submit(nodes[1].ask, "stop", nodes[1].pid)
        for node in nodes:
            node.wait_until_said("the stop command: saving at the next boundary")
        stage.mark("stop-0")
        assert stopping.result().returncode == 0
    assert ends(*nodes) == [75, 75]
    for node in nodes:
        assert "stopped; checkpoint 1 is saved" in node.events
    assert sizes(stage) == {0: 2}


@pytest.mark.wide
def test_the_end_of_who_serves_the_endpoint_ends_the_job_with_a_checkpoint(
    stage: Stage, start: Start
) -> None:
    nodes = [start("--", *HOLDS, nodes="2") for _ in range(2)]
    nodes[0].wait_until_held(0, 2)
    nodes[0].process.terminate()
    nodes[1].wait_until_said("SIGTERM: saving at the next boundary, on all nodes")
    stage.mark("stop-0")
    assert ends(*nodes) == [143, 75]
    assert len(stage.committed()) == 1
    assert sizes(stage) == {0: 2}


@pytest.mark.wide
def test_who_serves_the_endpoint_is_not_let_leave(stage: Stage, start: Start) -> None:
    node = start("--", *HOLDS, nodes="1:2")
    node.wait_until_held(0, 1)
    refused = node.ask("leave")
    assert refused.returncode == 4
    assert "the others cannot go on without it" in refused.stderr
    stage.mark("go-0")
    assert ends(node) == [0]
    assert sizes(stage) == {0: 1}


@pytest.mark.wide
def test_the_others_look_for_an_endpoint_that_was_killed(
    stage: Stage, start: Start, endpoint: str
) -> None:
    """On one machine a launcher that is left takes it over."""
    options = ["--save-interval", 0, "--", *HOLDS]
    dies = start(*options, nodes="1:2")
    dies.wait_until_held(0, 1)  # Else both may begin together.
    stays = start(*options, nodes="1:2")
    dies.wait_until_said("another node has come")
    stage.mark("stop-0")
    stays.wait_until_held(1, 2)
    os.kill(dies.pid, signal.SIGKILL)
    stays.wait_until_said(f"{endpoint} is lost")
    stage.mark("go-2")
    assert ends(stays) == [0]
    assert sizes(stage) == {0: 1, 1: 2, 2: 1}
    assert "crashed" not in stays.events
    check_every_sample_was_trained(stage)


@pytest.mark.wide
def test_jobs_of_other_names_do_not_meet(stage: Stage, start: Start) -> None:
    (stage.root / "other").mkdir()
    other = Stage(stage.root / "other")
    first = start("--", *HOLDS, nodes="1:2")
    first.wait_until_held(0, 1)
    second = start(
        *("--name", "other", "--checkpoint-dir", other.checkpoints),
        nodes="1:2",
        ELASTICRUN_TRACE=other.trace,
    )
    assert second.wait() == 0
    stage.mark("go-0")
    assert ends(first) == [0]
    for each in (stage, other):
        assert sizes(each) == {0: 1}
        each.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_a_signal_while_it_waits_for_others_leaves_nothing(
    stage: Stage, start: Start
) -> None:
    alone = start(nodes="2")
    wait_until(lambda: alone.ask("status").stdout.startswith("test"))
    alone.process.terminate()
    assert alone.wait() == 143
    assert processes_of(stage) == []
