"""What `elasticrun run` can be told, and what it refuses."""

from __future__ import annotations

import re

import pytest

from elasticrun.launcher import environment
from elasticrun.launcher.options import (
    OptionError,
    Replicas,
    parse_nodes,
    parse_replicas,
    read_settings,
)
from tests.launcher.running import elasticrun
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


def test_a_number_a_range_and_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_gpus", lambda: 0)
    monkeypatch.setattr(environment, "num_cores", lambda: 4)
    assert parse_replicas("3").initial == 3
    assert parse_replicas("1:2") == Replicas(2, 1, 2)
    assert parse_replicas("6:9") == Replicas(6, 6, 9)
    assert parse_replicas("auto").initial == 4
    monkeypatch.setattr(environment, "num_gpus", lambda: 2)
    assert parse_replicas("auto").initial == 2


@pytest.mark.parametrize("text", ["0", "-1", "2:1", "many", "1:2:3", "0:4"])
def test_nonsense_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        parse_replicas(text)


def test_a_number_or_a_range_and_where_they_meet() -> None:
    assert parse_nodes(None, None, {}) is None
    for text, least, most in (("3", 3, 3), ("2:4", 2, 4)):
        settings = parse_nodes(text, "host-1.example:4000", {"PET_NNODES": "9"})
        assert settings is not None
        assert (settings.least, settings.most) == (least, most)
        assert settings.endpoint == "host-1.example:4000"
    for text, host, port in (
        ("10.0.0.1", "10.0.0.1", 29400),
        ("[fe80::1]:5", "fe80::1", 5),
        ("[fe80::1]", "fe80::1", 29400),
    ):
        settings = parse_nodes("2", text, {})
        assert settings is not None
        assert (settings.host, settings.port) == (host, port)


@pytest.mark.parametrize(
    ("nodes", "where", "text"),
    [
        ("0", "host:1", "--nodes 0"),
        ("3:2", "host:1", "--nodes 3:2"),
        ("2", None, "--rdzv-endpoint"),
        (None, "host:1", "one makes no sense without the other"),
        ("2", "host:port", "give HOST:PORT"),
        ("2", "host:65536", "ports go from 1 to 65535"),
        ("2", ":29400", "give HOST:PORT"),
    ],
)
def test_nodes_that_cannot_be_are_refused(
    nodes: str | None, where: str | None, text: str
) -> None:
    with pytest.raises(OptionError, match=re.escape(text)):
        parse_nodes(nodes, where, {})


@pytest.mark.parametrize("nodes", ["2", "1:4"])
def test_one_of_several_pods_does_not_train_alone(nodes: str) -> None:
    variables = {"PET_NNODES": nodes, "PET_RDZV_ENDPOINT": "job-0:29400"}
    words = f"--nodes {nodes} --rdzv-endpoint job-0:29400"
    with pytest.raises(OptionError, match=words):
        parse_nodes(None, None, variables)
    assert parse_nodes(None, None, {"PET_NNODES": "1"}) is None


@pytest.mark.parametrize(
    ("option", "why"),
    [
        ("--fresh", "would move aside what another has begun"),
        ("--spares", "which other machines may change"),
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
