"""`elasticrun.launch`: jobs from Python."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

import elasticrun
from elasticrun import ElasticRunError
from tests.launcher import running
from tests.launcher.called import train
from tests.launcher.program import NUM_SAMPLES
from tests.launcher.running import (
    processes_of,
    variables,
    wait_until_nothing_is_left,
)
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def environment(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in variables(stage).items():
        if os.environ.get(name) != value and name != "PYTHONPATH":
            monkeypatch.setenv(name, value)
    monkeypatch.delenv("ELASTICRUN_CHECKPOINT_DIR")


def test_a_function_runs_on_every_replica(
    stage: Stage, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = stage.root / "temporary"  # No other test makes anything there.
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    factor = 7

    def closure(number: int) -> dict[str, Any]:
        print("hello from", elasticrun.rank())
        return {"value": number * factor + elasticrun.rank(), "pid": os.getpid()}

    results = elasticrun.launch(closure, 6, replicas=2)
    assert [result["value"] for result in results] == [42, 43]
    assert len({os.getpid(), *(result["pid"] for result in results)}) == 3
    printed = capsys.readouterr()
    assert "[1] hello from 1\n" in printed.out
    assert "elasticrun: generation 0: 2 replicas started" in printed.err
    assert processes_of(stage) == []
    assert list(folder.iterdir()) == []


def test_a_launched_job_can_be_scaled_and_asked(stage: Stage) -> None:
    job = elasticrun.launch(train, stage.root, 2, replicas=1, wait=False)
    wait_until((stage.root / "seen-0").exists)
    job.scale(2)
    status = job.status()
    assert (status["job"], status["replicas"]) == ("train", 2)
    (stage.root / "go-1").touch()
    assert job.result() == [(0, 2, NUM_SAMPLES), (1, 2, NUM_SAMPLES)]
    assert job.result() == job.result()
    with pytest.raises(ElasticRunError, match="the job is not running"):
        job.status()


def test_results_of_a_rescaled_function_without_a_job_are_not_mixed(
    stage: Stage,
) -> None:
    def run(root: Path) -> tuple[int, int]:
        rank, world_size = (int(os.environ[n]) for n in ("RANK", "WORLD_SIZE"))
        if rank > 0 and world_size == 3:
            while True:
                (root / f"seen-{rank}").touch()
                signal.pause()
        return rank, world_size

    job = elasticrun.launch(run, stage.root, replicas=3, wait=False)
    wait_until(lambda: all((stage.root / f"seen-{r}").exists() for r in (1, 2)))
    wait_until(lambda: job.status()["replicas"] == 2)  # Rank 0 has returned.
    with contextlib.suppress(ElasticRunError):
        job.scale(1)  # It may have ended before it could train.
    assert job.result() == [(0, 1)]


def test_a_stopped_job_goes_on_with_the_same_directory(stage: Stage) -> None:
    kept: dict[str, Any] = {"checkpoint_dir": stage.root / "kept", "replicas": 1}
    job = elasticrun.launch(train, stage.root, 2, wait=False, **kept)
    wait_until((stage.root / "seen-0").exists)
    with pytest.raises(TimeoutError):
        job.result(timeout=0.01)
    job.stop()
    with pytest.raises(ElasticRunError, match=r"was stopped \(exit code 75\)"):
        job.result()
    job = elasticrun.launch(train, stage.root, 2, wait=False, **kept)
    wait_until((stage.root / "seen-1").exists)
    os.kill(job.pid, signal.SIGHUP)  # As when its terminal is closed.
    with pytest.raises(ElasticRunError, match=r"was stopped \(exit code 129\)"):
        job.result()
    results = elasticrun.launch(train, stage.root, 2, **kept)
    assert results == [(0, 1, NUM_SAMPLES)]


def test_an_exception_comes_back_with_its_traceback(stage: Stage) -> None:
    def broken() -> None:
        raise KeyError("no such layer")

    descriptors = psutil.Process().num_fds()
    job = elasticrun.launch(broken, replicas=1, wait=False)
    for _ in range(2):
        with pytest.raises(ElasticRunError, match="KeyError: 'no such layer'") as found:
            job.result()
    assert f'File "{__file__}"' in str(found.value)
    assert 'in broken\n    raise KeyError("no such layer")' in re.sub(
        r"\n\[0\] ", "\n", str(found.value)
    )
    [text] = re.findall(r"exit code 1; logs in ([^)]*)\)", str(found.value))
    logs = Path(text)
    assert "no such layer" in (logs / "generation-0000" / "rank-0.log").read_text()
    # Nothing else is left, neither on the disk nor of this process.
    assert psutil.Process().num_fds() == descriptors
    assert [*logs.parent.iterdir()] == [logs]
    shutil.rmtree(logs.parent)


def test_a_function_sees_the_arguments_of_its_caller(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def arguments() -> list[str]:
        return sys.argv

    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "0.1"])
    assert elasticrun.launch(arguments, replicas=1) == [["train.py", "--lr", "0.1"]]


def test_a_function_that_ends_the_process_has_no_result(stage: Stage) -> None:
    def leave(ranks: list[int]) -> int:
        if elasticrun.rank() in ranks:
            sys.exit(0)
        return elasticrun.rank()

    job = elasticrun.launch(leave, [0, 1], replicas=2, wait=False)
    for _ in range(2):
        with pytest.raises(ElasticRunError, match="every replica ended before the"):
            job.result()
    with pytest.raises(ElasticRunError, match="rank 1 ended before .* sys.exit"):
        elasticrun.launch(leave, [1], replicas=2)


def test_what_is_no_function_is_refused() -> None:
    not_callable: Any = 5
    with pytest.raises(TypeError, match="not 5"):
        elasticrun.launch(not_callable, replicas=1)


def test_nothing_is_left_of_a_job_whose_results_nobody_wants(stage: Stage) -> None:
    code = (
        "import sys, pathlib, time, elasticrun\n"
        "from tests.launcher.called import train\n"
        "root = pathlib.Path(sys.argv[1])\n"
        "job = elasticrun.launch(train, root, 1, replicas=1, wait=False)\n"
        "while not (root / 'seen-0').exists(): time.sleep(0.01)"
    )
    folder = stage.root / "temporary"
    folder.mkdir()
    subprocess.run(
        [sys.executable, "-c", code, str(stage.root)],
        env=variables(stage, TMPDIR=folder),
        check=True,
    )
    wait_until_nothing_is_left(stage)
    # The directory for sockets is that of all launchers of the user.
    assert list(folder.iterdir()) == [folder / f"elasticrun-{os.getuid()}"]


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.wide)]
)
def test_a_job_ends_with_the_process_that_launched_it(
    stage: Stage, number: signal.Signals
) -> None:
    """Also where a scheduler ends both by the same signal."""
    code = (
        "import sys, pathlib, elasticrun;"
        "from tests.launcher.called import train;"
        "root = pathlib.Path(sys.argv[1]);"
        "elasticrun.launch(train, root, 1, checkpoint_dir=root / 'kept')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(stage.root)],
        env=variables(stage),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as caller:
        ask = functools.partial(running.elasticrun, stage, "status", "--json")
        wait_until(lambda: '"training"' in ask().stdout)
        (job,) = json.loads(ask().stdout)
        os.kill(job["pid"], signal.SIGSTOP)  # So that it hears of both at once.
        if number == signal.SIGTERM:
            os.kill(job["pid"], number)
        caller.send_signal(number)
        caller.wait()
        os.kill(job["pid"], signal.SIGCONT)
    wait_until_nothing_is_left(stage)
    assert list((stage.root / "kept").glob("checkpoint-*/manifest.json"))


EXITING = """
import signal, sys
from pathlib import Path
import elasticrun
from tests.launcher.called import train

signal.signal(signal.SIGUSR1, lambda *_: sys.exit(9))
elasticrun.launch(train, Path(sys.argv[1]), 1, replicas=1, checkpoint_dir=sys.argv[2])
"""


@pytest.mark.wide
def test_a_call_that_is_to_end_waits_until_the_job_has_saved(stage: Stage) -> None:
    """As one that submitit is about to submit again."""
    directory = stage.root / "saved"
    command = [sys.executable, "-c", EXITING, str(stage.root), str(directory)]
    with subprocess.Popen(command, env=variables(stage), cwd=stage.root) as process:
        ask = functools.partial(running.elasticrun, stage, "status", "--json")
        wait_until(lambda: '"training"' in ask().stdout)
        process.send_signal(signal.SIGUSR1)
        assert process.wait() == 9
        assert processes_of(stage) == []
    assert len(list(directory.glob("checkpoint-*/manifest.json"))) == 1
