"""Options that stand in a project's pyproject.toml."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from elasticrun.__main__ import _make_parser
from elasticrun.launcher.project import words_of_project


def parsed(*words: str) -> argparse.Namespace:
    parser = _make_parser("run")
    return parser.parse_args(["run", *words_of_project(parser), *words, "train.py"])


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "experiments"
    folder.mkdir()
    monkeypatch.chdir(folder)
    path = tmp_path / "pyproject.toml"
    path.write_text(
        "[tool.elasticrun]\n"
        "replicas = 4\n"
        "save-interval = 60\n"
        "grace = 90.5\n"
        'stop-signals = ["HUP", "USR1"]\n'
        'start = "exec"\n'
        "no-lint = true\n"
        "quiet = false\n"
        "[tool.elasticrun.lint]\n"
        'ignore = ["ER104"]\n'
    )
    return path


def test_settings_of_a_project_are_defaults(project: Path) -> None:
    options = parsed("--replicas", "2")
    assert (options.replicas, options.save_interval) == ("2", "60")
    assert (options.grace, options.stop_signals) == ("90.5", "HUP,USR1")
    assert (options.start, options.lint, options.quiet) == ("exec", False, False)
    assert parsed().replicas == "4"


def test_variables_go_before_settings(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTICRUN_GRACE", "5")
    monkeypatch.setenv("PET_NPROC_PER_NODE", "3")
    options = parsed()
    assert (options.grace, options.replicas) == (None, None)
    assert options.save_interval == "60"


@pytest.mark.parametrize(
    "line",
    ["replica-count = 4", "fresh = true", "notify = true", "replicas = [4]"],
)
def test_what_is_no_option_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    project.write_text(f"[tool.elasticrun]\n{line}\n")
    with pytest.raises(SystemExit) as ended:
        parsed()
    assert ended.value.code == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"[tool.elasticrun] {line.split()[0]} =" in said
    assert "replicas = 4" in said


@pytest.mark.parametrize("line", ['start = "x"', "replicas = true", "quiet = 1"])
def test_what_no_option_may_be_is_refused_as_on_the_command_line(
    project: Path, capsys: pytest.CaptureFixture[str], line: str
) -> None:
    project.write_text(f"[tool.elasticrun]\n{line}\n")
    with pytest.raises(SystemExit) as ended:
        parsed()
    assert ended.value.code == 2
    option = "-q/--quiet" if "quiet" in line else f"--{line.split()[0]}"
    assert f"argument {option}: " in capsys.readouterr().err


def test_a_file_that_is_no_toml_is_refused(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project.write_text("[tool.elasticrun]\nreplicas = = 4\n")
    with pytest.raises(SystemExit):
        parsed()
    assert "is not valid TOML" in " ".join(capsys.readouterr().err.split())
    project.write_text("[tool.other]\nreplicas = = 4\n")
    assert parsed().replicas is None
