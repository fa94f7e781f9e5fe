"""How a command finds its job, and what else the job hears by its socket."""

from __future__ import annotations

import json
import os
import socket
import stat
from pathlib import Path

import pytest

from tests.launcher.running import (
    WITHOUT_TORCH,
    Running,
    elasticrun,
    running,
    temporary,
)
from tests.support.stage import Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow


def folder_of(stage: Stage) -> Path:
    return temporary(stage) / f"elasticrun-{os.getuid()}"


def socket_of(job: Running) -> Path:
    folder = folder_of(job.stage)
    wait_until(lambda: list(folder.glob(f"{job.pid}-*.sock")), "its socket")
    [path] = folder.glob(f"{job.pid}-*.sock")
    return path


def connect(caller: socket.socket, path: Path) -> None:
    """Connect by a short path: a socket takes no long one."""
    folder = os.open(path.parent, os.O_RDONLY)
    caller.connect(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def test_two_jobs_of_one_name_are_told_apart(stage: Stage) -> None:
    options = ["--replicas", 1, *WITHOUT_TORCH, "--checkpoint-dir"]
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with (
        running(stage, *options, stage.root / "a", script=script) as first,
        running(stage, *options, stage.root / "b", script=script) as second,
    ):
        wait_until(lambda: first.ask("status").stdout.count("test (") == 2)
        unclear = first.ask("stop")
        assert unclear.returncode == 3
        assert f"test ({first.pid})" in unclear.stderr
        assert f"test ({second.pid})" in unclear.stderr
        assert first.ask("stop", second.pid).returncode == 0
        assert second.wait() == 75
        assert first.process.poll() is None


@pytest.mark.parametrize("problem", ["mode 755", *in_wide("a link")])
def test_a_place_without_sockets_is_refused_before_anything_starts(
    stage: Stage, problem: str
) -> None:
    folder = folder_of(stage)
    folder.mkdir(mode=0o755)
    if problem == "a link":
        folder.rmdir()
        folder.symlink_to(stage.root)
    with running(stage, "--replicas", 1, script=__file__) as job:
        assert job.wait() == 2
    line = job.events.splitlines()[-1]
    assert line.startswith(f"elasticrun: {folder} ")
    assert "set TMPDIR" in line
    assert "Traceback" not in job.events


def test_the_socket_is_the_users_alone_and_takes_no_nonsense(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with running(stage, "--replicas", 1, *WITHOUT_TORCH, script=script) as job:
        folder, path = folder_of(stage), socket_of(job)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for nonsense in (b"x" * 20_000 + b"\n", b"[1]\n", b"{\n", b"[" * 5000 + b"\n"):
            with socket.socket(socket.AF_UNIX) as caller:
                connect(caller, path)
                caller.sendall(nonsense)
                assert "refused" in json.loads(caller.makefile().readline())["error"]
        for request, text in (
            ({"type": "exec"}, "no request"),
            ({"type": "scale", "replicas": "2"}, "no number"),
        ):
            with socket.socket(socket.AF_UNIX) as caller:
                connect(caller, path)
                caller.sendall(json.dumps(request).encode() + b"\n")
                assert text in json.loads(caller.makefile().readline())["error"]
        assert job.ask("status").returncode == 0
        folder.chmod(0o755)
        refused = job.ask("status")
        assert refused.returncode == 4
        assert "must be yours with mode 700" in refused.stderr
    folder.chmod(0o700)
    path.touch()  # What a killed launcher leaves, or worse.
    assert "no job of this user is running" in elasticrun(stage, "status").stdout


@pytest.mark.wide
def test_the_launcher_is_small(stage: Stage) -> None:
    with running(stage, "--replicas", 2, "--", "--hold", "0:9") as job:
        job.wait_until_held(0, 2)
        with open(f"/proc/{job.pid}/status") as file:
            [resident] = [line for line in file if line.startswith("VmRSS:")]
        assert int(resident.split()[1]) < 60 * 1024
        with open(f"/proc/{job.pid}/maps") as file:
            assert "libtorch" not in file.read()
