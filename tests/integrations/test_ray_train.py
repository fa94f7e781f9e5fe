"""Ray Train's workers, on a cluster whose nodes are raylets of this machine."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import psutil
import pytest

from elasticrun import ElasticRunError
from elasticrun.testing import read_trace
from tests.integrations.raylets import Driven, check_nothing_is_left, raylets
from tests.launcher.running import processes_of
from tests.support.stage import Stage, wait_until

pytest.importorskip("ray.train", reason="pip install ray[train]", exc_type=ImportError)

import ray.train.v2

from elasticrun.integrations.ray_train import INTERNALS, Elastic, replica

slow = pytest.mark.slow(60)

NUM_SAMPLES = 9000
DRIVER = """
import sys, time
from pathlib import Path
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from elasticrun.integrations.ray_train import Elastic, replica

def train(config):
    import ray.train, torch, torch.distributed as dist
    import elasticrun
    from tests.support.stage import Stage

    stage = Stage(Path(config["root"]))
    elasticrun.init(config["root"] + "/checkpoints")
    net = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-9)
    model = elasticrun.AdaptiveDataParallel(net, optimizer)
    loader = elasticrun.AdaptiveDataLoader(range(9000), 6, shuffle=True)
    for _ in elasticrun.remaining_epochs_until(1):
        for batch in loader:
            optimizer.zero_grad()
            model(batch[:, None].float()).mean().backward()
            optimizer.step()
            if stage.has("fail"):
                raise ValueError("the loss is not a number")
            if stage.has("stop"):
                elasticrun.request_stop()
            while stage.has("hang"):
                time.sleep(0.1)
            is_finishing = torch.tensor(int(stage.has("finish")))
            if elasticrun.world_size() > 1:
                dist.all_reduce(is_finishing)
            # A pace, in which nodes come and go in one epoch.
            if elasticrun.generation() == 0 and not is_finishing:
                # Ray takes one report a second, and the next one waits for that.
                ray.train.report({"loss": 1.0})
            elif not is_finishing:
                time.sleep(0.2)

root = sys.argv[1]
trainer = TorchTrainer(
    replica(train),
    train_loop_config={"root": root},
    scaling_config=ScalingConfig(
        num_workers=(1, 3),
        resources_per_worker={"CPU": 1, "w": 1},
        elastic_resize_monitor_interval_s=1,
    ),
    run_config=RunConfig(
        storage_path=root + "/ray",
        failure_config=FailureConfig(max_failures=0),
        callbacks=[Elastic(grace=30)],
    ),
)
print(trainer.fit().error)
print("finished")
"""


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def driven(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driven]:
    own = {
        "ELASTICRUN_RESCUE": "always",
        "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": 1,
        "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": 1,
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": 5,
    }
    with raylets(stage, monkeypatch, **own) as driven:
        yield driven


def finish(driven: Driven) -> None:
    driven.stage.mark("finish")
    assert driven.wait() == 0, driven.output
    assert "\nfinished\n" in driven.output
    assert driven.stage.delivered() == list(range(NUM_SAMPLES))


@slow
def test_nodes_that_come_and_are_drained_cost_no_sample(driven: Driven) -> None:
    nodes = [driven.add_node(), driven.add_node()]
    driven.start(DRIVER)
    last = driven.wait_until_trains(2)
    nodes.append(driven.add_node())
    last = driven.wait_until_trains(3, after=last)
    driven.drain(nodes[0])
    last = driven.wait_until_trains(2, after=last)
    finish(driven)
    driven.stage.check_exactly_once(NUM_SAMPLES)
    assert driven.stage.committed()[-1]["job"] == "driver.py"
    check_nothing_is_left(driven)


@slow
def test_after_a_death_the_last_boundary_is_rescued(driven: Driven) -> None:
    """Of a worker alone, and of a node with all that is on it."""

    def wait_for_batches(generation: int) -> None:
        delivered = driven.stage.num_delivered
        wait_until(lambda: delivered(0, generation=generation) > 3, "batches")

    nodes = [driven.add_node(), driven.add_node()]
    driven.start(DRIVER.replace("max_failures=0", "max_failures=2"))
    last = driven.wait_until_trains(2)
    wait_for_batches(last)
    workers_of(driven)[0].kill()
    last = driven.wait_until_trains(2, after=last)
    wait_for_batches(last)
    driven.kill(nodes[0])
    driven.wait_until_trains(1, after=last)
    finish(driven)
    rescues = [each.get("rescue") for each in driven.stage.committed()]
    assert all(rescues[:2]), driven.output
    delivered = sum(line["num_valid"] for line in read_trace(driven.stage.trace))
    assert delivered <= NUM_SAMPLES + 2 * 2 * 6  # What was under way at each death.
    check_nothing_is_left(driven)


@slow
def test_a_job_that_is_stopped_is_not_finished(driven: Driven) -> None:
    """By the program, and by Ctrl-C."""
    driven.add_node()
    driven.start(DRIVER)
    last = driven.wait_until_trains(1)
    driven.stage.mark("stop")
    assert driven.wait() == 1
    assert "the job was stopped by the program; another fit() goes on" in driven.output
    (driven.stage.root / "marks" / "stop").unlink()
    driven.start(DRIVER)
    last = driven.wait_until_trains(1, after=last)
    driven.process.send_signal(signal.SIGINT)
    assert driven.wait() != 0
    wait_until(lambda: not workers_of(driven), "the end of the workers")
    driven.start(DRIVER)
    driven.wait_until_trains(1, after=last)
    finish(driven)
    driven.stage.check_exactly_once(NUM_SAMPLES)
    check_nothing_is_left(driven)


@slow
def test_workers_that_come_to_no_boundary_are_not_waited_for(driven: Driven) -> None:
    driven.add_node()
    driven.start(DRIVER.replace("grace=30", "grace=1"))
    driven.wait_until_trains(1)
    driven.stage.mark("hang")
    driven.process.send_signal(signal.SIGINT)
    driven.wait()
    said = "rank 0 came to no boundary within the 1 s of Elastic(grace=...)"
    wait_until(lambda: said in driven.logs, said)
    check_nothing_is_left(driven)


@slow
def test_a_program_that_fails_raises(driven: Driven) -> None:
    driven.add_node()
    driven.start(DRIVER)
    driven.wait_until_trains(1)
    driven.stage.mark("fail")
    assert driven.wait() == 1
    assert "ValueError: the loss is not a number" in driven.output
    check_nothing_is_left(driven)


def workers_of(driven: Driven) -> list[psutil.Process]:
    """Return Ray Train's workers."""
    found = []
    for pid in processes_of(driven.stage):
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if " ".join(process.cmdline()).startswith("ray::RayTrainWorker"):
                found.append(process)
    return found


@pytest.mark.parametrize("name", INTERNALS.split())
def test_a_version_that_lacks_what_is_not_public_is_refused(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, _, last = name.rpartition(".")
    monkeypatch.delattr(attrgetter(owner)(ray.train.v2), last)
    with pytest.raises(ElasticRunError, match=f"has no {name}, which "):
        Elastic()


def test_a_replica_takes_what_its_function_takes() -> None:
    """By which Ray decides whether to give it `config`."""
    from ray.train._internal.utils import count_required_parameters

    assert count_required_parameters(replica(lambda: None)) == 0
    assert count_required_parameters(replica(lambda config: config)) == 1


def test_a_replica_without_what_stops_it_is_refused() -> None:
    with pytest.raises(ElasticRunError, match=r"RunConfig\(callbacks=\[Elastic"):
        replica(lambda: None)()
