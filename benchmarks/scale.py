"""Measure what many replicas cost rank 0: in an agreement, and in a checkpoint.

    python benchmarks/scale.py [--replicas 100 1000 10000]

Rank 0 is real: its watcher and the connections to the others, the store and what is
said over it, capturing, the files of random states, the manifest and the commit. The
others are one process that answers for all of them, over a connection of each to rank
0's watcher but a single one to the store.

CPU seconds are those of rank 0's process without its training thread. That thread waits
as for a GPU, half a millisecond at a time; a hold is how much longer it waited, though
not for a free CPU, while other threads of its process were at work. `capture_ms` is its
own CPU time for a save.
Bytes that leave rank 0 are those of messages and of the store's values.

As in replicas that `elasticrun run` has forked, Python's collector of garbage does not
look at what was made when torch was imported. In others it does now and then, as in any
program, and all threads are held for 0.1 s.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import selectors
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from machine import report
from torch.distributed import TCPStore

from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.generators import Generators
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.replicas.agreement import (
    CHECKPOINT,
    Answer,
    Ask,
    Decision,
    Farewell,
    Gate,
    HasLeft,
    decode,
    encode,
)
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.exchange import (
    SAVE_BEGUN,
    SAVE_ENDED,
    SAVE_WRITTEN,
    Exchange,
)
from elasticrun.replicas.links import Links, connect_all
from elasticrun.replicas.membership import Membership
from elasticrun.replicas.store import Address, JobStore
from elasticrun.replicas.watcher import Watcher
from elasticrun.replicas.wire import raise_limit_of_open_files
from elasticrun.saving.opening import Start
from elasticrun.saving.saver import Saver
from elasticrun.saving.writing import Capture, WriteReport

NUM_AGREEMENTS = 5
NUM_SAVES = 3
LOOK_SECONDS = 0.0005
PATIENCE = 600.0


class CountedClient:
    """A client of the store that counts calls, and the bytes of what it is given."""

    num_calls = 0
    num_bytes = 0

    def __init__(self, client: TCPStore) -> None:
        self._client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call: Callable[..., Any] = getattr(self._client, name)

        def counted(*args: Any) -> Any:
            given = call(*args)
            CountedClient.num_calls += 1
            values = given if isinstance(given, list) else [given]
            CountedClient.num_bytes += sum(
                len(value) for value in values if isinstance(value, bytes)
            )
            return given

        return counted

    @classmethod
    def take(cls) -> tuple[int, int]:
        """Return how many calls and bytes there were since the last time."""
        counts = cls.num_calls, cls.num_bytes
        cls.num_calls = cls.num_bytes = 0
        return counts


_begin = JobStore.__init__


def _begin_counting(store: JobStore, *args: Any, **options: Any) -> None:
    _begin(store, *args, **options)
    store.client = CountedClient(store.client)  # type: ignore[assignment]


def counting() -> Any:
    """Return a context in which the store's clients count."""
    return mock.patch.object(JobStore, "__init__", _begin_counting)


# The process that answers for the other replicas.


class Others:
    """All replicas but rank 0."""

    def __init__(self, address: str, directory: str, num_replicas: int) -> None:
        store = JobStore(Address.parse(address), None)
        self._directory = directory
        self._random = Generators(torch.device("cpu")).capture()
        self._selector = selectors.DefaultSelector()
        self._exchanges = {
            rank: Exchange(store, rank=rank, world_size=num_replicas)
            for rank in range(1, num_replicas)
        }
        self.num_bytes = 0
        for rank in self._exchanges:
            links = connect_all(store, rank=rank, world_size=num_replicas)
            self._selector.register(links, selectors.EVENT_READ, rank)
        threading.Thread(target=self._answer, daemon=True).start()

    def _answer(self) -> None:
        """Be the watchers: promise a boundary when asked, and leave with rank 0."""
        while self._selector.get_map():
            for key, _ in self._selector.select():
                links = key.fileobj
                assert isinstance(links, Links)
                for message in links.read():
                    self.num_bytes += len(json.dumps(message)) + 1
                    self._answer_one(links, key.data, decode(message))

    def _answer_one(self, links: Links, rank: int, message: object) -> None:
        if isinstance(message, Ask):
            links.send([0], encode(Answer(message.number, rank, boundary=0)))
        elif isinstance(message, Farewell):
            links.send([0], encode(HasLeft(rank)))
            self._selector.unregister(links)
            links.close(timeout=PATIENCE)

    def save(self, number: int, position: dict[str, Any]) -> None:
        """Be the writers, in one save."""
        said = {rank: end.num_said for rank, end in self._exchanges.items()}
        for end in self._exchanges.values():
            end.hear(SAVE_BEGUN.format(number), timeout=PATIENCE)
        CheckpointStore(self._directory, job="scale").join(number)
        capture = Capture(number, position, gathered={"random": self._random})
        written = WriteReport(capture)
        report, parts = written.encode(), written.encode_gathered()
        for rank, end in self._exchanges.items():
            end.forget(said[rank])
            end.tell(SAVE_WRITTEN.format(number), report, parts=parts)
        for end in self._exchanges.values():
            end.hear(SAVE_ENDED.format(number), timeout=PATIENCE)


def be_the_others(
    pipe: Connection, address: str, directory: str, num_replicas: int
) -> None:
    """Do what rank 0's process says, and tell it the counts."""
    raise_limit_of_open_files()
    with counting():
        others = Others(address, directory, num_replicas)
        pipe.send(CountedClient.take())
        while (order := pipe.recv()) is not None:
            if order == "bytes":
                pipe.send(others.num_bytes)
                others.num_bytes = 0
            else:
                others.save(*order)
                pipe.send(CountedClient.take())


