"""Messages arrive, and rank 0 learns at once who is gone."""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from elasticrun.replicas import links
from elasticrun.replicas.links import Hub, Spoke
from elasticrun.replicas.store import Address, JobStore, serve_store_at
from elasticrun.replicas.wire import Message
from tests.support.stage import DEADLINE, freeze, wait_until


@pytest.fixture
def store() -> JobStore:
    server = serve_store_at("127.0.0.1")
    return JobStore(Address("127.0.0.1", server.port), server)


@pytest.fixture
def hub(store: JobStore) -> Iterator[Hub]:
    hub = Hub(store)
    yield hub
    hub.close()


Connect = Callable[[int], Spoke]


@pytest.fixture
def connect(store: JobStore) -> Iterator[Connect]:
    spokes = []

    def connect(rank: int) -> Spoke:
        spokes.append(Spoke(store, rank))
        return spokes[-1]

    yield connect
    for spoke in spokes:
        spoke.close()


def news(links: Hub | Spoke) -> list[Message]:
    """Return what comes next."""
    poll = select.poll()
    poll.register(links, select.POLLIN)
    deadline = time.monotonic() + DEADLINE
    while not (messages := links.read()):
        assert time.monotonic() < deadline, "no news ever came"
        poll.poll(100)
    return messages


def drain(hub: Hub) -> list[Message]:
    """Return everything that was sent before this."""
    marker = {"token": hub._token, "rank": 999}
    with socket.create_connection(hub._listener.getsockname()) as caller:
        caller.sendall(json.dumps(marker).encode() + b"\n")
    seen: list[Message] = []
    while gone(999) not in seen:
        seen += news(hub)
    return [message for message in seen if message != gone(999)]


def gone(rank: int) -> Message:
    return {"type": "hung_up", "rank": rank}


def be_there(store_at: Address, rank: int, ready: str) -> None:
    spoke = Spoke(JobStore(store_at, None), rank)
    Path(ready).touch()
    signal.pause()
    spoke.close()


def start(store: JobStore, rank: int, ready: Path) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(
        target=be_there, args=(store.address, rank, str(ready)), daemon=True
    )
    process.start()
    wait_until(ready.exists)
    return process


def test_who_calls_late_hears_what_was_sent_before_and_who_is_gone_nothing(
    hub: Hub, connect: Connect
) -> None:
    hub.send([1], {"type": "ask", "number": 1})
    spoke = connect(1)
    assert drain(hub) == []
    assert news(spoke) == [{"type": "ask", "number": 1}]
    spoke.close()
    assert news(hub) == [gone(1)]
    hub.send([1], {"type": "ask", "number": 2})
    assert hub._early == {}


def test_messages_come_in_order_both_ways(connect: Connect, hub: Hub) -> None:
    spokes = {rank: connect(rank) for rank in (1, 2)}
    for number in range(3):
        for rank, spoke in spokes.items():
            spoke.send([0], {"from": rank, "number": number})
    received = drain(hub)
    for rank, spoke in spokes.items():
        of_rank = [m["number"] for m in received if m["from"] == rank]
        assert of_rank == [0, 1, 2]
        hub.send([rank], {"to": rank})
        assert news(spoke) == [{"to": rank}]


def test_more_than_a_connection_takes_comes_later(connect: Connect, hub: Hub) -> None:
    spoke = connect(1)
    drain(hub)
    sent = [{"number": number, "text": "x" * 30_000} for number in range(500)]
    for message in sent:
        hub.send([1], message)  # Returns, though nobody reads.
    received: list[Message] = []
    while len(received) < len(sent):
        hub.read()
        received += spoke.read()
    assert received == sent
    assert select.select([hub], [], [], 0)[0] == []  # It waits for nothing any more.


def test_closing_sends_what_is_left(connect: Connect, hub: Hub) -> None:
    spoke = connect(1)
    sent = [{"number": number} for number in range(100)]
    for message in sent:
        spoke.send([0], message)
    spoke.close(timeout=DEADLINE)
    assert drain(hub) == [*sent, gone(1)]


@pytest.mark.slow
def test_who_is_killed_is_gone(store: JobStore, hub: Hub, tmp_path: Path) -> None:
    process = start(store, 3, tmp_path / "ready")
    assert drain(hub) == []
    process.kill()
    assert news(hub) == [gone(3)]
    process.join()


@pytest.mark.slow
def test_who_is_stopped_is_not(store: JobStore, hub: Hub, tmp_path: Path) -> None:
    process = start(store, 3, tmp_path / "ready")
    assert process.pid is not None
    freeze(process.pid)
    hub.send([3], {"type": "ask"})
    assert drain(hub) == []
    process.kill()
    process.join()


def test_rank_0_gone_is_noticed(connect: Connect, hub: Hub) -> None:
    spoke = connect(1)
    drain(hub)
    hub.close()
    assert news(spoke) == [gone(0)]
    hub.send([1], {})  # Nothing happens.


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"hello\n",
        b"[]\n",
        b"\xff\xfe\n",
        b'{"token": "0", "rank": 1}\n{"type": "wish"}\n',
        b'{"token": 0, "rank": 1}\n',
        b"x" * 100_000,
        b"[" * 60_000 + b"\n",  # Nested deeper than a decoder can go.
    ],
)
def test_a_stranger_is_no_replica(hub: Hub, said: bytes) -> None:
    with socket.create_connection(hub._listener.getsockname()) as stranger:
        stranger.sendall(said)
        assert drain(hub) == []


def test_a_child_that_outlives_its_replica_does_not_keep_it_alive(
    connect: Connect, hub: Hub
) -> None:
    spoke = connect(1)
    child = multiprocessing.get_context("fork").Process(
        target=signal.pause, daemon=True
    )
    child.start()
    spoke.forget()  # As when the replica is killed.
    assert news(hub) == [gone(1)]
    child.kill()
    child.join()


def test_a_fork_of_rank_0_leaves_its_connections_alone(
    connect: Connect, hub: Hub
) -> None:
    spoke = connect(1)
    drain(hub)
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    spoke.send([0], {"type": "wish"})
    assert news(hub) == [{"type": "wish"}]


def test_it_listens_where_the_store_does(hub: Hub, store: JobStore) -> None:
    assert hub._listener.getsockname()[0] == "127.0.0.1" == store.interface


def test_a_caller_that_never_shows_the_token_is_hung_up_on(
    store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_PATIENCE", 0.0)
    hub = Hub(store)
    port = int(store.take("hub")["address"].rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.settimeout(DEADLINE)
        wait_for(hub)
        assert hub.read() == []  # It is taken,
        assert hub.read() == []  # and has said nothing until the next look.
        assert caller.recv(1) == b""
    hub.close()


def test_rank_0_survives_that_it_can_take_no_more_connections(
    store: JobStore, hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    there = store.take("hub")
    port = int(there["address"].rpartition(":")[2])
    hello = json.dumps({"token": there["token"], "rank": 1}).encode() + b"\n"
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.create_connection(("127.0.0.1", port)) as caller:
        caller.sendall(hello + b'{"type": "ask"}\n')
        next_one = os.dup(0)
        os.close(next_one)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, limits[1]))
            wait_for(hub)
            assert hub.read() == hub.read() == []
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        [record] = caplog.records
        assert "cannot take the connection of another replica" in record.message
        assert hub.read() == []
        assert news(hub) == [{"type": "ask"}]


def wait_for(links: Hub) -> None:
    poll = select.poll()
    poll.register(links, select.POLLIN)
    assert poll.poll(DEADLINE * 1000)
