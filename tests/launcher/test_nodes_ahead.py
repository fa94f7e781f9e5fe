"""Among nodes, too, new replicas run their script beside those that train."""

from __future__ import annotations

import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.launcher.running import (
    LEISURELY,
    Running,
    Start,
    check_trains,
    processes_of,
    sizes,
    wait_until_nothing_is_left,
)
from tests.support.loops import value_after
from tests.support.stage import Stage, wait_until

pytestmark = [pytest.mark.slow(25), pytest.mark.wide]

NUM_EPOCHS = 2
# An `elasticrun` for which new replicas are late at once.
IMPATIENCE = """
import sys
from elasticrun.__main__ import main
from elasticrun.launcher.supervisor import successors
successors._LEAST_LIMIT = successors._STARTS_IN_LIMIT = 0.0
sys.exit(main())
"""
HASTY = [sys.executable, "-c", IMPATIENCE]
SCRIPT = """
import os, subprocess, sys
from pathlib import Path
from tests.support.stage import Stage, wait_until

stage = Stage(Path(os.environ["LAUNCHER_TEST"]))
node = sys.argv[1]
with Path(f"begun-{node}").open("a") as file:
    file.write(f"{os.getpid()}\\n")
if stage.has("trains"):
    stage.mark(f"prepares-{node}")
    stage.wait_for(f"prepare-{node}")
    if stage.has(f"fail-{node}"):
        raise OSError("there is no such file")
    print("a child finds rank", flush=True, end=" ")
    subprocess.run(["printenv", "RANK"], check=True)
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], flush=True)
import elasticrun
import torch.distributed as dist
from tests.support.loops import MODULUS, is_stop_due

loader = elasticrun.AdaptiveDataLoader(range(600), 6)
model = elasticrun.Variables(value=0)
for _ in elasticrun.remaining_epochs_until(2):
    for batch in loader:
        total = batch[: loader.num_valid].sum()
        if elasticrun.world_size() > 1:
            dist.all_reduce(total)
        model.value = (model.value * 31 + int(total)) % MODULUS
        stage.mark("trains")
        generation = elasticrun.generation()
        if generation < int(sys.argv[2]) and loader.batch_index >= 3:
            here = f"batch-{loader.batch_index}"
            wait_until(
                lambda: stage.has(here)
                or stage.has("alone")
                or (stage.has(f"free-{generation}") and is_stop_due())
            )
if elasticrun.rank() == 0:
    Path("value").write_text(str(model.value))
"""


