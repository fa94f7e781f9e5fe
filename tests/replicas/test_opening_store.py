"""Replicas that wait for one that never comes: for a limited time, and by its name."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import pytest

from elasticrun.errors import AgreementError
from elasticrun.replicas import opening_store
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.opening_store import (
    _answer,
    _asks,
    _call_roll,
    _missing_of,
    open_store,
)
from elasticrun.replicas.store import (
    EVERYBODY,
    NUM_HERE,
    NUM_TOLD,
    Address,
    JobStore,
    here,
    serve_store_at,
)
from tests.support.sockets import kept_port
from tests.support.stage import DEADLINE

SCRIPT = """
import os, sys
from elasticrun.replicas import opening_store
from elasticrun.replicas.environment import read_environment
opening_store._QUIET_SECONDS = 0.0
print("imported", flush=True)
sys.stdin.readline()
opening_store._PATIENCE = float(sys.argv[1])
opening_store.open_store(read_environment())
"""


def test_who_died_before_it_joined_is_named_by_all_others() -> None:
    port = str(kept_port())
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", SCRIPT, "4"],
                    env={
                        **os.environ,
                        "RANK": str(rank),
                        "WORLD_SIZE": "4",
                        "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": port,
                    },
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            for rank in (0, 1, 3)
        ]
        for replica in replicas:
            assert replica.stdout is not None
            assert replica.stdout.readline() == "imported\n"
        for replica in replicas:
            assert replica.stdin is not None
            replica.stdin.write("go\n")
            replica.stdin.flush()
        said = [replica.communicate(timeout=DEADLINE)[1] for replica in replicas]
    for text in said:
        assert "AgreementError: rank 2 of 4 did not come" in text
    assert re.search(r"waiting for ranks? [123, ]*2[, 3]* of 4", said[0])
    assert "within 4 s after the others" in said[0]


def test_a_rank_0_that_never_comes_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(opening_store, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(opening_store, "_PATIENCE", 0.2)
    place = Environment(
        rank=1, world_size=2, master_address="127.0.0.1", master_port=kept_port()
    )
    with pytest.raises(AgreementError, match="rank 0 did not come within 0.2 s: "):
        open_store(place)
    assert "waiting for rank 0 at 127.0.0.1:" in caplog.text


def test_a_rank_0_that_goes_while_others_come_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening_store, "_PATIENCE", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = Environment(
            rank=1,
            world_size=2,
            master_address="127.0.0.1",
            master_port=server.getsockname()[1],
        )

        def die() -> None:
            server.accept()[0].close()
            server.close()

        dying = threading.Thread(target=die)
        dying.start()
        with pytest.raises(AgreementError, match="rank 0 did not come within 1 s: "):
            open_store(place)
        dying.join()


def test_a_rank_0_that_has_answered_and_died_is_not_waited_for() -> None:
    agent = serve_store_at("127.0.0.1")
    served = serve_store_at("127.0.0.1")
    living = Address("127.0.0.1", served.port)
    JobStore(living, served).put(EVERYBODY, [])

    def answer() -> None:
        for number, address in enumerate([Address("127.0.0.1", kept_port()), living]):
            nonce = agent.get(f"{_asks(2)}/{number + 1}").decode()
            agent.set(_answer(nonce), str(address))

    answering = threading.Thread(target=answer)
    answering.start()
    place = Environment(
        rank=1,
        world_size=2,
        master_address="127.0.0.1",
        master_port=agent.port,
        has_agent_store=True,
    )
    assert open_store(place).address == living
    answering.join()


def test_a_port_that_somebody_else_has_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        place = Environment(
            world_size=2, master_address="127.0.0.1", master_port=port, step="7.0"
        )
        with pytest.raises(AgreementError, match=rf"127.0.0.1:{port}.*Slurm's step"):
            open_store(place)


def test_another_jobs_store_is_not_written_to() -> None:
    server = serve_store_at("127.0.0.1")
    port = server.port
    store = JobStore(Address("127.0.0.1", port), server)
    store.put("step", "6.0")
    place = Environment(
        rank=1, world_size=2, master_address="127.0.0.1", master_port=port, step="7.0"
    )
    with pytest.raises(AgreementError, match="replicas of another job meet at"):
        open_store(place)
    assert not store.has(["here/1"])


def test_those_who_are_missing_are_found_among_many() -> None:
    server = serve_store_at("127.0.0.1")
    store = JobStore(Address("127.0.0.1", server.port), server)
    missing = {1, 7, 8, 127, 299}
    for rank in set(range(1, 300)) - missing:
        store.put(here(rank), True)
    assert _missing_of(store, range(1, 300)) == sorted(missing)


def test_a_replica_that_comes_twice_is_not_taken_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(opening_store, "_PATIENCE", 0.0)
    server = serve_store_at("127.0.0.1")
    store = JobStore(Address("127.0.0.1", server.port), server)
    store.put(here(1), True)
    store.client.add(NUM_HERE, 2)
    store.client.add(NUM_TOLD, 1)
    with pytest.raises(AgreementError, match="rank 2 of 3 did not come"):
        _call_roll(store, Environment(world_size=3), seconds=0.0)
