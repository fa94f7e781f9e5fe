"""One live job has a store's directory, in which it can write."""

from __future__ import annotations

import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elasticrun import errors
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError

REPOSITORY = Path(errors.__file__).parents[1]
HOST = socket.gethostname()

HOLD = """
import os, sys
from elasticrun.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1], job="digits")
if sys.argv[2] == "tries":
    print("owner", flush=True)
    sys.stderr = open(os.devnull, "w")
store.acquire(timeout=0)
if sys.argv[2] == "forks" and os.fork() == 0:
    print("child", flush=True)
    sys.stdin.read()
    os._exit(0)
if sys.argv[2] != "forks":
    print("owner", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_job(directory: Path, how: str = "holds") -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), how],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() in ("owner\n", "child\n")
        yield process


def take_and_release(directory: Path, *, timeout: float = 0) -> None:
    store = CheckpointStore(directory, job="digits")
    store.acquire(timeout=timeout)
    store.release()


def test_second_live_job_is_refused(directory: Path) -> None:
    with other_job(directory) as other:
        with pytest.raises(CheckpointError) as caught:
            take_and_release(directory)
        assert re.fullmatch(
            rf"{directory} is in use by a live job \(process {other.pid} on {HOST}, "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\)\. Two jobs in one directory "
            r"would remove each other's checkpoints\. Stop that job or wait for its "
            r"end, or give this one a directory of its own "
            r"\(ELASTICRUN_CHECKPOINT_DIR\)\.",
            str(caught.value),
        )
    take_and_release(directory)


def test_lock_ends_with_a_killed_owner(directory: Path) -> None:
    with other_job(directory) as other:
        other.kill()
        assert other.wait() == -signal.SIGKILL
        take_and_release(directory)


def test_living_child_of_a_killed_owner_does_not_hold_the_lock(
    directory: Path,
) -> None:
    with other_job(directory, "forks") as owner:
        owner.kill()
        assert owner.wait() == -signal.SIGKILL
        assert owner.stdout is not None
        assert select.select([owner.stdout], [], [], 0)[0] == []  # the child lives
        take_and_release(directory)


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="Linux has it")
def test_to_copy_the_directory_does_not_lose_the_lock(
    directory: Path, tmp_path: Path
) -> None:
    store = CheckpointStore(directory, job="digits")
    store.acquire(timeout=0)
    shutil.copytree(directory, tmp_path / "copy")
    with other_job(directory, "tries") as other:
        assert other.wait() == 1
    store.release()
    with other_job(directory) as other:
        other.kill()


ORPHAN = """
import os, sys
from elasticrun.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1], job="digits")
store.acquire(timeout=0)
ends_with_owner, owner_end = os.pipe()
if os.fork():
    os._exit(0)
os.close(owner_end)
os.read(ends_with_owner, 1)
CheckpointStore(sys.argv[1], job="digits").acquire(timeout=60)
print("taken")
"""


def test_child_of_a_dead_owner_can_take_the_lock(directory: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(directory)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert result.stdout == "taken\n"


def test_acquire_waits_for_an_owner_that_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_job(directory) as other:

        def end_owner(seconds: float) -> None:
            other.communicate()

        monkeypatch.setattr(time, "sleep", end_owner)
        take_and_release(directory, timeout=60)
        assert other.returncode == 0


def test_second_job_in_one_process_is_refused(local_store: CheckpointStore) -> None:
    store = local_store
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on {HOST}"):
            take_and_release(store.place)
    assert_other_process_is_refused(store.place)


def assert_other_process_is_refused(directory: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", HOLD, str(directory), "holds"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "is in use by a live job" in result.stderr


def test_lock_held_under_another_name_is_seen(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    store = local_store
    (tmp_path / "alias").symlink_to(store.place)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on {HOST}"):
        take_and_release(tmp_path / "alias")


def test_released_lock_can_be_taken_again(local_store: CheckpointStore) -> None:
    store = local_store
    store.release()
    store.release()
    take_and_release(store.place)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}'])
def test_owner_that_has_not_written_its_name_is_refused_too(
    directory: Path, content: bytes
) -> None:
    with other_job(directory):
        (directory / "lock").write_bytes(content)
        with pytest.raises(CheckpointError, match="process that has not yet written"):
            take_and_release(directory)


def test_lock_file_of_a_dead_owner_is_taken_over(directory: Path) -> None:
    with other_job(directory) as other:
        other.communicate()
    assert f'"pid": {other.pid}' in (directory / "lock").read_text()
    take_and_release(directory)
    assert f'"pid": {os.getpid()}' in (directory / "lock").read_text()


# Permissions


def test_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        take_and_release(tmp_path / "file" / "checkpoints")
    assert str(caught.value) == (
        f"{tmp_path}/file/checkpoints cannot hold this job's checkpoints: [Errno 17] "
        f"File exists: '{tmp_path}/file'. Nothing could be saved, so the job would "
        "lose its work when it is stopped. Make that directory writable, or give the "
        "job another one (ELASTICRUN_CHECKPOINT_DIR)."
    )


READ_ONLY = """
import os, sys
import psutil  # While it can be read.
from elasticrun.checkpoint.store import CheckpointStore
if os.getuid() == 0:
    os.setuid(65534)
directory = os.path.join(sys.argv[1], "checkpoints")
os.umask(0)
store = CheckpointStore(directory, job="digits")
store.acquire(timeout=0)
store.release()
os.chmod(directory, 0o555)
try:
    store.acquire(timeout=0)
finally:
    os.chmod(directory, 0o777)
"""


def test_read_only_directory_is_refused() -> None:
    # Not below tmp_path, whose parents a user that root turns into cannot pass.
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o777)
        result = subprocess.run(
            [sys.executable, "-c", READ_ONLY, parent],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
    path = Path(parent) / "checkpoints"
    assert (
        f"CheckpointError: {path} cannot hold this job's checkpoints: [Errno 13] "
        f"Permission denied: '{path}'." in result.stderr
    )
