"""Rank 0 learns of a death at once, and takes nothing else for one."""

from __future__ import annotations

import multiprocessing
import os
import select
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.control.presence import Presence, Roll
from elasticrun.control.rendezvous import _serve
from elasticrun.control.store import Address, JobStore

DEADLINE = 30.0


@pytest.fixture
def store() -> JobStore:
    server, port = _serve("127.0.0.1", 0)
    return JobStore(Address("127.0.0.1", port), server)


@pytest.fixture
def roll(store: JobStore) -> Iterator[Roll]:
    roll = Roll(store)
    yield roll
    roll.close()


def news(roll: Roll) -> list[int]:
    """Return the next news; a connection that is made or ends politely is none."""
    poll = select.poll()
    poll.register(roll, select.POLLIN)
    deadline = time.monotonic() + DEADLINE
    while not (gone := roll.read()):
        assert time.monotonic() < deadline, "no news ever came"
        poll.poll(100)
    return gone


def drain(roll: Roll) -> list[int]:
    """Return the news that are there after everything that was sent has come."""
    marker = socket.create_connection(roll._listener.getsockname())
    marker.sendall(roll._token + b" 999\n")
    marker.close()
    seen: list[int] = []
    while 999 not in seen:
        seen += news(roll)
    return [rank for rank in seen if rank != 999]


def be_present(store_at: Address, rank: int, ready: str) -> None:
    presence = Presence(JobStore(store_at, None), rank)
    Path(ready).touch()
    signal.pause()
    del presence


def start(store: JobStore, rank: int, ready: Path) -> multiprocessing.Process:
    context = multiprocessing.get_context("spawn")
    process = context.Process(
        target=be_present, args=(store.address, rank, str(ready)), daemon=True
    )
    process.start()
    deadline = time.monotonic() + DEADLINE
    while not ready.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process  # type: ignore[return-value]


def test_who_is_killed_is_gone(store: JobStore, roll: Roll, tmp_path: Path) -> None:
    process = start(store, 3, tmp_path / "ready")
    assert drain(roll) == []
    process.kill()
    assert news(roll) == [3]
    process.join()


def test_who_is_stopped_is_not(store: JobStore, roll: Roll, tmp_path: Path) -> None:
    process = start(store, 3, tmp_path / "ready")
    assert process.pid is not None
    os.kill(process.pid, signal.SIGSTOP)
    assert drain(roll) == []
    process.kill()
    process.join()


def test_a_farewell_is_no_death(store: JobStore, roll: Roll) -> None:
    staying, leaving = Presence(store, 1), Presence(store, 2)
    leaving.close()
    assert drain(roll) == []
    quick = Presence(store, 4)  # Says hello and farewell before anybody reads.
    quick.close()
    assert drain(roll) == []
    staying.forget()
    assert news(roll) == [1]


@pytest.mark.parametrize(
    "said", [b"", b"hello\n", b"x" * 1000, b"\xff\xfe\n", b"0" * 32 + b" 1\n"]
)
def test_a_stranger_is_no_replica(roll: Roll, said: bytes) -> None:
    with socket.create_connection(roll._listener.getsockname()) as stranger:
        stranger.sendall(said)
    assert drain(roll) == []


def test_a_child_that_outlives_its_replica_does_not_keep_it_alive(
    store: JobStore, roll: Roll
) -> None:
    presence = Presence(store, 1)
    child = multiprocessing.get_context("fork").Process(
        target=signal.pause, daemon=True
    )
    child.start()
    presence.forget()  # As when the replica is killed: without a farewell.
    assert news(roll) == [1]
    child.kill()
    child.join()


def test_it_listens_where_the_store_does(roll: Roll, store: JobStore) -> None:
    assert roll._listener.getsockname()[0] == "127.0.0.1" == store.interface
