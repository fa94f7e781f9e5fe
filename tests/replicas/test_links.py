"""Messages arrive, and rank 0 learns at once who is gone."""

from __future__ import annotations

import contextlib
import multiprocessing
import select
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from elasticrun.errors import AgreementError
from elasticrun.replicas import links
from elasticrun.replicas.links import Links, connect_all
from elasticrun.replicas.store import HUB, Address, JobStore, serve_store_at
from elasticrun.replicas.wire import Message, to_line
from tests.support.stage import DEADLINE, freeze, wait_until

LAST = 3  # The rank that only shows that all others were heard.
SIZE = 4


@pytest.fixture
def store() -> JobStore:
    server = serve_store_at("127.0.0.1")
    return JobStore(Address("127.0.0.1", server.port), server)


@contextlib.contextmanager
def accepting(store: JobStore, size: int) -> Iterator[Callable[[], Links]]:
    """Let rank 0 wait for the others; give what returns its links."""
    client = JobStore(store.address, None)
    with ThreadPoolExecutor(1) as threads:
        links = threads.submit(
            connect_all, client, rank=0, world_size=size, timeout=DEADLINE
        )
        yield lambda: links.result(DEADLINE)


class World:
    """The links of rank 0, and of those others that are in this process."""

    def __init__(self, store: JobStore, others: Sequence[int] = range(1, SIZE)) -> None:
        with accepting(store, SIZE) as accepted:
            self.others = {
                rank: connect_all(store, rank=rank, world_size=SIZE) for rank in others
            }
            self.zero = accepted()

    def drain(self) -> list[Message]:
        """Return what has come to rank 0 before what the last rank sends now."""
        self.others[LAST].close()
        seen = news(self.zero)
        while gone(LAST) not in seen:
            seen += news(self.zero)
        return [message for message in seen if message != gone(LAST)]

    def close(self) -> None:
        for each in (self.zero, *self.others.values()):
            each.close()


@pytest.fixture
def world(store: JobStore) -> Iterator[World]:
    world = World(store)
    yield world
    world.close()


def news(links: Links) -> list[Message]:
    """Return what comes next."""
    poll = select.poll()
    poll.register(links, select.POLLIN)
    deadline = time.monotonic() + DEADLINE
    while not (messages := links.read()):
        assert time.monotonic() < deadline, "no news ever came"
        poll.poll(100)
    return messages


def next_of(links: Links, number: int) -> list[Message]:
    """Return so many messages."""
    received: list[Message] = []
    while len(received) < number:
        received += news(links)
    return received


def gone(rank: int) -> Message:
    return {"type": "HungUp", "rank": rank}


def be_there(store_at: Address, rank: int, ready: str) -> None:
    links = connect_all(JobStore(store_at, None), rank=rank, world_size=SIZE)
    Path(ready).touch()
    signal.pause()
    links.close()


@pytest.fixture
def world_with_process(
    store: JobStore, tmp_path: Path
) -> Iterator[tuple[World, BaseProcess]]:
    """Give a world in which rank 1 is a process of its own."""
    ready = tmp_path / "ready"
    process = multiprocessing.get_context("spawn").Process(
        target=be_there, args=(store.address, 1, str(ready)), daemon=True
    )
    process.start()
    world = World(store, others=[2, LAST])
    wait_until(ready.exists)
    yield world, process
    process.kill()
    process.join()
    world.close()


def test_who_is_gone_gets_nothing(world: World) -> None:
    world.others[1].close()
    assert news(world.zero) == [gone(1)]
    world.zero.send([1, 2], {"type": "ask", "number": 2})
    assert news(world.others[2]) == [{"type": "ask", "number": 2}]


def test_messages_come_in_order_both_ways(world: World) -> None:
    for number in range(3):
        for rank in (1, 2):
            world.others[rank].send([0], {"from": rank, "number": number})
    received = next_of(world.zero, 6)
    for rank in (1, 2):
        of_rank = [m["number"] for m in received if m["from"] == rank]
        assert of_rank == [0, 1, 2]
        world.zero.send([rank], {"to": rank})
        assert news(world.others[rank]) == [{"to": rank}]


