"""Who is taken for hung, on a clock that the test turns: no machine is too slow."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elasticrun.launcher import event_loop
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.waiting import ForkedReplica
from elasticrun.launcher.replica.reporter import DUMP_SIGNAL
from elasticrun.launcher.supervisor import generation, watchdog
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.supervisor.watchdog import HangClock, Watchdog
from elasticrun.replicas.wire import Channel
from tests.support.stage import wait_until

TIMEOUT = 60.0
IDLE = f"trap '' {DUMP_SIGNAL}; echo up; exec sleep 1000"


class Subscriber:
    """Is told of a generation, and has nothing to do."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **options: None


class World:
    """Two replicas that do nothing, and the launcher's watchdog, on one clock."""

    def __init__(self, logs: Path) -> None:
        self.now = 1000.0
        self.said: list[str] = []
        self.loop = EventLoop()
        self.channels: list[Channel] = []
        self.outputs: list[int] = []
        self.logs = logs
        self.watchdog = Watchdog(
            self.loop, self.said.append, HangClock(TIMEOUT), grace=TIMEOUT
        )

    def begin(self, stack: ExitStack) -> None:
        subscriber: Any = Subscriber()
        self.generation = Generation(
            [self._start(rank, stack) for rank in range(2)],
            number=0,
            offset=0,
            loop=self.loop,
            log_dir=self.logs,
            audience=subscriber,
            subscriber=subscriber,
        )
        self.watchdog.begin(self.generation)

    def end(self) -> None:
        self.generation.kill()
        wait_until(self._has_ended, "the end of the replicas")
        for channel in self.channels:
            channel.close()
        for descriptor in self.outputs:
            os.close(descriptor)

    def _has_ended(self) -> bool:
        self.pass_time(0.5)
        return not self.generation.running

    def _start(self, rank: int, stack: ExitStack) -> ForkedReplica:
        process = subprocess.Popen(
            ["sh", "-c", IDLE], stdout=subprocess.PIPE, start_new_session=True
        )
        stack.enter_context(process)
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        own, other = socket.socketpair()
        self.channels.append(Channel(other))
        (out, unused), (err, written) = os.pipe(), os.pipe()
        os.close(unused)
        self.outputs.append(written)
        return ForkedReplica(rank, process.pid, Channel(own), (out, err), ())

    def monotonic(self) -> float:
        return self.now

    def report(self, rank: int, index: int, num_forward_passes: int) -> None:
        """Have a replica say now where it is."""
        self.channels[rank].send(
            {
                "type": "report",
                "counts": [0, 0, index],
                "num_forward_passes": num_forward_passes,
                "is_in_loop": True,
                "has_trained": True,
                "time": self.now,
            }
        )

    def print_stacks(self, rank: int) -> None:
        frame = '  File "/x/train.py", line 7 in main'
        text = f"Thread 0x1 (most recent call first):\n{frame}\n"
        os.write(self.outputs[rank], text.encode())

    def pass_time(self, seconds: float) -> None:
        """Let the launcher's loop turn as often as it does in that time."""
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            self.loop.call_later(0.0, lambda: None)  # So that it never waits.
            self.loop.run_once()


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(tmp_path)
    for module in (event_loop, generation, watchdog):
        monkeypatch.setattr(module, "time", world)
    with ExitStack() as stack:
        world.begin(stack)
        stack.callback(world.end)
        yield world


def test_who_hangs_is_named_and_not_who_waits_for_it(world: World) -> None:
    """Both have passed the same boundary; rank 0 has come further in its step."""
    for rank in (0, 1):
        world.report(rank, 30, 5)
    world.pass_time(1)
    world.report(0, 30, 6)  # No boundary, but the forward pass of the next batch.
    world.pass_time(TIMEOUT - 2)
    assert world.said == []
    world.pass_time(3)
    assert world.watchdog.reason.startswith("rank 1 passed no boundary for")


def test_who_was_heard_of_later_is_not_taken_for_moving(world: World) -> None:
    """Its reporter was slow to say where it is: a busy machine."""
    world.report(0, 36, 6)
    world.pass_time(TIMEOUT / 3)
    world.report(1, 30, 5)
    world.pass_time(TIMEOUT)
    assert world.watchdog.reason.startswith("rank 1 passed no boundary for")


def test_who_still_moves_does_not_hang(world: World) -> None:
    """Replicas that wait for nobody: rank 1 is far behind, and on its way."""
    world.report(0, 300, 50)
    for index in range(1, 15):
        world.report(1, index, index)
        world.pass_time(TIMEOUT / 12)
    assert world.watchdog.reason.startswith("rank 0 passed no boundary for")


def test_replicas_that_never_made_a_job_are_not_told_apart(world: World) -> None:
    world.pass_time(TIMEOUT + 1)
    assert world.watchdog.reason.startswith("no rank passed a boundary for")


def test_a_launcher_that_was_suspended_takes_no_job_for_hung(world: World) -> None:
    for rank in (0, 1):
        world.report(rank, 30, 5)
    world.pass_time(1)
    world.now += 10 * TIMEOUT  # It neither ran nor read what was said.
    world.pass_time(TIMEOUT - 3)
    assert world.said == []
    world.pass_time(5)
    assert world.watchdog.reason.startswith("no rank passed a boundary for")


def test_all_print_their_stacks_before_they_are_killed(world: World) -> None:
    world.pass_time(TIMEOUT + 1)
    assert world.said == [
        f"{world.watchdog.reason}: printing the stacks, then ending the replicas"
    ]
    world.print_stacks(0)
    world.pass_time(1)
    assert not world.generation.is_killed
    world.print_stacks(1)
    world.pass_time(1)
    assert world.generation.is_killed
    world.watchdog.end()
    assert world.watchdog.reason.endswith(" s (ranks 0, 1 at train.py:7)")


def test_who_prints_no_stacks_is_not_waited_for_long(world: World) -> None:
    """Nor does a stop put that off, which has a grace of its own."""
    world.pass_time(TIMEOUT + 1)
    world.watchdog.expect_end(grace=1000.0, leeway=3.0, cause="SIGTERM")
    assert not world.generation.is_killed
    world.pass_time(4)
    assert world.generation.is_killed
    assert len(world.said) == 1
