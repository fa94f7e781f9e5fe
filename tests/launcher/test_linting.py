"""`elasticrun run` shows what the linter is sure of, and trains all the same."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.launcher.running import (
    ELASTICRUN,
    REPOSITORY,
    WITHOUT_TORCH,
    Running,
    running,
    wait_until_nothing_is_left,
)
from tests.lint.pages import PAGES, PRELUDE
from tests.support.stage import Stage, wait_until
from tests.support.variants import in_wide

# The mistake is in a function that nobody calls.
WRONG = "".join(
    f"    {line}\n" for line in (PRELUDE + PAGES["ER104"].wrong).splitlines()
)
ARGUMENTS = "train_set, valid_set, step, evaluate"
SIZE = "AdaptiveDataLoader(train_set, batch_size=elasticrun.world_size())"
SCRIPT = f"def main({ARGUMENTS}):\n{WRONG}\n    {SIZE}\nprint('trained')\n"


@pytest.fixture
def script(stage: Stage) -> Path:
    path = stage.root / "train.py"
    path.write_text(SCRIPT, encoding="utf-8")
    return path


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--no-lint",)])
def test_errors_and_warnings_are_shown(
    stage: Stage, script: Path, options: tuple[str, ...]
) -> None:
    start = ["--replicas", 1, *WITHOUT_TORCH]
    with running(stage, *start, *options, script=script) as job:
        assert job.wait() == 0, job.events
    assert "trained" in job.output
    line = SCRIPT.splitlines().index('        with open("log.csv", "a") as file:') + 1
    warning = f"elasticrun: warning: {script}:{line}:14: ER104 file appended in zone B"
    assert (warning in job.events) == (not options)
    size = SCRIPT.splitlines().index(f"    {SIZE}") + 1
    assert (f"warning: {script}:{size}:5: ER503 " in job.events) == (not options)
    assert ("`elasticrun rule ER104 ER503` explains" in job.events) == (not options)


LATE = """
import sys
if sys.orig_argv[2:3] == ["elasticrun.launcher.linting"]:
    from pathlib import Path
    from tests.support.stage import Stage
    Stage(Path({root!r})).wait_for("began")
"""


@pytest.mark.slow
def test_replicas_that_are_quick_do_not_end_the_linter(
    stage: Stage, script: Path
) -> None:
    site = stage.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(LATE.format(root=str(stage.root)))
    mark = f"open({str(stage.root / 'marks' / 'began')!r}, 'w')\n"
    script.write_text(mark + SCRIPT, encoding="utf-8")
    path = f"{site}{os.pathsep}{REPOSITORY}"
    options = ["--replicas", 1, "--start", "exec"]
    with running(stage, *options, script=script, PYTHONPATH=path) as job:
        assert job.wait() == 0, job.events
    assert "ER104 file appended in zone B" in job.events


@pytest.mark.slow
def test_a_script_without_elasticrun_is_told_so(stage: Stage, script: Path) -> None:
    script.write_text("import helper")
    (stage.root / "helper.py").write_text("print('trained')")
    start = ("--replicas", 2, "--start", "exec")
    with running(stage, *start, script=script) as job:
        assert job.wait() == 0, job.events
    assert job.output.count("trained") == 2
    assert f"warning: {script} does not use elasticrun" in job.events
    assert job.events.endswith("trained by itself on all data, and nothing was saved\n")


@pytest.mark.slow
def test_a_script_that_cannot_be_linted_is_run(stage: Stage, script: Path) -> None:
    script.write_bytes(b"# coding: latin-1\nprint('trained \xe9')  # elasticrun\n")
    with running(stage, "--replicas", 1, *WITHOUT_TORCH, script=script) as job:
        assert job.wait() == 0, job.events
    assert "trained" in job.output
    assert f"warning: {script}" not in job.events  # Nothing of the linter.


# A linter that never ends, in whose way of importing the rest it is held.
HOLD = """
import signal, sys
from pathlib import Path
class Hold:
    def find_spec(self, name, path=None, target=None):
        if name == "elasticrun.lint.command":
            Path({root!r}, "marks", "linting").touch()
            signal.pause()
sys.meta_path.insert(0, Hold())
"""
# An `elasticrun` that gives the linter so many seconds.
WITH_LIMIT = """
import sys
from elasticrun.__main__ import main
from elasticrun.launcher import linting
linting._SECONDS = {}
sys.exit(main())
"""
FOREVER = "import signal, sys\nopen(sys.argv[1], 'w')\nsignal.pause()  # elasticrun"


def linting_forever(
    stage: Stage, script: Path, command: Sequence[object] = ELASTICRUN
) -> AbstractContextManager[Running]:
    site = stage.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(HOLD.format(root=str(stage.root)))
    path = f"{site}{os.pathsep}{REPOSITORY}"
    own = [*WITHOUT_TORCH, "--replicas", 1, "--", stage.root / "marks" / "began"]
    return running(stage, *own, script=script, command=command, PYTHONPATH=path)


def with_limit(seconds: float) -> list[str]:
    return [sys.executable, "-c", WITH_LIMIT.format(seconds)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, *in_wide(signal.SIGKILL)])
def test_a_stop_does_not_wait_for_the_linter_and_leaves_none(
    stage: Stage, script: Path, number: signal.Signals
) -> None:
    script.write_text(FOREVER)
    with linting_forever(stage, script, with_limit(1e6)) as job:
        wait_until(lambda: stage.has("linting", "began"))
        os.kill(job.pid, number)
        job.wait()
        wait_until_nothing_is_left(stage)


@pytest.mark.slow
def test_a_linter_that_takes_too_long_is_ended_and_that_is_said(
    stage: Stage, script: Path
) -> None:
    with linting_forever(stage, script, with_limit(0.0)) as job:
        assert job.wait() == 0, job.events
    assert "the linter was not done after 0 seconds, and was ended" in job.events
    assert "trained" in job.output
