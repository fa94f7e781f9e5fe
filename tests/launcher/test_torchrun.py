"""Scripts run unchanged under `torchrun`, through stops, deaths, joins and losses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from elasticrun.testing import read_trace
from tests.support.scripts import linear
from tests.support.sockets import kept_port
from tests.support.stage import DEADLINE, Stage, wait_until

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "tests" / "support" / "scripts" / "linear.py"
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}

pytestmark = pytest.mark.slow(40)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    stage = Stage(tmp_path_factory.mktemp("uninterrupted"))
    run(stage, [sys.executable, str(SCRIPT), str(stage.root)])
    return stage


# Starting processes


@contextmanager
def started(
    stage: Stage, command: list[str], **variables: object
) -> Iterator[psutil.Popen]:
    """Start a command; leave nothing of it behind."""
    environment = {
        **os.environ,
        **stage.variables(PYTHONPATH=REPOSITORY, PYTHONWARNINGS="default"),
        **{name: str(value) for name, value in variables.items()},
    }
    with open(stage.root / "output.log", "ab") as output:
        process = psutil.Popen(
            command,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        kill_tree(process)


def kill_tree(process: Any) -> None:
    """Kill a process and all that it has started, as when its machine goes away."""
    try:
        tree = [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for victim in tree:
        try:
            victim.kill()
        except psutil.NoSuchProcess:
            continue
    process.wait(DEADLINE)


def run(stage: Stage, command: list[str], **variables: object) -> int:
    with started(stage, command, **variables) as process:
        return int(process.wait(DEADLINE))


def torchrun(
    stage: Stage,
    *script_options: object,
    num_nodes: str = "1",
    num_replicas: int = 2,
    max_restarts: int = 0,
    port: int = 0,
) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nnodes={num_nodes}",
        f"--nproc-per-node={num_replicas}",
        f"--max-restarts={max_restarts}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=localhost:{port}",
        "--rdzv-id=test",
        "--rdzv-conf=last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=10",
        "--local-addr=127.0.0.1",
        str(SCRIPT),
        str(stage.root),
        *map(str, script_options),
    ]


def pid(stage: Stage, generation: int, rank: int) -> int:
    path = stage.root / f"pid-{generation}-{rank}"
    wait_until(lambda: path.exists() and path.read_text(), str(path))
    return int(path.read_text())


# What must come out


def check_trained_right(stage: Stage, uninterrupted: Stage) -> None:
    """Check that samples and parameters are those of a run without interruption."""
    for epoch in range(linear.NUM_EPOCHS):
        assert stage.samples(epoch=epoch) == uninterrupted.samples(epoch=epoch)
        assert stage.delivered(epoch=epoch) == list(range(linear.NUM_SAMPLES))
    expected = torch.load(uninterrupted.root / "parameters.pt", weights_only=True)
    trained = torch.load(stage.root / "parameters.pt", weights_only=True)
    torch.testing.assert_close(trained, expected, rtol=1e-10, atol=1e-12)


def check_says_nothing(log: str) -> None:
    """See no "terminate called", no warnings of torch, no traceback."""
    for line in log.splitlines():
        assert line.startswith("INFO:elasticrun."), log


def generations(stage: Stage) -> list[int]:
    return sorted({line["generation"] for line in read_trace(stage.trace)})


def signal_rank(stage: Stage, agent: psutil.Popen) -> None:
    os.kill(pid(stage, 0, 1), signal.SIGTERM)


def signal_agent(stage: Stage, agent: psutil.Popen) -> None:
    agent.terminate()


def signal_everything(stage: Stage, agent: psutil.Popen) -> None:
    """Signal the agent, which signals its replicas, and these too, as Slurm does."""
    for process in [agent, *agent.children(recursive=True)]:
        process.terminate()


# One machine


@pytest.mark.slow(50)
@pytest.mark.parametrize(
    "by",
    [
        *(
            pytest.param(by, marks=pytest.mark.soak)
            for by in (signal_rank, signal_agent)
        ),
        signal_everything,
    ],
)
@pytest.mark.wide
def test_a_signal_saves_once_and_the_same_command_goes_on(
    stage: Stage, uninterrupted: Stage, by: Callable[[Stage, psutil.Popen], None]
) -> None:
    command = torchrun(stage, "--hold=0:20")
    with started(stage, command) as agent:
        stage.wait_for("held-0-0", "held-0-1")
        listening = [
            connection.laddr.ip
            for rank in (0, 1)
            for connection in psutil.Process(pid(stage, 0, rank)).net_connections()
            if connection.status == psutil.CONN_LISTEN
        ]
        assert listening  # The job's store and gloo.
        assert set(listening) <= LOOPBACK
        by(stage, agent)
        wait_until(lambda: "stopping at the next" in stage.log("rank-1"))
        stage.mark("stop-0")
        assert agent.wait(DEADLINE) != 0
    [checkpoint] = stage.committed()
    assert checkpoint["position"]["index"] > 0
    assert "because of SIGTERM; saved" in stage.log("rank-0")
    if by is signal_rank:
        assert "exitcode  : 143" in (stage.root / "output.log").read_text()
    same = torchrun(stage, num_replicas=3)
    alone = [sys.executable, str(SCRIPT), str(stage.root)]
    before = [stage.log(f"rank-{rank}") for rank in range(3)]
    assert run(stage, same if by is signal_everything else alone) == 0
    for rank in range(3):
        check_says_nothing(stage.log(f"rank-{rank}").removeprefix(before[rank]))
    check_trained_right(stage, uninterrupted)
    stage.check_exactly_once(linear.NUM_SAMPLES, num_epochs=linear.NUM_EPOCHS)


@pytest.mark.slow(60)
@pytest.mark.parametrize(
    "attempt", [0, *(pytest.param(n, marks=pytest.mark.soak) for n in range(1, 51))]
)
@pytest.mark.wide
def test_a_killed_rank_is_replaced_and_the_first_new_generation_goes_on(
    stage: Stage, uninterrupted: Stage, attempt: int
) -> None:
    """Each of the two in its turn."""
    command = torchrun(stage, "--kill=0:0:20", "--kill=1:1:40", max_restarts=3)
    assert run(stage, command, ELASTICRUN_SAVE_INTERVAL=0) == 0
    assert generations(stage) == [0, 1, 2]
    for generation, killed_in in ((1, 20), (2, 40)):
        epoch, batch = min(
            (line["epoch"], line["batch"])
            for line in read_trace(stage.trace)
            if line["generation"] == generation
        )
        # What the last boundary has captured may still have been in flight.
        assert (epoch, batch) in ((0, killed_in - 1), (0, killed_in))
    check_trained_right(stage, uninterrupted)


# Two machines


@pytest.mark.wide
def test_a_node_joins_and_a_node_dies(stage: Stage, uninterrupted: Stage) -> None:
    command = torchrun(
        stage,
        "--hold=0:10",
        "--hold=1:40",
        num_nodes="1:2",
        num_replicas=1,
        max_restarts=3,
        port=kept_port(),
    )
    # With its store shared, the agent of rank 0 tells no address to a node that joins
    # later (torch 2.13), which then waits for it in vain.
    variables = {
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1,
        "ELASTICRUN_SAVE_INTERVAL": 0.05,
    }
    with started(stage, command, **variables) as first:
        stage.wait_for("held-0-0")
        with started(stage, command, **variables) as second:
            wait_until(lambda: "stopping at the next" in stage.log("rank-0"))
            stage.mark("stop-0")
            stage.wait_for("held-1-0", "held-1-1")
            kill_tree(second)
            stage.mark("go-1")
            assert first.wait(DEADLINE) == 0
    worlds = {
        line["generation"]: line["world_size"] for line in read_trace(stage.trace)
    }
    assert worlds == {0: 1, 1: 2, 2: 1}
    check_trained_right(stage, uninterrupted)


# Without torchrun


@pytest.mark.parametrize("options", [[], ["--own-group"]])
@pytest.mark.wide
def test_a_shell_can_start_the_replicas(
    stage: Stage, uninterrupted: Stage, options: list[str]
) -> None:
    port = kept_port()
    command = [sys.executable, str(SCRIPT), str(stage.root), *options]
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                started(
                    stage,
                    command,
                    RANK=rank,
                    LOCAL_RANK=rank,
                    WORLD_SIZE=2,
                    MASTER_ADDR="127.0.0.1",
                    MASTER_PORT=port,
                )
            )
            for rank in (0, 1)
        ]
        assert [replica.wait(DEADLINE) for replica in replicas] == [0, 0]
    check_trained_right(stage, uninterrupted)


@pytest.mark.wide
def test_a_process_group_of_the_programs_own_is_used_and_left_alone(
    stage: Stage, uninterrupted: Stage
) -> None:
    assert run(stage, torchrun(stage, "--own-group")) == 0
    assert stage.has("finished-0-of-2", "finished-1-of-2")
    check_trained_right(stage, uninterrupted)


@pytest.mark.wide
def test_a_script_alone_ends_with_the_code_of_the_stop(
    stage: Stage, uninterrupted: Stage
) -> None:
    command = [sys.executable, str(SCRIPT), str(stage.root)]
    with started(stage, [*command, "--hold=0:20"]) as process:
        stage.wait_for("held-0-0")
        process.terminate()
        wait_until(lambda: "stopping at the next" in stage.log("rank-0"))
        stage.mark("stop-0")
        assert process.wait(DEADLINE) == 143
    before = stage.log("rank-0")
    assert run(stage, command) == 0
    check_says_nothing(stage.log("rank-0").removeprefix(before))
    check_trained_right(stage, uninterrupted)
    stage.check_exactly_once(linear.NUM_SAMPLES, num_epochs=linear.NUM_EPOCHS)
