"""Starting `elasticrun` as a shell would, and seeing what it leaves behind."""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from elasticrun.launcher.control import jobs
from elasticrun.testing import read_trace
from tests.support.stage import DEADLINE, Stage, wait_until

REPOSITORY = Path(__file__).parents[2]
PROGRAM = REPOSITORY / "tests" / "launcher" / "program.py"
ELASTICRUN = [sys.executable, "-m", "elasticrun"]
# An `elasticrun` that waits for a launcher's answer, however slow all is.
PATIENT = f"""
import sys
from elasticrun.__main__ import main
from elasticrun.launcher.control import jobs
jobs._ANSWER_SECONDS = {DEADLINE}
sys.exit(main())
"""
# An `elasticrun` that lets new replicas prepare for as long as the test holds them, and
# has spares at once.
LEISURE = f"""
import sys
from elasticrun.__main__ import main
from elasticrun.launcher.supervisor import successors
successors._LEAST_LIMIT = {DEADLINE}
successors._CALM_SECONDS = 0.0
sys.exit(main())
"""
LEISURELY = [sys.executable, "-c", LEISURE]
# Options for a script that needs no torch: a forkserver would import it all the same.
WITHOUT_TORCH = ["--start", "exec"]
# Options of `program.py`: where each of three generations is held.
HOLDS = ["--hold", "0:9", "--hold", "1:19", "--hold", "2:29"]


class Running:
    """A launcher that runs, and what is known of its job."""

    def __init__(
        self, process: subprocess.Popen[bytes], stage: Stage, name: str = ""
    ) -> None:
        self.process = process
        self.stage = stage
        self.name = name

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def events(self) -> str:
        """What it has said on stderr."""
        return (self.stage.root / f"stderr{self.name}").read_text()

    @property
    def output(self) -> str:
        return (self.stage.root / f"stdout{self.name}").read_text()

    def wait(self) -> int:
        return self.process.wait(DEADLINE)

    def wait_until_said(self, text: str) -> None:
        wait_until(lambda: text in self.events or self._has_ended(text), repr(text))

    def _has_ended(self, text: str) -> bool:
        if self.process.poll() is not None and text not in self.events:
            raise AssertionError(f"it ended and did not say {text!r}:\n{self.events}")
        return False

    def wait_until_held(self, generation: int, size: int) -> None:
        marks = [f"held-{generation}-{rank}" for rank in range(size)]
        wait_until(
            lambda: self.stage.has(*marks) or self._is_over(), f"{marks}\n{self.events}"
        )
        # The launcher hears of it a moment later.
        wait_until(lambda: self.status()["state"] == "training", "training")

    def _is_over(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"it ended too early:\n{self.events}")
        return False

    def pid_of(self, generation: int, rank: int) -> int:
        path = self.stage.root / f"pid-{generation}-{rank}"
        wait_until(lambda: path.exists() and path.read_text(), str(path))
        return int(path.read_text())

    def ask(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        """Run another command of this user, and wait for its end."""
        command = [sys.executable, "-c", PATIENT]
        return elasticrun(self.stage, *arguments, command=command)

    def status(self) -> dict[str, Any]:
        """Return what `elasticrun status --json` prints; it is asked very often."""
        with (
            mock.patch.dict(os.environ, TMPDIR=str(temporary(self.stage))),
            mock.patch.object(jobs, "_ANSWER_SECONDS", DEADLINE),
            jobs.find_job(str(self.pid)) as job,
        ):
            return job.status


Start = Callable[..., Running]  # Of one node more.


def variables(stage: Stage, **more: object) -> dict[str, str]:
    """Return the environment of every process of a test, by which it is known."""
    own = {
        "PYTHONPATH": REPOSITORY,
        "TMPDIR": temporary(stage),  # Where its jobs are found.
        "LAUNCHER_TEST": stage.root,
    }
    return {**os.environ, **stage.variables(**{**own, **more})}


def temporary(stage: Stage) -> Path:
    """Return a folder of one test; its path is short, for sockets."""
    return _temporary(stage.root)


@functools.cache
def _temporary(_: Path) -> Path:
    folder = tempfile.mkdtemp(prefix="er-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def elasticrun(
    stage: Stage, *arguments: object, command: Sequence[str] = ELASTICRUN
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*command, *map(str, arguments)],
        env=variables(stage),
        cwd=stage.root,
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )


