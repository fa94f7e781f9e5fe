"""The command line itself: quick to start, and the same as the module."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from elasticrun.__main__ import _make_parser
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
        "import sys, elasticrun.launcher.running, elasticrun.launcher.commands\n"
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
        (["x", "--", "-a"], "x", ["--", "-a"]),
        (["--", "x", "--", "-a"], "x", ["--", "-a"]),
        (["--replicas", "2", "--", "x", "--replicas", "3"], "x", ["--replicas", "3"]),
        (["x", "-a", "--", "b", "--"], "x", ["-a", "--", "b", "--"]),
        (["x"], "x", []),
    ):
        options = parser.parse_args([command, *words])
        assert (options.script, options.args) == (script, arguments)
