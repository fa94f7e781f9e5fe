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

# Those that change what is on the disk or what the other rank hears.
NOTICED = frozenset(
    (
        *("openat", "write", "fsync", "ftruncate", "rename", "mkdir", "rmdir"),
        *("unlink", "unlinkat", "sendto", "send", "recvfrom"),
    )
)
JOB = "pair"
_PATIENCE = 60.0
_PATIENCE_WITH_DEAD = 1.0  # Nobody says here that one was killed, as a watcher would.


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


def pair(
    directory: Path, *values: str, in_flight: bool, patience: float = _PATIENCE
) -> tuple[Life, Life]:
    """Return two ranks that are about to save each of the values."""
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
        wait()
        warnings.simplefilter("ignore")
        for value in values:
            for state in states:
                state.value = value
            try:
                saver.save({}, timeout=patience, is_awaited=not in_flight)
                for state in states:
                    state.value = "changed since"
                saver.finish(timeout=10 * patience)
            except AgreementError:
                os._exit(1)
        if rank == 1:
            store.put("heard", True)
            return
        with suppress(TimeoutError):  # Rank 0 serves the store until then.
            store.take("heard", timeout=patience)

    lives = tuple(
        Life(lambda wait, rank=rank: run(rank, wait))  # type: ignore[misc]
        for rank in range(2)
    )
    listener.close()
    return lives[0], lives[1]


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


def let_both_go(lives: tuple[Life, Life]) -> list[int]:
    for life in lives:
        life.wait_until_ready()
    for life in lives:
        life.let_go()
    return [life.end() for life in lives]


def trace_one(lives: tuple[Life, Life], rank: int, *options: str) -> list[int]:
    """Let both go, one of them under strace; return both exit codes."""
    other = lives[1 - rank]
    other.wait_until_ready()
    other.let_go()
    codes = [0, 0]
    codes[rank] = trace(lives[rank], *options)
    codes[1 - rank] = other.end()
    return codes


def trace_calls(root: Path, rank: int, *, in_flight: bool) -> None:
    """Write the system calls of a rank whose pair both come to their end to a log."""
    directory = root / "traced"
    shutil.copytree(root / "old", directory)
    lives = pair(directory, "new", in_flight=in_flight)
    options = ["-f"] if in_flight else []
    assert trace_one(lives, rank, *options, "-o", str(root / "log")) == [0, 0]


def main(root: Path, rank: int, *, in_flight: bool) -> None:
    old = pair(root / "old", "first", "second", "old", in_flight=in_flight)
    assert let_both_go(old) == [0, 0]
    trace_calls(root, rank, in_flight=in_flight)
    for name, count in count_calls(root / "log").items():
        for number in range(1, count + 1) if name in NOTICED else ():
            directory = root / f"{name}-{number}"
            shutil.copytree(root / "old", directory)
            options = [*(["-f"] if in_flight else []), *killing(name, number)]
            lives = pair(
                directory, "new", in_flight=in_flight, patience=_PATIENCE_WITH_DEAD
            )
            codes = trace_one(lives, rank, *options)
            print(json.dumps([directory.name, codes]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), in_flight="in-flight" in sys.argv)
