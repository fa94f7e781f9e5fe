"""A state that has another name after a restart began anew: that is told, once."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    CheckpointWarning,
    Variables,
    once,
    remaining_epochs_until,
    save_all_states,
)
from tests.support.data import Numbers
from tests.support.generations import run_once


def save_with(*names: str) -> None:
    for name in names:
        Variables(name=name, value=1)
    save_all_states()


def test_a_renamed_state_is_told_at_the_first_save(tmp_path: Path) -> None:
    run_once(lambda: save_with("model", "best"), tmp_path)

    def renamed() -> None:
        Variables(name="best", value=1)
        Variables(name="net", value=1)
        with pytest.warns(CheckpointWarning) as caught:
            save_all_states()
        (told,) = (str(warning.message) for warning in caught)
        first = tmp_path / "checkpoint-00000001"
        assert told.startswith(f"{first} has nothing for 'net', which was therefore")
        assert "nothing has loaded its 'model' yet. Was a state renamed?" in told
        save_all_states()

    run_once(renamed, tmp_path)


def test_it_is_told_at_the_end_of_a_job_that_saves_nothing(tmp_path: Path) -> None:
    run_once(lambda: save_with("model"), tmp_path)
    with pytest.warns(CheckpointWarning, match="has nothing for 'net'"):
        run_once(lambda: Variables(name="net", value=1), tmp_path)


@pytest.mark.slow
def test_an_exception_is_no_reason_to_tell(tmp_path: Path) -> None:
    run_once(lambda: save_with("model"), tmp_path)

    def fails() -> None:
        Variables(name="before-the-model", value=1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_once(fails, tmp_path)
    code = (
        "import sys, elasticrun\n"
        "elasticrun.init(sys.argv[1])\n"
        "elasticrun.Variables(name='before-the-model', value=1)\n"
        "1 / 0\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "ELASTICRUN_JOB": "test"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ZeroDivisionError" in ended.stderr
    assert "CheckpointWarning" not in ended.stderr


def test_what_is_new_or_comes_later_is_not_told(tmp_path: Path) -> None:
    """A state more, a state of a later phase, other loaders and settings."""

    def first() -> None:
        Variables(name="model", value=1)
        for _ in remaining_epochs_until(1):
            once("announced")
            list(AdaptiveDataLoader(Numbers(4), 2, name="first"))
        save_with("late")

    def second() -> None:
        Variables(name="model", value=1)
        save_all_states()
        for _ in remaining_epochs_until(2):
            list(AdaptiveDataLoader(Numbers(4), 2, name="another"))
        Variables(name="late", value=1)

    def third() -> None:
        for name in ("model", "late", "new"):
            Variables(name=name, value=1)
        save_all_states()

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_once(first, tmp_path)
        run_once(second, tmp_path)
        run_once(third, tmp_path)
