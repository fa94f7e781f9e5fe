"""Replicas that wait for one that never comes: for a limited time, and by its name."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import pytest
from torch.distributed import TCPStore

from elasticrun.errors import AgreementError
from elasticrun.replicas import membership
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.membership import open_store
from elasticrun.replicas.store import Address, JobStore, serve_store_at
from tests.support.sockets import kept_port
from tests.support.stage import DEADLINE

SCRIPT = """
import os, sys
from elasticrun.replicas import exchange, membership
from elasticrun.replicas.environment import read_environment
exchange._QUIET_SECONDS = 0.0
exchange._PATIENCE = float(sys.argv[1])
print("imported", flush=True)
sys.stdin.readline()
membership.open_store(read_environment())
"""


@pytest.mark.slow
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
        assert "within 4 s" in text
    assert re.search(r"waiting for ranks? [123, ]*2[, 3]* of 4", said[0])


def test_a_rank_0_that_never_comes_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(membership, "_QUIET_SECONDS", 0.0)
    monkeypatch.setattr(membership, "_PATIENCE", 0.2)
    place = Environment(
        rank=1, world_size=2, master_address="127.0.0.1", master_port=kept_port()
    )
    with pytest.raises(AgreementError, match="rank 0 did not come within 0.2 s: "):
        open_store(place)
    assert "waiting for rank 0 at 127.0.0.1:" in caplog.text


def test_a_rank_0_that_goes_while_others_come_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(membership, "_PATIENCE", 1.0)
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


@pytest.fixture
def agent() -> TCPStore:
    return serve_store_at("127.0.0.1")


def place(agent: TCPStore, rank: int) -> Environment:
    """Return what torchrun tells one of two replicas."""
    return Environment(
        rank=rank,
        world_size=2,
        master_address="127.0.0.1",
        master_port=agent.port,
        has_agent_store=True,
    )


def test_an_address_of_a_rank_0_that_has_died_is_not_used(agent: TCPStore) -> None:
    agent.set("elasticrun/2", str(Address("127.0.0.1", kept_port())))
    with ThreadPoolExecutor(2) as threads:
        other = threads.submit(open_store, place(agent, 1))
        zero = threads.submit(open_store, place(agent, 0))
        assert zero.result(DEADLINE).address == other.result(DEADLINE).address


def test_the_store_of_an_earlier_generation_is_not_joined(agent: TCPStore) -> None:
    with ThreadPoolExecutor(2) as threads:
        before = [threads.submit(open_store, place(agent, rank)) for rank in (0, 1)]
        earlier = before[0].result(DEADLINE)  # It lives on, as one that still saves.
        assert before[1].result(DEADLINE).address == earlier.address
        other = threads.submit(open_store, place(agent, 1))
        zero = threads.submit(open_store, place(agent, 0))
        address = zero.result(DEADLINE).address
        assert address == other.result(DEADLINE).address != earlier.address


def test_an_agents_store_without_rank_0_is_told(
    agent: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(membership, "_PATIENCE", 0.2)
    with pytest.raises(AgreementError, match="rank 0 did not come within 0.2 s: its"):
        open_store(place(agent, 1))


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
