"""What happens when no replica can be started any more."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from subprocess import CompletedProcess

import pytest

from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import REPOSITORY, Running, running
from tests.launcher.test_crashes import forkserver_of
from tests.support.stage import Stage

pytestmark = pytest.mark.slow

# Once there is a mark, the forkserver ends at an import, or can fork no more.
SITE = """
import errno, os, sys
if "forkserver" in "".join(sys.orig_argv):
    marks, breaks_at = os.environ["MARKS"], os.environ["BREAKS_AT"]
    fork = os.fork

    def is_broken():
        return os.path.exists(os.path.join(marks, "broken"))

    def fork_if_possible():
        if breaks_at == "fork" and is_broken():
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == breaks_at and is_broken():
                os._exit(1)

    os.fork = fork_if_possible
    sys.meta_path.insert(0, Broken)
"""


def breaking(stage: Stage, breaks_at: str) -> dict[str, str]:
    site = stage.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    return {
        "PYTHONPATH": f"{site}{os.pathsep}{REPOSITORY}",
        "MARKS": str(stage.root / "marks"),
        "BREAKS_AT": breaks_at,
    }


def scaled(job: Running, size: int) -> CompletedProcess[str]:
    """Have a held job rescaled."""
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(job.ask, "scale", size)
        job.wait_until_said(f"to {size} replicas")
        job.stage.mark("go-0")
        return answer.result()


def test_a_forkserver_that_cannot_come_back_is_done_without(stage: Stage) -> None:
    options = ["--replicas", 1, "--max-restarts", 0, "--", "--hold", "0:9"]
    with running(stage, *options, **breaking(stage, "torch")) as job:
        job.wait_until_held(0, 1)
        stage.mark("broken")
        os.kill(forkserver_of(job.pid), signal.SIGKILL)
        job.wait_until_said("from now on each replica starts an interpreter of its own")
        answer = scaled(job, 2)
        assert answer.returncode == 0, answer.stderr
        assert job.wait() == 0, job.events
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_a_job_that_trains_is_not_ended_by_that(stage: Stage) -> None:
    options = ["--replicas", 1, "--start", "exec", "--", "--hold", "0:9"]
    where = "elasticrun.launcher.forkserver"
    with running(stage, *options, **breaking(stage, where)) as job:
        job.wait_until_held(0, 1)
        stage.mark("broken")
        os.kill(forkserver_of(job.pid), signal.SIGKILL)
        job.wait_until_said("The replicas that run go on")
        stage.mark("go-0")
        assert job.wait() == 0, job.events
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_forks_that_fail_are_not_tried_for_ever(stage: Stage) -> None:
    options = ["--replicas", 1, "--start", "exec", "--", "--hold", "0:9"]
    with running(stage, *options, **breaking(stage, "fork")) as job:
        job.wait_until_held(0, 1)
        stage.mark("broken")
        answer = scaled(job, 2)
        assert answer.returncode == 4
        assert "the job ended before it was rescaled" in answer.stderr
        assert job.wait() == 1
    assert "ended 3 times before it forked a replica" in job.events
    assert len(stage.committed()) == 1


def test_more_replicas_than_open_files_are_refused(stage: Stage) -> None:
    before = ("bash", "-c", 'ulimit -n 64; exec "$@"', "bash")
    options = ["--", "--hold", "0:9"]
    with running(stage, "--replicas", 1, *options, before=before) as job:
        job.wait_until_held(0, 1)
        answer = job.ask("scale", 20)
        assert answer.returncode == 4
        assert "20 replicas: the launcher would have about" in answer.stderr
        assert "open, and may have 64" in answer.stderr
        stage.mark("go-0")
        assert job.wait() == 0, job.events
    with running(stage, "--replicas", 20, name="-more", before=before) as job:
        assert job.wait() == 2
    assert "ulimit -n" in job.events
