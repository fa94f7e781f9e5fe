"""Commands act on the job that is meant, and on no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from elasticrun.launcher.options import OptionError, check_batch, check_processors
from tests.launcher.running import ELASTICRUN, WITHOUT_TORCH, running, variables
from tests.support.stage import Stage, freeze

# An `elasticrun` that waits no longer than it must for a launcher that is suspended.
IMPATIENT = """
import sys
from elasticrun.__main__ import main
from elasticrun.launcher.control import jobs
jobs._ANSWER_SECONDS = 0.2
sys.exit(main())
"""


@pytest.fixture
def script(stage: Stage) -> Path:
    """Return a program that runs until it is stopped."""
    path = stage.root / "script.py"
    path.write_text("import time; time.sleep(1000)")
    return path


def from_elsewhere(
    stage: Stage, folder: Path, *words: object, command: Sequence[str] = ELASTICRUN
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, words)],
        env=variables(stage),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_job_of_another_directory_must_be_named(
    stage: Stage, script: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("elsewhere")
    with running(stage, "--replicas", 1, *WITHOUT_TORCH, script=script) as job:
        job.wait_until_said("started")
        for words in (["stop"], ["scale", 2]):
            refused = from_elsewhere(stage, folder, *words)
            assert refused.returncode == 3
            title = f"({job.pid}) in {stage.checkpoints}"
            assert f"no job of this directory is running, but test {title}" in (
                refused.stderr
            )
        shown = from_elsewhere(stage, folder, "status", stage.checkpoints)
        assert "without a launcher" not in shown.stdout
        assert f"({job.pid}): " in shown.stdout
        stopped = from_elsewhere(stage, folder, "stop", stage.checkpoints)
        assert stopped.returncode == 0
        assert title in stopped.stderr
        assert job.wait() == 75


@pytest.mark.slow
def test_a_status_is_that_of_this_directory_or_else_of_all(
    stage: Stage, script: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    options = ["--replicas", 1, *WITHOUT_TORCH, "--checkpoint-dir"]
    first, second = stage.root / "a", stage.root / "b"
    with (
        running(stage, *options, first, script=script) as one,
        running(stage, *options, second, script=script, name="-2") as other,
    ):
        one.wait_until_said("started")
        other.wait_until_said("started")
        for folder, jobs in (
            (first, [one]),
            (second, [other]),
            (stage.root, [one, other]),  # Both were started here.
            (tmp_path_factory.mktemp("elsewhere"), [one, other]),
        ):
            shown = json.loads(from_elsewhere(stage, folder, "status", "--json").stdout)
            assert {each["pid"] for each in shown} == {job.pid for job in jobs}


@pytest.mark.slow
def test_a_launcher_that_does_not_answer_is_found_and_stopped_by_a_signal(
    stage: Stage, script: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nothing of it runs, so only what it has written and locked tells its names."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    options = ["--replicas", 1, "--name", "digits", *WITHOUT_TORCH]
    with running(stage, *options, script=script) as job:
        job.wait_until_said("started")
        freeze(job.pid)
        ask = partial(from_elsewhere, stage, command=[sys.executable, "-c", IMPATIENT])
        title = f"digits ({job.pid}) in {stage.checkpoints}"
        for folder, *words in (
            (stage.root, "status"),
            (stage.root, "scale", 2),
            (elsewhere, "scale", 2, "digits"),
            (elsewhere, "scale", 2, job.pid),
            (elsewhere, "status", stage.checkpoints),
            (elsewhere, "status", "--scaling", stage.checkpoints),
        ):
            shown = ask(folder, *words)
            assert f"{title} does not answer (suspended" in shown.stderr
            assert (shown.returncode, shown.stdout) == (4, "")
        other = ask(elsewhere, "stop", "letters")
        assert other.returncode == 3
        assert "no job 'letters' of this user is running\n" in other.stderr
        stopped = ask(elsewhere, "stop", stage.checkpoints)
        assert stopped.returncode == 0
        assert title in stopped.stderr
        assert "it does not answer, so it was sent SIGTERM" in stopped.stdout
        assert job.wait() == 143


def test_replicas_that_would_have_nothing_to_do_are_refused() -> None:
    cores = len(os.sched_getaffinity(0))
    with pytest.raises(OptionError, match="wait for each other"):
        check_processors(2 * cores + 1, uses_gpus=False)
    check_batch(16, 0, 16)
    check_batch(99, 0, 0)
    for size, elsewhere in ((17, 0), (9, 8)):
        with pytest.raises(OptionError, match="global batch has 16 samples"):
            check_batch(size, elsewhere, 16)