@contextmanager
def running(
    stage: Stage,
    *options: object,
    script: object = None,
    name: str = "",
    before: tuple[str, ...] = (),
    command: Sequence[object] = ELASTICRUN,
    **more: object,
) -> Iterator[Running]:
    """Run the program, or a script with what follows `script`, under the launcher.

    Several launchers of one stage need names; `command` is this one, and `before` what
    starts it. Options of the launcher come before those of the program, which `"--"`
    begins.
    """
    own, program = split(options)
    target = [PROGRAM, stage.root] if script is None else [script]
    words = [*before, *command, "run", *own, *target, *program]
    with (
        open(stage.root / f"stdout{name}", "ab") as out,
        open(stage.root / f"stderr{name}", "ab") as err,
    ):
        process = subprocess.Popen(
            list(map(str, words)),
            env=variables(stage, **more),
            cwd=stage.root,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
    try:
        yield Running(process, stage, name)
    finally:
        process.kill()
        process.wait()
        for pid in processes_of(stage):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def split(options: tuple[object, ...]) -> tuple[list[object], list[object]]:
    if "--" not in options:
        return list(options), []
    place = options.index("--")
    return list(options[:place]), list(options[place + 1 :])


def impatient(stage: Stage) -> list[object]:
    """Return an `elasticrun` whose hang clock `take_for_hung` lets go off.

    It ends no replica before the mark `dumped`.
    """
    return [sys.executable, "-m", "tests.launcher.impatient", stage.root]


def take_for_hung(stage: Stage, since: float) -> None:
    """Let the hang clock go off, now that the launcher knows where the replicas are.

    Of two that are silent it names the one that is behind; so both must have been so
    for a while, against which it is nothing how much sooner it heard of one.

    Args:
        since: When none of them was where it is now.
    """
    begun = time.monotonic()
    wait_until(lambda: time.monotonic() - begun > begun - since)
    stage.mark("hung")


def run(stage: Stage, *options: object, **more: object) -> Running:
    """Run the job to its end, which is to leave nothing behind."""
    with running(stage, *options, **more) as job:
        job.wait()
        assert processes_of(stage) == []
    return job


def processes_of(stage: Stage) -> list[int]:
    """Return every process that was started by a test and is not yet gone."""
    marker = f"LAUNCHER_TEST={stage.root}\0".encode()
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError):
                if marker in Path(f"/proc/{name}/environ").read_bytes():
                    found.append(int(name))
    return found


def wait_until_nothing_is_left(stage: Stage) -> None:
    wait_until(lambda: not processes_of(stage), "the end of every process")


def sizes(stage: Stage) -> dict[int, int]:
    return {line["generation"]: line["world_size"] for line in read_trace(stage.trace)}


def check_trains(stage: Stage) -> None:
    """Let a script's first generation train another batch, and see that it does.

    It waits for a mark before each batch, but for the first three.
    """
    before = stage.num_delivered(0)
    number = next(n for n in itertools.count(3) if not stage.has(f"batch-{n}"))
    stage.mark(f"batch-{number}")
    wait_until(lambda: stage.num_delivered(0) > before, "a batch")


def scaled(
    job: Running, size: int | str, *name: object, held: int = 0
) -> subprocess.CompletedProcess[str]:
    """Have a job rescaled whose generation is held."""
    job.stage.mark(f"stop-{held}")
    return job.ask("scale", size, *name)


def forkserver_of(launcher: int) -> int:
    """Return the forkserver, once there is one: it may just be replaced."""
    wait_until(lambda: find_forkserver(launcher), "a forkserver")
    found = find_forkserver(launcher)
    assert found is not None
    return found


def find_forkserver(launcher: int) -> int | None:
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                command = Path(f"/proc/{name}/cmdline").read_bytes()
                status = Path(f"/proc/{name}/stat").read_text().rpartition(")")[2]
                leads = os.getsid(int(name)) == int(name)
                is_child = int(status.split()[1]) == launcher
                has_launchers_pipes = is_child and leads and not is_replica(int(name))
            except OSError:
                continue
            if has_launchers_pipes and b"forkserver" in command:
                return int(name)
    return None


def is_replica(pid: int) -> bool:
    """A replica prints into a pipe of its own; the forkserver does not."""
    return os.readlink(f"/proc/{pid}/fd/2").startswith("pipe:")
