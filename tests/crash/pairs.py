"""Two ranks that save together, one of them killed at one of its system calls.

    python -m tests.crash.pairs DIRECTORY RANK [in-flight]

With `in-flight` threads of theirs save, and every thread is traced. DIRECTORY/old is
copied for each pair. Prints the number of each system call of RANK
that others can notice, and how both lives ended. The survivor goes on by itself.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import torch

from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import AgreementError
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.membership import Membership
from elasticrun.replicas.store import Address, JobStore, serve_store
from elasticrun.saving.opening import open_checkpoints
from elasticrun.saving.saver import Saver
from tests.crash.victims import Life, count_calls, killing, trace
from tests.support.stage import DEADLINE, wait_until

# Those that change what is on the disk or what the other rank hears.
NOTICED = frozenset(
    (
        *("openat", "write", "fsync", "ftruncate", "rename", "mkdir", "rmdir"),
        *("unlink", "unlinkat", "sendto", "send", "recvfrom"),
    )
)
JOB = "pair"


class Text(BaseState):
    """A state that is shared, or has a file of each rank."""

    def __init__(self, name: str, value: str, *, is_per_replica: bool) -> None:
        super().__init__(name)
        self.is_per_replica = is_per_replica
        self.value = value

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(self.value.encode() * 5000)

    def load(self, fileobj: BinaryIO) -> None:
        """What it holds is looked at by others."""


class Pair:
    """Two ranks that are about to save.

    Attributes:
        lives: Theirs, by rank.
        end_of_1: Written to when rank 1 has ended, of which rank 0 hears by it as a
            watcher would tell it.
    """

    def __init__(self, lives: tuple[Life, Life], end_of_1: int) -> None:
        self.lives = lives
        self.end_of_1 = end_of_1


def pair(directory: Path, *values: str, in_flight: bool, victim: int) -> Pair:
    """Return two ranks that are about to save each of the values."""
    hears, tells = os.pipe()
    listener = socket.create_server(("127.0.0.1", 0))
    address = Address("127.0.0.1", listener.getsockname()[1])

    def run(rank: int, wait: Callable[[], None]) -> None:
        server = None
        if rank == 0:
            descriptor = os.dup(listener.fileno())
            server = serve_store(address.host, address.port, descriptor)
        listener.close()
        store = JobStore(address, server)
        saver, states = join(directory, rank, store)
        if rank == 0 != victim:  # A victim has no calls but its own.
            is_alone = hear_of_end(saver, hears)
        wait()
        warnings.simplefilter("ignore")
        for value in values:
            for state in states:
                state.value = value
            try:
                saver.save({}, timeout=DEADLINE, is_awaited=not in_flight)
                for state in states:
                    state.value = "changed since"
                saver.finish(timeout=DEADLINE)
            except AgreementError:
                os._exit(1)
        if rank == 1:
            store.put("heard", True)
        elif victim == 0:  # It serves the store until then.
            store.take("heard", timeout=DEADLINE)
        else:
            wait_until(lambda: is_alone.is_set() or store.has(["heard"]))

    lives = tuple(
        Life(lambda wait, rank=rank: run(rank, wait))  # type: ignore[misc]
        for rank in range(2)
    )
    listener.close()
    os.close(hears)
    return Pair((lives[0], lives[1]), tells)


def hear_of_end(saver: Saver, descriptor: int) -> threading.Event:
    """Tell a saver that rank 1 has ended, once somebody writes that."""
    is_alone = threading.Event()

    def hear() -> None:
        os.read(descriptor, 1)
        saver.gone[1] = "its process died"
        is_alone.set()

    threading.Thread(target=hear, daemon=True).start()
    return is_alone


def join(directory: Path, rank: int, store: JobStore) -> tuple[Saver, list[Text]]:
    """Return what a rank saves with, and its states."""
    environment = Environment(rank=rank, local_rank=rank, world_size=2)
    cpu = torch.device("cpu")
    membership = Membership(environment, cpu, store, None, owns_group=False)
    checkpoints = CheckpointStore(directory, job=JOB, keep=2)
    start = open_checkpoints(checkpoints, membership)
    registry = Registry(rank)
    states = [
        Text("shared", "", is_per_replica=False),
        Text("own", "", is_per_replica=True),
    ]
    for state in states:
        registry.add(state)
    return Saver(checkpoints, registry, membership, start), states


def let_both_go(both: Pair) -> list[int]:
    for life in both.lives:
        life.wait_until_ready()
    for life in both.lives:
        life.let_go()
    codes = [life.end() for life in both.lives]
    os.close(both.end_of_1)
    return codes


def trace_one(both: Pair, rank: int, *options: str) -> list[int]:
    """Let both go, one of them under strace; return both exit codes."""
    other = both.lives[1 - rank]
    other.wait_until_ready()
    other.let_go()
    codes = [0, 0]
    codes[rank] = trace(both.lives[rank], *options)
    if rank == 1:
        with suppress(BrokenPipeError):  # Rank 0 has ended as well.
            os.write(both.end_of_1, b"\n")
    codes[1 - rank] = other.end()
    os.close(both.end_of_1)
    return codes


def trace_calls(root: Path, rank: int, *, in_flight: bool) -> None:
    """Write the system calls of a rank whose pair both come to their end to a log."""
    directory = root / "traced"
    shutil.copytree(root / "old", directory)
    both = pair(directory, "new", in_flight=in_flight, victim=rank)
    options = ["-f"] if in_flight else []
    assert trace_one(both, rank, *options, "-o", str(root / "log")) == [0, 0]


def main(root: Path, rank: int, *, in_flight: bool) -> None:
    values = ("first", "second", "old")
    old = pair(root / "old", *values, in_flight=in_flight, victim=rank)
    assert let_both_go(old) == [0, 0]
    trace_calls(root, rank, in_flight=in_flight)
    for name, count in count_calls(root / "log").items():
        for number in range(1, count + 1) if name in NOTICED else ():
            directory = root / f"{name}-{number}"
            shutil.copytree(root / "old", directory)
            options = [*(["-f"] if in_flight else []), *killing(name, number)]
            both = pair(directory, "new", in_flight=in_flight, victim=rank)
            codes = trace_one(both, rank, *options)
            print(json.dumps([directory.name, codes]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), in_flight="in-flight" in sys.argv)
