"""The environment: what a launcher and the user say through variables."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

from elasticrun.replicas.environment import (
    first_host,
    read_environment,
    torchrun_variables,
)
from elasticrun.testing import Job, Settings


def test_without_variables_there_is_one_replica() -> None:
    environment = read_environment({})
    assert environment.rank == environment.local_rank == 0
    assert environment.world_size == environment.local_world_size == 1
    assert not environment.has_agent_store


def test_torchruns_variables_are_read() -> None:
    environment = read_environment(
        {
            "RANK": "5",
            "LOCAL_RANK": "1",
            "WORLD_SIZE": "8",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "node-0",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
    )
    assert (environment.rank, environment.local_rank) == (5, 1)
    assert (environment.world_size, environment.local_world_size) == (8, 4)
    assert (environment.master_address, environment.master_port) == ("node-0", 29500)
    assert environment.has_agent_store


def test_empty_variables_are_none() -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT")
    assert read_environment(dict.fromkeys(names, "")) == read_environment({})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
@pytest.mark.parametrize("text", ["-1", "one", "1.5"])
def test_a_malformed_rank_is_named(name: str, text: str) -> None:
    message = re.escape(f"{name}={text!r} must be a whole number from 0 up.")
    with pytest.raises(ValueError, match=message):
        read_environment({"WORLD_SIZE": "4", name: text})


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"])
@pytest.mark.parametrize("text", ["0", "-1", "many"])
def test_a_malformed_size_or_port_is_named(name: str, text: str) -> None:
    message = re.escape(f"{name}={text!r} must be a whole number from 1 up.")
    with pytest.raises(ValueError, match=message):
        read_environment({name: text})


def test_a_rank_beyond_the_world_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match=r"RANK=4 is not below WORLD_SIZE=4\. Ranks count from 0; start the "
        r"script with torchrun, or set both variables alike everywhere\.",
    ):
        read_environment({"RANK": "4", "WORLD_SIZE": "4"})


@pytest.mark.parametrize("backend", ["mpi", "GLOO", ""])
def test_an_unknown_backend_is_refused(backend: Any) -> None:
    message = re.escape(f"backend={backend!r} must be one of auto, gloo, nccl.")
    with pytest.raises(ValueError, match=message):
        Job(settings=Settings(backend=backend))


def test_what_a_launcher_on_this_machine_sets_is_what_is_read() -> None:
    environment = read_environment(torchrun_variables(rank=2, world_size=3, port=4000))
    assert (environment.rank, environment.local_rank) == (2, 2)
    assert (environment.world_size, environment.local_world_size) == (3, 3)
    assert (environment.master_address, environment.master_port) == ("127.0.0.1", 4000)


def test_what_a_replica_starts_is_not_followed_as_it_is() -> None:
    def started_by(launcher: str) -> tuple[bool, bool]:
        found = read_environment({"ELASTICRUN_LAUNCHER_PID": launcher})
        return found.is_launched, found.is_followed_here

    assert started_by(f"{os.getppid()}") == (True, True)
    assert started_by(f"{os.getppid()}+") == (True, False)  # Among nodes.
    assert started_by(f"{os.getpid()}") == (False, False)
    assert started_by("") == (False, False)


TASK = {
    "SLURM_JOB_ID": "1042",
    "SLURM_STEP_ID": "3",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "gpu-a[08-09,11],gpu-b1",
    "SLURM_NODEID": "2",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "9",  # Of the allocation.
}


def test_a_task_of_srun_knows_its_place() -> None:
    environment = read_environment(TASK)
    assert (environment.rank, environment.world_size) == (5, 7)
    assert (environment.local_rank, environment.local_world_size) == (1, 2)
    assert environment.master_address == "gpu-a08"
    port = environment.master_port
    assert port is not None
    assert 10_000 <= port < 30_000
    assert port != read_environment({**TASK, "SLURM_STEP_ID": "4"}).master_port
    assert environment.step == "1042.3"
    assert not environment.has_agent_store
    here = {"SLURM_STEP_TASKS_PER_NODE": "7", "SLURM_NODEID": "0"}
    alone = read_environment({**TASK, **here})
    assert (alone.master_address, alone.local_world_size) == ("127.0.0.1", 7)
    given = read_environment({**TASK, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "5"})
    assert (given.master_address, given.master_port) == ("10.0.0.7", 5)


@pytest.mark.parametrize(
    ("nodes", "host"),
    [
        ("n1", "n1"),
        ("n[1-2]", "n1"),
        ("node[001-004,007]", "node001"),
        ("a,b[1-2]", "a"),
        ("rack[1-2]node[3,5-7],x", "rack1node3"),
        ("host[7,9].example", "host7.example"),
    ],
)
def test_the_first_of_slurms_nodes_has_rank_0(nodes: str, host: str) -> None:
    assert first_host(nodes) == host


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_NODELIST"])
def test_tasks_of_srun_that_cannot_be_told_apart_are_refused(missing: str) -> None:
    variables = {name: value for name, value in TASK.items() if name != missing}
    with pytest.raises(ValueError, match=rf"srun started 7 tasks .*{missing}"):
        read_environment(variables)
    launched = {**variables, "RANK": "0", "WORLD_SIZE": "2"}
    assert read_environment(launched).world_size == 2


@pytest.mark.parametrize(
    ("address", "local_world_size"), [("localhost", 16), ("10.0.0.1", 2)]
)
def test_replicas_of_this_machine_without_local_world_size(
    address: str, local_world_size: int
) -> None:
    environment = read_environment(
        {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "MASTER_ADDR": address}
    )
    assert environment.local_world_size == local_world_size


def test_a_start_that_fails_lets_the_directory_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICRUN_TRACE", str(tmp_path / "file" / "trace"))
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        Job(settings=Settings.read(checkpoint_dir=tmp_path / "checkpoints"))
    monkeypatch.delenv("ELASTICRUN_TRACE")
    Job(settings=Settings.read(checkpoint_dir=tmp_path / "checkpoints")).close()