class Trained:
    """A job of nodes that have names; its first generations train when they are told.

    Attributes:
        num_held: How many of them do.
        most: How many nodes may train together; with fewer, torch's rendezvous waits
            some seconds for others.
    """

    def __init__(self, stage: Stage, start: Start) -> None:
        self.stage = stage
        self.num_held = 1
        self.most = 2
        self._start = start
        self._script = stage.root / "script.py"
        self._script.write_text(SCRIPT)

    def start(
        self, name: str, *options: object, least: int = 1, **more: object
    ) -> Running:
        own = ["--max-restarts", 0, *options, "--", name, self.num_held]
        more = {"command": LEISURELY, "script": self._script, **more}
        return self._start(*own, nodes=f"{least}:{self.most}", **more)

    def start_all(
        self, *names: str, options: tuple[object, ...] = (), **more: object
    ) -> list[Running]:
        """Start nodes whose replicas train together."""
        more["least"] = len(names)
        started = [self.start(name, *options, **more) for name in names]
        self._wait_until_trains(started, 0)
        return started

    def start_one_and_another(self, *, num_held: int = 2) -> list[Running]:
        """Start a node, and another one that joins; either could go on alone."""
        self.num_held = num_held
        [first] = self.start_all("a")
        started = [first, self.start("b")]
        self.prepare("a", "b")
        self.free()
        self._wait_until_trains(started, 1)
        for name in "ab":
            (self.stage.root / "marks" / f"prepare-{name}").unlink()
        return started

    def _wait_until_trains(self, nodes: list[Running], generation: int) -> None:
        for rank in range(len(nodes)):
            name = f"batches of {generation}-{rank}"
            path = self.stage.trace / f"{generation}-{rank}.jsonl"
            wait_until(lambda path=path: path.exists() and path.read_bytes(), name)
        for node in nodes:
            wait_until(lambda node=node: node.status()["state"] == "training")

    def pids(self, name: str, number: int) -> list[int]:
        """Return the replicas of a node that have begun, once there are so many."""
        path = self.stage.root / f"begun-{name}"
        wait_until(
            lambda: path.exists() and len(path.read_text().split()) >= number,
            f"{number} replicas of {name}",
        )
        return [int(pid) for pid in path.read_text().split()]

    def prepare(self, *names: str) -> None:
        """Let the new replicas of nodes come to where they need the job."""
        for name in names:
            self.stage.mark(f"prepare-{name}")

    def wait_until_prepares(self, *names: str) -> None:
        self.stage.wait_for(*(f"prepares-{name}" for name in names))

    def check_goes_on(self, node: Running) -> None:
        """See that nobody stops the first generation, when launchers had their say."""
        for _ in range(3):
            check_trains(self.stage)
            assert node.status()["generation"] == 0
        assert "saving" not in node.events

    def free(self, generation: int = 0) -> None:
        """Let a generation come to a boundary, at which it stops."""
        self.stage.mark(f"free-{generation}")

    def finish(
        self, *nodes: Running, sizes_: dict[int, int], is_calm: bool = True
    ) -> None:
        """Train to the end, which is that of a job without restarts.

        Args:
            is_calm: Whether nothing was trained twice either.
        """
        assert [node.wait() for node in nodes] == [0] * len(nodes), nodes[0].events
        wait_until_nothing_is_left(self.stage)
        assert sizes(self.stage) == sizes_
        for epoch in range(NUM_EPOCHS):
            assert self.stage.delivered(epoch=epoch) == list(range(600))
        if is_calm:
            self.stage.check_exactly_once(600, num_epochs=NUM_EPOCHS)
        in_order = [list(range(first, first + 6)) for first in range(0, 600, 6)]
        calm = value_after(dict(enumerate(in_order * NUM_EPOCHS)))
        assert int((self.stage.root / "value").read_text()) == calm


@pytest.fixture
def trained(stage: Stage, start: Start) -> Trained:
    return Trained(stage, start)


def test_a_node_joins_once_new_replicas_on_all_need_the_job(trained: Trained) -> None:
    """Also on one that comes while the others prepare."""
    trained.most = 3
    [stays] = trained.start_all("stays")
    comes = trained.start("comes")
    trained.wait_until_prepares("stays", "comes")
    late = trained.start("late")
    trained.wait_until_prepares("late")
    check_trains(trained.stage)
    trained.prepare("stays", "comes")
    trained.check_goes_on(stays)
    trained.prepare("late")
    trained.free()
    trained.finish(stays, comes, late, sizes_={0: 1, 1: 3})
    assert len(trained.pids("stays", 2)) == 2
    assert len(trained.pids("comes", 1)) == len(trained.pids("late", 1)) == 1
    output = stays.output + comes.output + late.output
    for rank in range(3):
        assert f"[{rank}] rank {rank} of 3" in output
        assert f"[{rank}] a child finds rank unknown until" in output


def test_all_nodes_prepare_when_one_is_rescaled(trained: Trained) -> None:
    """Those that do end on all nodes if that is taken back."""
    nodes = trained.start_all("a", "b")
    with ThreadPoolExecutor(1) as threads:
        scaling = threads.submit(nodes[0].ask, "scale", 2, nodes[0].pid)
        pids = {*trained.pids("a", 3)[1:], *trained.pids("b", 2)[1:]}
        assert nodes[0].ask("scale", 1, nodes[0].pid).returncode == 0
        assert scaling.result().returncode == 4
        wait_until(lambda: not pids & {*processes_of(trained.stage)}, "their end")
        check_trains(trained.stage)

        scaling = threads.submit(nodes[1].ask, "scale", 2, nodes[1].pid)
        trained.pids("a", 4)
        trained.pids("b", 4)
        check_trains(trained.stage)
        trained.prepare("b")
        trained.check_goes_on(nodes[1])
        trained.prepare("a")
        trained.free()
        assert scaling.result().returncode == 0, scaling.result().stderr
    trained.finish(*nodes, sizes_={0: 2, 1: 3})
    assert [len(trained.pids(name, 4)) for name in "ab"] == [4, 4]


