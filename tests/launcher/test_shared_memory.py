"""What lies in shared memory and what has ended: nothing of it stays behind."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from tests.launcher.running import (
    PROGRAM,
    WITHOUT_TORCH,
    processes_of,
    running,
    scaled,
    wait_until_nothing_is_left,
)
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def stage() -> Iterator[Stage]:
    """A stage outside of /dev/shm, which is hidden from jobs here."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield Stage(Path(folder))


SHARING = PROGRAM.with_name("sharing.py")
PRIVATE = "mount -t tmpfs none /dev/shm && echo ready && exec sleep 1000"


@contextmanager
def shared_memory() -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield an empty /dev/shm, and what starts a command that sees no other."""
    command = ["unshare", "--mount", "sh", "-c", PRIVATE]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as keeper:
        assert keeper.stdout is not None
        try:
            if keeper.stdout.readline() != b"ready\n":
                pytest.skip("mount namespaces are not allowed here")
            own = f"/proc/{keeper.pid}"
            yield (
                Path(f"{own}/root/dev/shm"),
                ("nsenter", f"--mount={own}/ns/mnt", "--wd=."),
            )
        finally:
            keeper.kill()


def names_in(memory: Path) -> list[str]:
    return sorted(path.name for path in memory.iterdir())


@pytest.mark.wide
def test_nothing_stays_in_shared_memory(stage: Stage) -> None:
    """Tensors that workers share by files, and semaphores of spawned workers."""
    options = ["--replicas", 1, "--save-interval", 0, "--max-restarts", 1]
    with (
        shared_memory() as (memory, before),
        running(stage, *options, script=SHARING, before=before) as job,
    ):
        job.wait_until_held(0, 1)
        of_spawned = names_in(memory)
        assert any(name.startswith("sem.") for name in of_spawned)
        os.kill(job.pid_of(0, 0), 9)
        job.wait_until_held(1, 1)
        of_first = [name for name in names_in(memory) if name.startswith("torch_")]
        assert of_first
        assert scaled(job, 2, held=1).returncode == 0
        job.wait_until_held(2, 2)
        wait_until(lambda: not set(of_spawned) & set(names_in(memory)), str(of_spawned))
        wait_until(lambda: not set(of_first) & set(names_in(memory)), str(of_first))
        stage.mark("stop-2")
        job.process.terminate()
        assert job.wait() == 143, job.events
        assert processes_of(stage) == []
        assert names_in(memory) == []


def zombies_of(pid: int) -> list[int]:
    return [
        child.pid
        for child in psutil.Process(pid).children()
        if status_of(child) == psutil.STATUS_ZOMBIE
    ]


def status_of(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:  # It is forgotten since.
        return "gone"


ORPHANS = """
import os, subprocess, sys, time
for session in (False, True):
    for _ in range(5):
        command = "import subprocess; subprocess.Popen(['true'], start_new_session=%s)"
        subprocess.run([sys.executable, "-c", command % session])
print("forked", flush=True)
time.sleep(1000)
"""


def test_orphans_that_have_ended_are_forgotten(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(ORPHANS)
    with running(stage, "--replicas", 2, *WITHOUT_TORCH, script=script) as job:
        wait_until(lambda: job.output.count("forked") == 2, job.events)
        wait_until(lambda: zombies_of(job.pid) == [], "the end of zombies")


def test_process_1_ends_only_what_belongs_to_its_replicas(stage: Stage) -> None:
    """As in a container, where it adopts what `docker exec` leaves behind."""
    before = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child")
    if subprocess.run([*before, "true"], check=False).returncode:
        pytest.skip("PID namespaces are not allowed here")
    program = ["--at", "0:0:5:spawn", "--at", "0:0:9:kill"]
    program += ["--hold", "0:3", "--hold", "1:15"]
    with running(stage, "--replicas", 1, "--save-interval", 0, "--", *program,
                 before=before) as job:  # fmt: skip
        wait_until(lambda: stage.has("held-0-0"), job.events)
        [launcher] = psutil.Process(job.pid).children()
        inside = ["nsenter", "-t", str(launcher.pid), "--pid", "--mount"]
        leave = "setsid sleep 1000 >/dev/null 2>&1 & echo"
        subprocess.run([*inside, "sh", "-c", leave], env={}, check=True)
        wait_until(lambda: sleepers(launcher))
        [other] = sleepers(launcher)
        stage.mark("go-0")
        wait_until(lambda: stage.has("held-1-0"), job.events)
        assert sleepers(launcher) == [other]
        stage.mark("go-1")
        assert job.wait() == 0, job.events
    wait_until_nothing_is_left(stage)


def sleepers(launcher: psutil.Process) -> list[psutil.Process]:
    return [
        child
        for child in launcher.children()
        if status_of(child) not in ("gone", psutil.STATUS_ZOMBIE)
        and child.name() == "sleep"
    ]
