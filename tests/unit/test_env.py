"""The environment: what a launcher and the user say through variables."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any, cast

import pytest

from elasticrun.env import Environment, environment_of, read_environment
from elasticrun.testing import Job


def test_without_variables_there_is_one_replica_and_nothing_is_saved() -> None:
    environment = read_environment({})
    assert environment.rank == environment.local_rank == 0
    assert environment.world_size == environment.local_world_size == 1
    assert environment.checkpoint_dir is None
    assert environment.trace_dir is None
    assert not environment.has_agent_store
    assert environment.save_interval == 300.0
    assert environment.keep == 3
    assert environment.grace == 60.0


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


def test_the_settings_are_read() -> None:
    environment = read_environment(
        {
            "ELASTICRUN_CHECKPOINT_DIR": "checkpoints",
            "ELASTICRUN_SAVE_INTERVAL": "0.5",
            "ELASTICRUN_KEEP": "7",
            "ELASTICRUN_GRACE": "12.5",
            "ELASTICRUN_JOB": "digits",
            "ELASTICRUN_TRACE": "traces",
        }
    )
    assert environment.checkpoint_dir == "checkpoints"
    assert environment.save_interval == 0.5
    assert environment.keep == 7
    assert environment.grace == 12.5
    assert environment.job == "digits"
    assert environment.trace_dir == "traces"


def test_empty_variables_are_none() -> None:
    names = ("RANK", "WORLD_SIZE", "MASTER_PORT", "ELASTICRUN_KEEP", "ELASTICRUN_GRACE")
    more = ("ELASTICRUN_CHECKPOINT_DIR", "ELASTICRUN_SAVE_INTERVAL", "ELASTICRUN_TRACE")
    assert read_environment(dict.fromkeys([*names, *more], "")) == read_environment({})


@pytest.mark.parametrize(("text", "seconds"), [("off", math.inf), ("0", 0.0)])
def test_the_save_interval_has_two_special_values(text: str, seconds: float) -> None:
    environment = read_environment({"ELASTICRUN_SAVE_INTERVAL": text})
    assert environment.save_interval == seconds


@pytest.mark.parametrize("script", ["/somewhere/train.py", "train.py"])
def test_a_job_is_named_after_its_script(
    monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr("sys.argv", [script, "--lr=1"])
    assert read_environment({}).job == "train.py"


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


@pytest.mark.parametrize("text", ["-1", "often", "nan"])
def test_a_malformed_save_interval_is_named(text: str) -> None:
    message = re.escape(
        f"save_interval (ELASTICRUN_SAVE_INTERVAL) is {text!r}; give seconds (0 saves "
        "at every boundary), 'auto' or 'off'."
    )
    with pytest.raises(ValueError, match=message):
        read_environment({"ELASTICRUN_SAVE_INTERVAL": text})
    with pytest.raises(ValueError, match=message):
        Job(Environment(), save_interval=text)


def test_a_malformed_checkpoint_dir_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"checkpoint_dir \(.*DIR\) is 5; give the path"
    ):
        Job(Environment(), checkpoint_dir=cast(Any, 5))


@pytest.mark.parametrize("value", ["0", "-1", "all", "2.5"])
def test_a_malformed_keep_is_named(value: str) -> None:
    message = re.escape(
        f"keep (ELASTICRUN_KEEP) is {value!r}; give how many checkpoints to keep, at "
        "least 1."
    )
    with pytest.raises(ValueError, match=message):
        read_environment({"ELASTICRUN_KEEP": value})


@pytest.mark.parametrize("text", ["0", "-3", "long", "nan"])
def test_a_malformed_grace_is_named(text: str) -> None:
    message = re.escape(
        f"ELASTICRUN_GRACE={text!r} must be a number of seconds above 0."
    )
    with pytest.raises(ValueError, match=message):
        read_environment({"ELASTICRUN_GRACE": text})


def test_an_explicit_argument_wins(tmp_path: Path) -> None:
    environment = Environment(
        checkpoint_dir=str(tmp_path / "variable"), save_interval=0.0, keep=1
    )
    job = Job(environment, checkpoint_dir=tmp_path / "argument", save_interval="off")
    try:
        job.pass_boundary()
        assert job.save() == tmp_path / "argument" / "checkpoint-00000001"
        assert job.save() == tmp_path / "argument" / "checkpoint-00000002"
        assert not (tmp_path / "argument" / "checkpoint-00000001").exists()
        assert not (tmp_path / "variable").exists()
    finally:
        job.close()


@pytest.mark.parametrize("backend", ["mpi", "GLOO", ""])
def test_an_unknown_backend_is_refused(backend: Any) -> None:
    message = re.escape(f"backend={backend!r} must be one of auto, gloo, nccl.")
    with pytest.raises(ValueError, match=message):
        Job(Environment(), backend=backend)


def test_what_a_launcher_on_this_machine_sets_is_what_is_read() -> None:
    environment = read_environment(environment_of(rank=2, world_size=3, port=4000))
    assert (environment.rank, environment.local_rank) == (2, 2)
    assert (environment.world_size, environment.local_world_size) == (3, 3)
    assert (environment.master_address, environment.master_port) == ("127.0.0.1", 4000)


def test_tasks_of_srun_without_a_world_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"srun started 2 tasks .* WORLD_SIZE is not"):
        read_environment({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"})
    assert read_environment({"SLURM_STEP_NUM_TASKS": "1"}).world_size == 1
    assert read_environment({"SLURM_NTASKS": "2"}).world_size == 1  # In a batch script.


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
        Job(checkpoint_dir=tmp_path / "checkpoints")
    monkeypatch.delenv("ELASTICRUN_TRACE")
    Job(checkpoint_dir=tmp_path / "checkpoints").close()