@pytest.mark.parametrize("is_of_rank_0", [True, False])
def test_more_than_a_connection_takes_comes_later(
    world: World, is_of_rank_0: bool
) -> None:
    ends = {0: world.zero, 1: world.others[1]}
    there = int(is_of_rank_0)
    sender, receiver = ends[1 - there], ends[there]
    sent = [{"number": number, "text": "x" * 30_000} for number in range(500)]
    for message in sent:
        sender.send([there], message)  # Returns, though nobody reads.
    received: list[Message] = []
    while len(received) < len(sent):
        sender.read()
        received += receiver.read()
    assert received == sent
    assert select.select([sender], [], [], 0)[0] == []  # It waits for nothing any more.


def test_closing_sends_what_is_left(world: World) -> None:
    sent = [{"number": number} for number in range(100)]
    for message in sent:
        world.others[1].send([0], message)
    world.others[1].close(timeout=DEADLINE)
    assert next_of(world.zero, 101) == [*sent, gone(1)]


@pytest.mark.slow
def test_who_is_killed_is_gone(world_with_process: tuple[World, BaseProcess]) -> None:
    world, process = world_with_process
    assert world.drain() == []
    process.kill()
    assert news(world.zero) == [gone(1)]


@pytest.mark.slow
def test_who_is_stopped_is_not(world_with_process: tuple[World, BaseProcess]) -> None:
    world, process = world_with_process
    assert process.pid is not None
    freeze(process.pid)
    world.zero.send([1], {"type": "ask"})
    assert world.drain() == []


def test_rank_0_gone_is_noticed(world: World) -> None:
    world.zero.close()
    assert news(world.others[1]) == [gone(0)]
    world.zero.send([1], {})  # Nothing happens.


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
def test_a_stranger_is_no_replica_and_holds_nobody_up(
    store: JobStore, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "_HELLO_SECONDS", 0.1)
    with accepting(store, 2) as accepted, ExitStack() as stack:
        address = Address.parse(store.take(HUB)["address"])
        stranger = stack.enter_context(
            socket.create_connection((address.host, address.port))
        )
        stranger.sendall(said)
        replica = connect_all(store, rank=1, world_size=2)
        zero = accepted()
    replica.send([0], {"type": "ask"})
    assert news(zero) == [{"type": "ask"}]
    replica.close()
    assert news(zero) == [gone(1)]
    zero.close()


def test_who_comes_twice_or_has_no_such_rank_is_no_replica(store: JobStore) -> None:
    with accepting(store, 3) as accepted:
        there = store.take(HUB)
        address = Address.parse(there["address"])
        callers = []
        for rank in (1, 1, 0, 3, 2):
            caller = socket.create_connection((address.host, address.port))
            caller.sendall(to_line({"token": there["token"], "rank": rank}))
            callers.append(caller)
        zero = accepted()
    for caller in callers[1:4]:
        caller.settimeout(DEADLINE)
        assert caller.recv(1) == b""
    zero.send([1, 2], {"type": "ask"})
    for caller in (callers[0], callers[4]):
        assert caller.recv(100) == to_line({"type": "ask"})
    zero.close()
    for caller in callers:
        caller.close()


def test_who_never_comes_is_named(store: JobStore) -> None:
    with pytest.raises(AgreementError, match=r"rank 1, 2 of 3 did not connect to rank"):
        connect_all(store, rank=0, world_size=3, timeout=0.05)


def test_a_child_that_outlives_its_replica_does_not_keep_it_alive(world: World) -> None:
    child = multiprocessing.get_context("fork").Process(
        target=signal.pause, daemon=True
    )
    child.start()
    world.others[1].forget()  # As when the replica is killed.
    assert news(world.zero) == [gone(1)]
    child.kill()
    child.join()


def test_a_fork_of_rank_0_leaves_its_connections_alone(world: World) -> None:
    child = multiprocessing.get_context("fork").Process(target=int)
    child.start()
    child.join()
    world.others[1].send([0], {"type": "wish"})
    assert news(world.zero) == [{"type": "wish"}]


def test_it_listens_where_the_store_does_and_only_until_all_are_there(
    store: JobStore,
) -> None:
    with accepting(store, 2) as accepted:
        address = Address.parse(store.take(HUB)["address"])
        assert address.host == "127.0.0.1" == store.interface
        replica = connect_all(store, rank=1, world_size=2)
        zero = accepted()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((address.host, address.port))
    replica.close()
    zero.close()
