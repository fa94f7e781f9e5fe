"""Conversations with rank 0: all are heard, all hear, and nobody waits for the dead."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import TCPStore

from elasticrun.replicas import exchange
from elasticrun.replicas.exchange import Exchange, RankZeroError
from elasticrun.replicas.store import Address, JobStore
from tests.support.stage import DEADLINE


class World:
    """A store, and an end of each rank with a client of its own."""

    def __init__(self, size: int) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.gone: dict[int, str] = {}
        address = Address("127.0.0.1", self.server.port)
        self.ends = [
            Exchange(
                JobStore(address, self.server if rank == 0 else None),
                rank=rank,
                world_size=size,
                gone=self.gone,
            )
            for rank in range(size)
        ]

    def on_all(self, call: Callable[[int, Exchange], Any]) -> list[Any]:
        """Return what a call returns on each rank, or the error that it raises."""

        def run(rank: int) -> Any:
            try:
                return call(rank, self.ends[rank])
            except Exception as error:
                return error

        with ThreadPoolExecutor(len(self.ends)) as pool:
            return list(pool.map(run, range(len(self.ends))))


@pytest.fixture
def world() -> World:
    return World(3)


def test_all_hear_what_rank_0_makes_of_what_all_tell(world: World) -> None:
    heard = world.on_all(lambda rank, end: end.agree("ranks", (rank, None), list))
    assert heard == [[[0, None], [1, None], [2, None]]] * 3
    assert Exchange(None, rank=0, world_size=1).agree("ranks", (0,), list) == [[0]]


def test_all_learn_that_rank_0_could_not_decide(world: World) -> None:
    def fail() -> None:
        raise KeyError("no idea")

    first, *others = world.on_all(lambda _, end: end.decide_on_rank_0("topic", fail))
    assert isinstance(first, KeyError)
    for error in others:
        assert isinstance(error, RankZeroError)
        assert (str(error), error.kind) == ("KeyError: 'no idea'", "KeyError")


def test_what_is_heard_is_no_load_for_the_garbage_collector(world: World) -> None:
    zero, *others = world.ends
    for other in others:
        other.report("topic", [[number] for number in range(1000)])
    gc.collect()
    before = len(gc.get_objects())
    heard = zero.gather("topic", None)
    gc.collect()
    assert len(gc.get_objects()) - before < 1000
    assert [len(told) for told in list(heard.by_rank.values())[1:]] == [1000, 1000]


def test_who_is_gone_is_not_waited_for_but_heard_if_it_has_told(world: World) -> None:
    zero, one, _ = world.ends
    one.report("topic", "before it died")
    world.gone |= {1: "its process died"}
    waiting = threading.Thread(target=lambda: results.append(zero.gather("topic", 0)))
    results: list[exchange.Gathered] = []
    waiting.start()
    world.gone[2] = "its program has ended"
    waiting.join(DEADLINE)
    assert results[0].by_rank == {0: 0, 1: "before it died"}
    assert results[0].gone == {2: "its program has ended"}
    assert results[0].silent == []


def test_who_says_nothing_in_time_is_named(world: World) -> None:
    zero, one, _ = world.ends
    one.report("topic", 1)
    heard = zero.gather("topic", 0, timeout=0.05)
    assert (heard.by_rank, heard.silent, heard.seconds) == ({0: 0, 1: 1}, [2], 0.05)


def test_nobody_waits_once_it_is_given_up(world: World) -> None:
    for end in world.ends[:2]:
        end.given_up = threading.Event()
        end.given_up.set()
    assert world.ends[0].gather("topic", 0, timeout=1000).silent == [1, 2]
    with pytest.raises(TimeoutError):
        world.ends[1].await_verdict("topic", timeout=1000)


def test_rank_0_stays_until_all_who_live_have_heard(world: World) -> None:
    zero, one, _ = world.ends
    zero.announce_failure("topic", ValueError("a mistake"))
    assert zero.asked == "topic"
    begun = time.monotonic()
    zero.wait_until_heard("topic", timeout=0.05)
    assert time.monotonic() - begun >= 0.05

    waiting = threading.Thread(
        target=zero.wait_until_heard, args=["topic"], kwargs={"timeout": 1000}
    )
    waiting.start()
    with pytest.raises(RankZeroError, match="a mistake"):
        one.await_verdict("topic")
    assert waiting.is_alive()
    world.gone[2] = "its process died"
    waiting.join(DEADLINE)
    assert not waiting.is_alive()


def test_what_is_forgotten_does_not_stay_in_the_store(world: World) -> None:
    num_keys = []
    for number in range(4):
        before = [end.num_keys for end in world.ends]
        world.on_all(
            lambda rank, end, number=number: end.agree(  # type: ignore[misc]
                f"topic/{number}", rank, len, is_end=bool
            )
        )
        for end, number_before in zip(world.ends, before, strict=True):
            end.remove_keys(number_before)
        num_keys.append(world.server.num_keys())
    assert num_keys == [5] * 4  # What two tell, the verdict, and that two have heard.


@pytest.mark.slow
def test_the_number_of_calls_of_rank_0_does_not_grow_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = []
    for name in ("put", "has", "take_all", "take"):
        method = getattr(JobStore, name)

        def count(
            self: JobStore, *args: Any, _method: Any = method, **more: Any
        ) -> Any:
            calls.append(self)
            return _method(self, *args, **more)

        monkeypatch.setattr(JobStore, name, count)
    numbers = []
    for size in (3, 40):
        world = World(size)
        for rank, end in enumerate(world.ends[1:], 1):
            end.report("topic", rank)
        calls.clear()
        assert len(world.ends[0].gather("topic", 0).by_rank) == size
        numbers.append(len(calls))
    assert numbers[0] == numbers[1]


def test_many_are_heard_in_pieces_and_fetched_from() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = JobStore(Address("127.0.0.1", server.port), server)
    size = 600
    for rank in range(1, size):
        end = Exchange(store, rank=rank, world_size=size)
        if rank != 300:
            end.report("topic", rank, parts={"more": [rank]})
    zero = Exchange(store, rank=0, world_size=size, gone={300: "died"})
    heard = zero.gather("topic", 0)
    assert dict(heard.by_rank) == {rank: rank for rank in range(size) if rank != 300}
    assert (heard.gone, heard.silent) == ({300: "died"}, [])
    assert zero.fetch("topic", "more", [599, 2]) == [[599], [2]]
    assert zero.fetch("topic", "more", []) == []