def test_new_replicas_that_take_too_long_come_up_while_the_others_save(
    trained: Trained,
) -> None:
    [stays] = trained.start_all("stays", command=HASTY)
    comes = trained.start("comes", command=HASTY)
    stays.wait_until_said("the running replicas stop for them now")
    trained.free()
    comes.wait_until_said("generation 1: 1 replica started")
    trained.prepare("stays", "comes")
    trained.finish(stays, comes, sizes_={0: 1, 1: 2})
    assert len(trained.pids("stays", 2)) == 2
    assert len(trained.pids("comes", 1)) == 1


@pytest.mark.parametrize(
    "name", ["stays", pytest.param("comes", marks=pytest.mark.soak)]
)
def test_where_one_fails_the_next_ones_start_after_those_that_run(
    trained: Trained, name: str
) -> None:
    [stays] = trained.start_all("stays")
    comes = trained.start("comes")
    trained.wait_until_prepares("stays", "comes")
    trained.stage.mark(f"fail-{name}")
    trained.prepare(name)
    node = {"stays": stays, "comes": comes}[name]
    node.wait_until_said("OSError: there is no such file")
    (trained.stage.root / "marks" / f"fail-{name}").unlink()
    trained.prepare("stays", "comes")
    trained.free()
    trained.finish(stays, comes, sizes_={0: 1, 1: 2})


def test_a_node_that_is_killed_while_it_prepares_to_join_costs_nothing(
    trained: Trained,
) -> None:
    [stays] = trained.start_all("stays")
    dies = trained.start("dies")
    trained.wait_until_prepares("stays", "dies")
    trained.prepare("stays")
    os.kill(dies.pid, signal.SIGKILL)
    stays.wait_until_said("the change is no longer wanted; the running replicas go on")
    successor = trained.pids("stays", 2)[1]
    wait_until(lambda: successor not in processes_of(trained.stage), "its end")
    check_trains(trained.stage)
    trained.stage.mark("alone")
    trained.finish(stays, sizes_={0: 1})


@pytest.mark.parametrize("is_host", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_those_that_prepare_go_on_without_a_node_that_is_killed(
    trained: Trained, is_host: bool
) -> None:
    started = trained.start_one_and_another(num_held=3)
    nodes = dict(zip("ab", started, strict=True))
    dies, stays = "ab" if is_host else "ba"
    with ThreadPoolExecutor(1) as threads:
        scaling = threads.submit(nodes[stays].ask, "scale", 2, nodes[stays].pid)
        pids = trained.pids(stays, {"a": 4, "b": 3}[stays])
        trained.pids(dies, {"a": 3, "b": 2}[dies])
        os.kill(nodes[dies].pid, signal.SIGKILL)
        trained.prepare(stays)
        assert scaling.result().returncode == 0, scaling.result().stderr
    members = nodes[stays].status()["members"]
    assert {member["pid"] for member in members} == {*pids[-2:]}
    trained.stage.mark("alone")
    trained.finish(nodes[stays], sizes_={0: 1, 1: 2, 2: 2}, is_calm=False)


def test_a_stop_does_not_wait_for_what_prepares(trained: Trained) -> None:
    [stays] = trained.start_all("stays")
    comes = trained.start("comes")
    trained.wait_until_prepares("stays", "comes")
    trained.free()
    assert stays.ask("stop", stays.pid).returncode == 0
    assert (stays.wait(), comes.wait()) == (75, 75)
    assert len(trained.stage.committed()) == 1
    wait_until_nothing_is_left(trained.stage)


def test_a_node_that_leaves_does_not_wait_for_what_prepares(trained: Trained) -> None:
    """The others prepare meanwhile: who has sent the signal may not wait."""
    stays, goes = trained.start_one_and_another()
    goes.process.send_signal(signal.SIGTERM)
    stays.wait_until_said("SIGTERM: saving at the next boundary, on all nodes")
    trained.pids("a", 3)
    assert len(trained.stage.committed()) == 1
    trained.free(1)
    assert goes.wait() == 143
    assert len(trained.stage.committed()) == 2
    trained.prepare("a")
    trained.finish(stays, sizes_={0: 1, 1: 2, 2: 1})
    assert len(trained.pids("a", 3)) == 3
