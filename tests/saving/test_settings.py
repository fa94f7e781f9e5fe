"""Settings: from the program, from variables, from the command line; or refused."""

from __future__ import annotations

import inspect
import math
import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elasticrun import CheckpointError, init
from elasticrun.__main__ import main
from elasticrun.saving.settings import SaveEvery, Settings
from elasticrun.testing import Job


def test_without_any_nothing_is_saved_and_the_rest_has_defaults() -> None:
    settings = Settings.read({})
    assert settings.checkpoint_dir is settings.trace_dir is None
    assert settings.save_interval == 300.0
    assert settings.keep == 3
    assert settings.grace == 60.0
    assert settings.async_save
    assert settings.trust_pickle == frozenset()


@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("/home/me/train.py", "train.py"),
        ("/usr/lib/python3/site-packages/digits/__main__.py", "digits"),
        *[(program, "") for program in ("", "-", "-c", "/lib/ipykernel_launcher.py")],
        ("/site-packages/ray/_private/workers/default_worker.py", ""),
    ],
)
def test_a_job_is_called_like_its_script_and_has_no_directory_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, name: str
) -> None:
    monkeypatch.setattr(sys, "argv", [program])
    settings = Settings.read({}, checkpoint_dir=tmp_path)
    assert settings.job == name
    if name:
        Job(settings=settings).close()
    else:
        Job(settings=Settings()).close()
        with pytest.raises(CheckpointError, match=r"has no name.*Set ELASTICRUN_JOB"):
            Job(settings=settings)
        Job(settings=replace(settings, job="digits")).close()


VARIABLES: list[tuple[str, str, Any]] = [
    ("checkpoint_dir", "checkpoints", "checkpoints"),
    ("save_interval", "0.5", 0.5),
    ("save_interval", "0.0", 0.0),
    ("save_interval", "off", math.inf),
    ("save_interval", "inf", math.inf),
    ("save_interval", "auto", "auto"),
    ("save_every", "500,epoch", SaveEvery(500, is_each_epoch=True)),
    ("save_every", " 5 ", SaveEvery(5)),
    ("keep", "7", 7),
    ("async_save", "on", True),
    ("async_save", "off", False),
    ("rescue", "off", False),
    ("rescue", "always", "always"),
    ("grace", "12.5", 12.5),
    ("stop_signals", "USR2, quit", (15, 2, 12, 3)),
    ("timeout", "90", 90.0),
    ("job", "digits", "digits"),
    ("trace_dir", "traces", "traces"),
]
NAMES = {each.name: each.metadata["variable"] for each in fields(Settings)}


@pytest.mark.parametrize(("name", "text", "value"), VARIABLES)
def test_a_variable_and_an_argument_mean_the_same(
    name: str, text: str, value: Any
) -> None:
    settings = Settings.read({NAMES[name]: text})
    assert getattr(settings, name) == value
    assert settings == Settings.read({NAMES[name]: ""}, **{name: text})


def test_an_argument_wins_over_a_variable() -> None:
    variables = {"ELASTICRUN_KEEP": "1", "ELASTICRUN_SAVE_INTERVAL": "5"}
    settings = Settings.read(variables, keep=2, save_interval=None)
    assert (settings.keep, settings.save_interval) == (2, 5.0)


def test_an_empty_variable_is_none() -> None:
    names = [variable for variable in NAMES.values() if variable]
    assert Settings.read(dict.fromkeys(names, "")) == Settings.read({})


@pytest.mark.parametrize("script", ["/somewhere/train.py", "train.py"])
def test_a_job_is_named_after_its_script(
    monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    monkeypatch.setattr("sys.argv", [script, "--lr=1"])
    assert Settings.read({}).job == "train.py"


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("checkpoint_dir", 5, "checkpoint_dir (ELASTICRUN_CHECKPOINT_DIR) is 5; give"),
        *(
            (
                "save_interval",
                value,
                f"save_interval (ELASTICRUN_SAVE_INTERVAL) is {value!r}; give seconds",
            )
            for value in ("-1", "often", "nan", True, [])
        ),
        *(
            ("save_every", value, f"save_every (ELASTICRUN_SAVE_EVERY) is {value!r}; ")
            for value in ("0", "500,200", 2.0, True)
        ),
        ("save_every", "epochs", "or both with a comma between them"),
        *(
            (
                "keep",
                value,
                f"keep (ELASTICRUN_KEEP) is {value!r}; give how many checkpoints",
            )
            for value in ("0", "-1", "all", "2.5", 2.5, True, [])
        ),
        ("timeout", "0", "timeout (ELASTICRUN_TIMEOUT) is '0'; give the seconds"),
        ("timeout", [], "timeout (ELASTICRUN_TIMEOUT) is []"),
        ("async_save", "no", "async_save (ELASTICRUN_ASYNC_SAVE) is 'no'; give True"),
        (
            "rescue",
            "yes",
            "rescue (ELASTICRUN_RESCUE) is 'yes'; give True or False, in",
        ),
        *(
            (
                "grace",
                value,
                f"grace (ELASTICRUN_GRACE) is {value!r}; give the seconds above 0.",
            )
            for value in ("0", "-3", "long", "nan", "inf")
        ),
        *(
            (
                "stop_signals",
                value,
                f"stop_signals (ELASTICRUN_STOP_SIGNALS) is {value!r}, but ",
            )
            for value in ("KILL", "USR1,,USR2", "SEGV", "10")
        ),
        ("trust_pickle", 5, "trust_pickle is 5; give the names of the states"),
    ],
)
def test_a_malformed_one_is_named(name: str, value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=re.escape(told)):
        Settings.read({}, **{name: value})
    if NAMES[name] and isinstance(value, str):
        with pytest.raises(ValueError, match=re.escape(told)):
            Settings.read({NAMES[name]: value})


def test_an_unknown_one_is_refused() -> None:
    with pytest.raises(TypeError, match="keep_all"):
        Settings.read({}, keep_all=True)


def test_whole_numbers_of_numpy_are_some() -> None:
    settings = Settings.read({}, keep=np.int64(2), save_every=np.int64(5))
    assert (settings.keep, settings.save_every) == (2, SaveEvery(5))


def test_init_takes_all_but_what_launchers_decide() -> None:
    by_launchers = {"grace", "stop_signals", "job", "trace_dir"}
    assert set(inspect.signature(init).parameters) == NAMES.keys() - by_launchers


@pytest.mark.parametrize("value", ["-1", "often"])
def test_the_command_line_refuses_what_a_job_refuses(
    value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    script = str(tmp_path / "train.py")
    assert main(["run", f"--save-interval={value}", script]) == 2
    assert f"--save-interval is {value!r}; give seconds (0" in capsys.readouterr().err


def test_settings_decide_what_a_job_does(tmp_path: Path) -> None:
    variables = {
        "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path / "variable"),
        "ELASTICRUN_SAVE_INTERVAL": "0",
        "ELASTICRUN_KEEP": "1",
    }
    settings = Settings.read(
        variables, checkpoint_dir=tmp_path / "argument", save_interval="off"
    )
    job = Job(settings=settings)
    try:
        job.boundary.reach()
        assert job.save() == tmp_path / "argument" / "checkpoint-00000001"
        assert job.save() == tmp_path / "argument" / "checkpoint-00000002"
        assert not (tmp_path / "argument" / "checkpoint-00000001").exists()
        assert not (tmp_path / "variable").exists()
    finally:
        job.close()
