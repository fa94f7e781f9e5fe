"""SIGKILL at every system call of a save leaves the old or the new checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elasticrun.checkpoint.store import CheckpointStore
from tests.crash.lives import (
    REPOSITORY,
    assert_survived,
    make_old,
)
from tests.support.stores import manifest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        shutil.which("strace") is None, reason="strace is not installed"
    ),
]


def run_victims(module: str, *arguments: object) -> list[Any]:
    """Return each life's directory, and how it or its pair ended."""
    finished = subprocess.run(
        [sys.executable, "-m", f"tests.crash.{module}", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if "cannot trace" in finished.stderr:
        pytest.skip(f"strace may not be used here: {finished.stderr}")
    assert finished.returncode == 0, finished.stderr
    return [json.loads(line) for line in finished.stdout.splitlines()]


def test_killed_at_any_system_call_leaves_the_old_or_the_new(memory: Path) -> None:
    make_old(memory / "old")
    lives = run_victims("victims", memory)
    killed = [name for name, code in lives if code == -signal.SIGKILL]
    assert len(killed) > 100
    # Some calls, as those to get memory, come more often in one life than in another.
    assert len(killed) > 0.9 * len(lives)
    assert {code for _, code in lives} <= {0, -signal.SIGKILL}
    for name in ("rename-1", "fsync-1", "mkdir-1", "write-3"):
        assert name in killed
    found = [assert_survived(memory / name) for name, _ in lives]
    assert set(found) == {3, 4}


VICTIMS = [(0, {"old", "new"}), (1, {"old"})]


@pytest.mark.parametrize(("victim", "expected"), VICTIMS)
def test_one_rank_killed_while_both_save_leaves_the_old_or_the_new(
    memory: Path, victim: int, expected: set[str]
) -> None:
    """Rank 1 has nothing left to do once the checkpoint is committed but to hear so."""
    lives = run_victims("pairs", memory, victim)
    killed = [name for name, codes in lives if codes[victim] == -signal.SIGKILL]
    assert len(killed) > 10
    assert len(killed) > 0.8 * len(lives)
    for name in ("openat-1", "fsync-1", "sendto-1", "recvfrom-1"):
        assert name in killed
    values = {find_value(memory / name) for name, _ in lives}
    assert expected <= values <= {"old", "new"}


@pytest.mark.wide
@pytest.mark.parametrize(("victim", "expected"), VICTIMS)
def test_a_rank_killed_in_any_thread_while_a_save_is_in_flight(
    memory: Path, victim: int, expected: set[str]
) -> None:
    """The thread that writes looks into the store as often as it takes."""
    lives = run_victims("pairs", memory, victim, "in-flight")
    killed = [name for name, codes in lives if codes[victim] == -signal.SIGKILL]
    assert len(killed) > 10
    for name in ("openat-1", "fsync-1", "sendto-1", "recvfrom-1"):
        assert name in killed
    on_disk = [
        name for name, _ in lives if not name.startswith(("sendto", "recv", "send-"))
    ]
    assert len(set(killed) & set(on_disk)) > 0.8 * len(on_disk)
    values = {find_value(memory / name) for name, _ in lives}
    assert expected <= values <= {"old", "new"}


def find_value(directory: Path) -> str:
    """Return what both ranks have in the newest checkpoint, which can be followed."""
    store = CheckpointStore(directory, job="pair", keep=2)
    store.acquire(timeout=10)
    try:
        store.remove_uncommitted()
        found = store.find_newest()
        assert found is not None
        texts = set()
        for name in ("shared", "own.rank-0", "own.rank-1"):
            with found.open(name) as file:
                texts.add(file.read())
        (text,) = texts  # All from one moment.
        assert found.number == (3 if text.startswith(b"old") else 4)
        draft = store.begin(store.next_number())
        record = draft.write("shared", lambda file: file.write(b"next"))
        next_one = manifest(draft.number, record, generation=99)
        draft.commit(replace(next_one, job="pair"))
        again = store.find_newest()
        assert again is not None
        assert again.number == draft.number
    finally:
        store.release()
    return text[:3].decode()
