"""Tools to test scripts: real replicas, restarts, and jobs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from elasticrun.job.current import use_job
from elasticrun.job.job import Job
from elasticrun.job.trace import read_trace, samples_of_loop
from elasticrun.launcher.interpreter import command
from elasticrun.saving.settings import Settings
from elasticrun.testing.replicas import (
    GenerationFailed,
    Outcome,
    run_generation,
    start_generation,
)

__all__ = [
    "GenerationFailed",
    "Job",
    "Outcome",
    "Settings",
    "assert_restart_equivalent",
    "read_trace",
    "run_generation",
    "samples_of_loop",
    "start_generation",
    "use_job",
]


def assert_restart_equivalent(
    script: str | os.PathLike[str],
    *arguments: object,
    at: str | Sequence[str] = (),
    replicas: Sequence[int] | None = None,
    max_epochs: int = 3,
    max_batches: int = 4,
    kill: bool = False,
    ignore: Sequence[str] = (),
    link: Sequence[str] = (),
    hang_timeout: float = 60.0,
    directory: str | os.PathLike[str] | None = None,
    timeout: float | None = None,
) -> None:
    """Run a script with and without restarts, and compare, as `elasticrun check` does.

        def test_training_survives_restarts():
            assert_restart_equivalent("train.py", "--lr", 0.1)

    Args:
        arguments: What the script is given.
        at: Restart only there ("0:1:3"); several for several restarts of one run.
        replicas: Numbers of replicas to check with; with `at`, those of one generation
            after another.
        directory: The working directory, which is copied; the current one if None.
        timeout: Seconds that all of it may take; None for any time.

    Raises:
        AssertionError: Restarts change something, or nothing could be compared; the
            text is the report.
    """
    places = [at] if isinstance(at, str) else at
    words = [f"--max-epochs={max_epochs}", f"--max-batches={max_batches}"]
    words += [f"--hang-timeout={hang_timeout}", *(f"--at={each}" for each in places)]
    words += [f"--ignore={each}" for each in ignore]
    words += [f"--link={each}" for each in link]
    if replicas is not None:
        words.append(f"--replicas={','.join(map(str, replicas))}")
    words += ["--kill"] * kill
    words += [os.path.abspath(script), "--", *map(str, arguments)]
    # In a process of its own, which adopts what the script leaves behind.
    process = subprocess.run(
        command("__main__", "main", "check", *words),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    if process.returncode != 0:
        raise AssertionError(
            f"{os.fspath(script)}: elasticrun check ended with exit code "
            f"{process.returncode}\n{process.stdout}{process.stderr}"
        )