# Rank 0.


@dataclass
class Clocks:
    """What has gone by for the training thread, and for the others of its process.

    Attributes:
        ready: How long that thread has waited for nothing but a CPU, as on a machine
            that other programs use as well.
    """

    wall: float
    others: float
    ready: float

    @classmethod
    def now(cls) -> Clocks:
        with open("/proc/thread-self/schedstat") as file:
            ready = int(file.read().split()[1]) / 1e9
        others = time.process_time() - time.thread_time()
        return cls(time.perf_counter(), others, ready)


def train_until(is_over: Callable[[], object]) -> float:
    """Wait as for a GPU, again and again; return the longest hold in seconds."""
    longest = 0.0
    last = Clocks.now()
    while not is_over():
        time.sleep(LOOK_SECONDS)
        now = Clocks.now()
        wall = now.wall - last.wall - (now.ready - last.ready) - LOOK_SECONDS
        longest, last = max(longest, min(wall, now.others - last.others)), now
    return longest


class RankZero:
    """Rank 0's watcher and saver, among replicas that another process answers for."""

    def __init__(self, directory: str, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = Address("127.0.0.1", server.port)
        store = JobStore(address, server)
        context = multiprocessing.get_context("spawn")
        self._pipe, pipe = context.Pipe()
        self._process = context.Process(
            target=be_the_others, args=(pipe, str(address), directory, num_replicas)
        )
        begun = Clocks.now()
        self._process.start()
        links = connect_all(store, rank=0, world_size=num_replicas, timeout=PATIENCE)
        self._gate = Gate()
        membership = Membership(
            Environment(rank=0, world_size=num_replicas),
            torch.device("cpu"),
            store,
            links,
            owns_group=False,
        )
        self._checkpoints = CheckpointStore(directory, job="scale", keep=2)
        self._checkpoints.acquire()
        registry = Registry(0)
        registry.add(Generators(torch.device("cpu")))
        self._saver = Saver(self._checkpoints, registry, membership, Start())
        self._watcher = Watcher(
            self._gate,
            rank=0,
            world_size=num_replicas,
            links=links,
            grace=PATIENCE,
            save_interval=float("inf"),
            describe=str,
            gone=self._saver.gone,
        )
        self._watcher.start()
        num_calls, num_bytes = self._pipe.recv()
        self._report(
            "join",
            begun,
            store_calls_per_replica=self._each(num_calls),
            bytes_per_replica=self._each(num_bytes),
        )
        CountedClient.take()

    def agree(self) -> dict[str, float]:
        """Agree once; return what it came to."""
        begun = Clocks.now()
        due: Decision | None = None
        at_gate = 0.0

        def arrive() -> bool:
            nonlocal due, at_gate
            arrived = time.perf_counter()
            due = self._gate.arrive()
            at_gate = max(at_gate, time.perf_counter() - arrived)
            return due is not None

        self._watcher.request(CHECKPOINT, cause="benchmark")
        held = train_until(arrive)
        return {
            "cpu_seconds": Clocks.now().others - begun.others,
            "longest_hold_ms": held * 1e3,
            "at_gate_ms": at_gate * 1e3,
        }

    def measure_agreements(self) -> None:
        found = [self.agree() for _ in range(NUM_AGREEMENTS)]
        self._pipe.send("bytes")
        figures = {
            name: round(statistics.median(each[name] for each in found), 3)
            for name in found[0]
        }
        num_bytes = self._each(self._pipe.recv() / NUM_AGREEMENTS)
        report(
            "scale-agreement",
            replicas=self._num_replicas,
            **figures,
            bytes_per_replica=num_bytes,
        )

    def measure_save(self, number: int) -> None:
        position = Position().encode()
        self._pipe.send((number, position))
        begun, own = Clocks.now(), time.thread_time()
        self._saver.save(position, timeout=PATIENCE, is_awaited=False)
        captured = time.thread_time() - own
        held = train_until(lambda: not self._saver.is_busy)
        self._saver.finish()
        newest = self._saver.newest
        assert newest is not None
        cpu = Clocks.now()
        others_calls, others_bytes = self._pipe.recv()
        own_calls, _ = CountedClient.take()
        self._report(
            "save",
            begun,
            cpu,
            number=number,
            capture_ms=milliseconds(captured),
            longest_hold_ms=milliseconds(held),
            bytes_per_replica=self._each(others_bytes),
            files=len(newest.names()),
            manifest_bytes=len(newest.manifest.encode()),
            store_calls_of_rank_0=own_calls,
            store_calls_per_replica=self._each(others_calls),
        )

    def close(self) -> None:
        self._saver.close(timeout=PATIENCE)
        self._watcher.close()
        self._pipe.send(None)
        self._process.join()
        self._checkpoints.release()

    def _each(self, number: float) -> float:
        return round(number / (self._num_replicas - 1), 1)

    def _report(
        self, what: str, begun: Clocks, ended: Clocks | None = None, **figures: Any
    ) -> None:
        spent = (ended or Clocks.now()).others - begun.others
        report(
            f"scale-{what}",
            replicas=self._num_replicas,
            cpu_seconds=round(spent, 3),
            **figures,
        )


def milliseconds(seconds: float) -> float:
    return round(seconds * 1e3, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[100, 1000, 10_000])
    options = parser.parse_args()
    gc.collect()
    gc.freeze()
    for num_replicas in options.replicas:
        raise_limit_of_open_files()
        with tempfile.TemporaryDirectory() as directory, counting():
            rank_zero = RankZero(directory, num_replicas)
            rank_zero.measure_agreements()
            for number in range(1, NUM_SAVES + 1):
                rank_zero.measure_save(number)
            rank_zero.close()


if __name__ == "__main__":
    main()
