"""The command line itself: quick to start, and the same as the module."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.__main__ import _make_parser, main
from elasticrun.checkpoint.manifest import version


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from elasticrun.__main__ import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'numpy', 'psutil', 'asyncio', 'elasticrun.lint'}\n"
        "print(sorted(heavy & set(sys.modules)))\n"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert finished.stdout.endswith("[]\n")
    for command in (
        "run",
        "scale",
        "status",
        "stop",
        "logs",
        "lint",
        "rule",
        "checkpoints",
    ):
        assert re.search(rf"\n    {command}\s", finished.stdout)


def test_the_launcher_does_not_import_torch() -> None:
    code = (
        "import sys, elasticrun.launcher.run, elasticrun.launcher.commands\n"
        "print(sorted({'torch', 'numpy', 'psutil', 'asyncio'} & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert finished.stdout == "[]\n"


def test_the_version_is_the_packages() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "elasticrun", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == f"elasticrun {version()}\n"


def test_no_command_is_a_usage_error() -> None:
    finished = subprocess.run(
        [sys.executable, "-m", "elasticrun"], capture_output=True, check=False
    )
    assert finished.returncode == 2


@pytest.mark.parametrize("command", ["run", "check"])
def test_only_what_ends_the_options_is_not_the_programs(command: str) -> None:
    parser = _make_parser(command)
    for words, script, arguments in (
        (["x", "--", "-a"], "x", ["-a"]),
        (["--", "x", "--", "-a"], "x", ["-a"]),
        (["--replicas", "2", "--", "x", "--replicas", "3"], "x", ["--replicas", "3"]),
        (["x", "-a", "--", "b", "--"], "x", ["-a", "--", "b", "--"]),
        (["x"], "x", []),
    ):
        options = parser.parse_args([command, *words])
        assert (options.script, options.args) == (script, arguments)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["stauts"], "invalid choice: 'stauts'"),
        (["run", "--fre", "train.py"], "--fre"),  # No part of a name is taken for it.
    ],
)
def test_a_mistyped_command_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert said in capsys.readouterr().err


def test_alone_it_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "restart it after crashes" in capsys.readouterr().err


def test_an_option_behind_the_script_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["run", "--replicas", "0", "train.py", "--nodes=2", "--epochs", "3"]
    (tmp_path / "train.py").touch()
    assert main([*arguments[:3], str(tmp_path / "train.py"), *arguments[4:]]) == 2
    said = capsys.readouterr().err
    assert said.startswith("elasticrun: note: --nodes stands behind the script")
