"""What `elasticrun run` can be told, and what it refuses."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from elasticrun.__main__ import main
from elasticrun.launcher import environment
from elasticrun.launcher.options import (
    OptionError,
    Replicas,
    options_of_torchrun,
    parse_max_restarts,
    parse_nodes,
    parse_replicas,
    read_settings,
)
from tests.launcher.running import elasticrun, run, running
from tests.support.stage import Stage


def test_the_option_wins_and_what_cannot_be_is_refused() -> None:
    variables = {"ELASTICRUN_STOP_SIGNALS": "ALRM", "ELASTICRUN_GRACE": "300"}
    settings, given = read_settings(variables, stop_signals=None, grace=None)
    assert (settings.stop_signals, settings.grace, given) == ((15, 2, 14), 300.0, {})
    settings, given = read_settings(variables, stop_signals="XCPU", grace="5")
    assert (settings.stop_signals, settings.grace) == ((15, 2, 24), 5.0)
    assert given == {"ELASTICRUN_STOP_SIGNALS": "XCPU", "ELASTICRUN_GRACE": "5"}
    with pytest.raises(OptionError, match="--stop-signals is 'KILL'"):
        read_settings({}, stop_signals="KILL")
    with pytest.raises(OptionError, match="ELASTICRUN_STOP_SIGNALS. is 'STOP'"):
        read_settings({"ELASTICRUN_STOP_SIGNALS": "STOP"})
    with pytest.raises(OptionError, match="--grace is 'inf'; give the seconds above"):
        read_settings({}, grace="inf")
    with pytest.raises(OptionError, match="--save-interval is ''; give a value, or"):
        read_settings({}, grace=None, save_interval="")
    # A program may give another one.
    assert read_settings({"ELASTICRUN_KEEP": "all"})[0].keep == 3


def test_options_have_no_abbreviations(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--repl", "1", "train.py"])
    assert "unrecognized arguments: --repl" in capsys.readouterr().err


def test_a_number_a_range_and_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_gpus", lambda: 0)
    monkeypatch.setattr(environment, "num_cores", lambda: 4)
    assert parse_replicas("3").initial == 3
    assert parse_replicas("1:2") == Replicas(2, 1, 2)
    assert parse_replicas("6:9") == Replicas(6, 6, 9)
    with pytest.raises(OptionError, match="3 replicas: --replicas MIN:MAX allows this"):
        Replicas(2, 1, 2).check(3)
    assert parse_replicas("auto").initial == 4
    monkeypatch.setattr(environment, "num_gpus", lambda: 2)
    assert parse_replicas("auto").initial == 2


def test_virtual_replicas_bound_the_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_gpus", lambda: 0)
    monkeypatch.setattr(environment, "num_cores", lambda: 8)
    assert parse_replicas("auto", num_shares=4).initial == 4
    assert parse_replicas("2:9", num_shares=4) == Replicas(4, 2, 9)
    settings, given = read_settings({}, virtual_replicas="4")
    assert settings.virtual_replicas == 4
    assert given == {"ELASTICRUN_VIRTUAL_REPLICAS": "4"}
    with pytest.raises(OptionError, match="--virtual-replicas is '0'; give a number"):
        read_settings({}, virtual_replicas="0")
    with pytest.raises(OptionError, match="5 replicas: the job has 4 virtual replicas"):
        parse_replicas("5", num_shares=4)


@pytest.mark.parametrize("text", ["0", "-1", "2:1", "many", "1:2:3", "0:4"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        parse_replicas(text)


PLACE = Path("/checkpoints")


def test_a_number_or_a_range_and_where_they_meet() -> None:
    for alone in (None, "1", "1:1"):
        assert parse_nodes(alone, None, place=PLACE) is None
    for text, least, most in (("3", 3, 3), ("2:4", 2, 4)):
        settings = parse_nodes(text, "host-1.example:4000", place=PLACE)
        assert settings is not None
        assert (settings.least, settings.most) == (least, most)
        assert settings.endpoint == "host-1.example:4000"
        assert settings.place == ""
    for text, host, port in (
        ("10.0.0.1", "10.0.0.1", 29400),
        ("[fe80::1]:5", "fe80::1", 5),
        ("[fe80::1]", "fe80::1", 29400),
    ):
        settings = parse_nodes("2", text, place=PLACE)
        assert settings is not None
        assert (settings.host, settings.port) == (host, port)


def test_without_an_endpoint_they_meet_where_checkpoints_are() -> None:
    settings = parse_nodes("2", None, place=PLACE, address="10.0.0.1")
    assert settings is not None
    assert settings.endpoint == "the endpoint in /checkpoints/rendezvous"
    assert (settings.place, settings.address) == ("/checkpoints", "10.0.0.1")


@pytest.mark.parametrize(
    ("nodes", "where", "address", "text"),
    [
        ("0", "host:1", None, "--nodes 0"),
        ("3:2", "host:1", None, "--nodes 3:2"),
        (None, "host:1", None, "Add --nodes MIN:MAX"),
        (None, None, "host", "Add --nodes MIN:MAX"),
        ("2", "host:port", None, "give HOST:PORT"),
        ("2", "host:65536", None, "ports go from 1 to 65535"),
        ("2", ":29400", None, "give HOST:PORT"),
        ("2", None, "http://host", "--address http://host: give the name"),
    ],
)
def test_nodes_that_cannot_be_are_refused(
    nodes: str | None, where: str | None, address: str | None, text: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        parse_nodes(nodes, where, place=PLACE, address=address)


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        # Kubeflow's Trainer (TrainJob), also for one node.
        (
            {
                "PET_NNODES": "4",
                "PET_NPROC_PER_NODE": "auto",
                "PET_NODE_RANK": "2",
                "PET_MASTER_ADDR": "job-0-0.job",
                "PET_MASTER_PORT": "29500",
            },
            {"nodes": "4", "replicas": "auto"},
        ),
        (
            {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "job"},
            {"replicas": "2"},
        ),
        # Its Training Operator (PyTorchJob) with an elastic policy.
        (
            {
                "PET_NNODES": "1:4",
                "PET_RDZV_BACKEND": "c10d",
                "PET_RDZV_ENDPOINT": "job-worker-0:23456",
                "PET_MAX_RESTARTS": "7",
            },
            {
                "nodes": "1:4",
                "rdzv_endpoint": "job-worker-0:23456",
                "max_restarts": "7",
            },
        ),
        ({"PET_NNODES": "1:1", "PET_RDZV_ENDPOINT": "localhost:0"}, {}),
        ({}, {}),
    ],
)
def test_what_torchrun_would_read_is_read(
    variables: dict[str, str], options: dict[str, str]
) -> None:
    assert options_of_torchrun(variables) == options


def test_torchruns_words_are_understood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_gpus", lambda: 2)
    assert parse_replicas("gpu") == parse_replicas("auto")
    assert parse_max_restarts(None) == 3
    with pytest.raises(OptionError, match="--max-restarts -1: give 0 or more"):
        parse_max_restarts("-1")


@pytest.mark.wide
def test_the_command_line_wins_over_torchruns_variables(stage: Stage) -> None:
    variables = {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "nowhere.invalid:1"}
    with running(stage, **variables) as node:
        node.wait_until_said("looking for nowhere.invalid:1")
    script = stage.root / "script.py"
    script.write_text("import os\nprint('of', os.environ['WORLD_SIZE'])\n")
    words = ["--nnodes", "1", "--address", "127.0.0.1", "--nproc_per_node=3"]
    job = run(
        stage,
        *words,
        script=script,
        name="-2",
        PET_NNODES="5",
        PET_NPROC_PER_NODE="1",
    )
    assert job.process.returncode == 0, job.events
    assert "[2] of 3" in job.output


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--fresh", "would move aside what another has just begun"),
        ("--spares", "other machines may change both"),
    ],
)
def test_what_many_machines_cannot_have_is_refused(
    stage: Stage, option: str, why: str
) -> None:
    options = ["--nodes", "2", "--rdzv-endpoint", "127.0.0.1:1", option]
    script = stage.root / "script.py"
    script.touch()
    refused = elasticrun(stage, "run", *options, script)
    assert refused.returncode == 2
    assert why in refused.stderr


def test_a_name_that_is_no_utf_8_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"tr\xff.py")
    Path(name).touch()
    Path("train.py").touch()
    for words in ([name], ["--checkpoint-dir", name, "train.py"]):
        assert main(["run", *words]) == 2
        assert "tr\\udcff.py': this name is no UTF-8" in capsys.readouterr().err
