"""One generation of replicas as the launcher sees it, from start to end."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sysconfig
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from elasticrun import errors
from elasticrun.checkpoint.storage.place import Place, parse_place
from elasticrun.launcher import processes
from elasticrun.launcher.endings import (
    Ending,
    Failure,
    explain_kill,
)
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.waiting import ForkedReplica
from elasticrun.launcher.replica.reporter import DUMP_SIGNAL
from elasticrun.launcher.terminal.output import LineReader, Log, log_path
from elasticrun.replicas.wire import Message, WireError

NO_IMPORTS: Message = {"modules": [], "path": [], "variables": []}
_STACKS = b"(most recent call first)"
_THREAD = re.compile(rb"(Current thread|Thread) 0x")
_FRAME = re.compile(rb'  File "(.+)", line (\d+) in (.+?)\s*$')
_INSTALLED = re.compile(r"\b(site|dist)-packages\b")
_NOT_OWN = (os.path.dirname(errors.__file__), sysconfig.get_path("stdlib"), "<")
_MOST_PLACES, _MOST_RANKS = 4, 8


class Stack:
    """The stack of a replica's main thread, which faulthandler prints last.

    Attributes:
        frames: The file, line and function of each frame, the innermost first.
    """

    def __init__(self) -> None:
        self.frames: list[tuple[str, str, str]] = []

    def take(self, line: bytes) -> None:
        """Look at a line that the replica printed."""
        if _THREAD.match(line):
            self.frames = []
        elif frame := _FRAME.match(line):
            file, number, function = (os.fsdecode(part) for part in frame.groups())
            self.frames.append((file, number, function))

    @property
    def place(self) -> str:
        """The program's line, and the function that it waits for; empty if unknown."""
        for file, number, function in self.frames:
            if not (file.startswith(_NOT_OWN) or _INSTALLED.search(file)):
                innermost = self.frames[0][2]
                called = "" if innermost == function else f", in {innermost}"
                return f"{os.path.basename(file)}:{number}{called}"
        return ""


def describe_places(stacks: Mapping[int, Stack]) -> str:
    """Return where ranks are, the places with the fewest of them first."""
    ranks: dict[str, list[str]] = {}
    for rank, stack in stacks.items():
        if stack.place:
            ranks.setdefault(stack.place, []).append(str(rank))
    found = sorted(ranks.items(), key=lambda each: len(each[1]))
    return "; ".join(
        f"rank{'s' * (len(each) > 1)} {', '.join(each[:_MOST_RANKS])}"
        f"{' and others' * (len(each) > _MOST_RANKS)} at {place}"
        for place, each in found[:_MOST_PLACES]
    )


class ReplicaSubscriber(Protocol):
    """Receives the output and the reports of replicas."""

    def on_output(self, rank: int, line: bytes, *, is_error: bool) -> None:
        """A replica printed a line."""

    def on_log_failure(self, rank: int, error: OSError) -> None:
        """What a replica prints cannot be kept; told once, of the first one."""

    def on_report(self, member: Member) -> None:
        """A replica said where it is."""


class GenerationSubscriber(Protocol):
    """Receives failures and the end of a generation."""

    def on_trouble(self) -> None:
        """A replica failed, or raised; there may be more to come."""

    def on_all_ended(self) -> None:
        """Every replica has ended, and nothing that they started is left."""


@dataclass
class Member:
    """One replica of a running generation.

    Attributes:
        report: Where it was last; empty until its program has made a job.
        imports: What it had imported when it had trained a batch.
        moved_at: When its position changed last.
        stack: Where its main thread was when it last printed stacks.
        has_failed_save: Whether it ended after a last save that came to nothing.
        rescued: What it has saved alone after another one's death, if it has.
        no_rescue: Why it has not, as it said at its end.
    """

    rank: int
    pid: int
    replica: ForkedReplica
    pidfd: int
    started_at: float
    log: Log
    readers: list[LineReader] = field(default_factory=list)
    report: Message = field(default_factory=dict)
    imports: Message = field(default_factory=lambda: dict(NO_IMPORTS))
    moved_at: float = 0.0
    failure: Failure | None = None
    failed_at: float = 0.0
    has_dumped: bool = False
    stack: Stack = field(default_factory=Stack)
    has_failed_save: bool = False
    rescued: str = ""
    no_rescue: str = ""
    ending: Ending | None = None


class Generation:
    """The replicas that were started together.

    Attributes:
        members: The replicas of this node, by rank.
        is_broken: Whether a node is gone that it needs.
        is_discarded: Whether it was killed because nobody needed it any more.
    """

    def __init__(
        self,
        replicas: Sequence[ForkedReplica],
        *,
        number: int,
        offset: int,
        loop: EventLoop,
        log_dir: Path,
        audience: ReplicaSubscriber,
        subscriber: GenerationSubscriber,
    ) -> None:
        self.number = number
        self._offset = offset
        self.is_killed = False
        self.is_broken = False
        self.is_discarded = False
        self.started_at = time.monotonic()
        self._has_log_failed = False
        self._kills_before = processes.num_out_of_memory_kills()
        self._loop = loop
        self._audience = audience
        self._subscriber = subscriber
        self.members = [self._enroll(each, log_dir) for each in replicas]

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def running(self) -> list[Member]:
        return [member for member in self.members if member.ending is None]

    @property
    def endings(self) -> list[Ending]:
        return [m.ending for m in self.members if m.ending is not None]

    @property
    def has_job(self) -> bool:
        """Whether every program on this node has come to make its job."""
        return all(member.report for member in self.members)

    @property
    def has_trained(self) -> bool:
        """Whether every program on this node has trained a batch in it."""
        return all(m.report.get("has_trained") for m in self.members)

    @property
    def num_failed(self) -> int:
        """How many have ended, or raised, on this node."""
        return sum(m.failure is not None or m.ending is not None for m in self.members)

    @property
    def may_rescue(self) -> bool:
        """Whether one that runs here may save what was trained."""
        return any(member.report.get("may_rescue") for member in self.running)

    @property
    def rescued(self) -> str:
        """What one of them has saved alone after another one's death, if one has."""
        return next((m.rescued for m in self.members if m.rescued), "")

    @property
    def no_rescue(self) -> str:
        """Why none has, as the first to say it said at its end, or else last."""
        said = (m.no_rescue or m.report.get("no_rescue", "") for m in self.members)
        return next(filter(None, said), "")

    @property
    def uses_gpus(self) -> bool:
        """Whether the replicas on this node have said that they train on GPUs."""
        return any(m.report.get("gpu_memory") is not None for m in self.members)

    @property
    def batch_size(self) -> int:
        """Samples of the largest global batch so far; 0 if there was none."""
        return max(int(m.report.get("batch_size", 0)) for m in self.members)

    @property
    def num_shares(self) -> int | None:
        """Virtual replicas; None if there are none, or none has said so yet."""
        told = (m.report.get("virtual_replicas") for m in self.members)
        return next((number for number in told if number is not None), None)

    @property
    def has_begun(self) -> bool:
        """Whether any program on this node has come to make its job."""
        return any(member.report for member in self.members)

    def checkpoint_dir(self, default: Place) -> Place:
        """Return where it saves; the script may have a directory of its own."""
        reported = self.members[0].report.get("checkpoint_dir")
        return parse_place(reported) if reported else default

    def explain_kill(self, cause: Ending) -> str:
        """Return what is known of a SIGKILL that ended this generation."""
        if cause.code != -signal.SIGKILL:
            return ""
        return explain_kill(self._kills_before, processes.num_out_of_memory_kills())

    def start(self, orders: Sequence[Message]) -> None:
        for member, order in zip(self.members, orders, strict=True):
            member.replica.begin(order)
            for reader, data in zip(
                member.readers, member.replica.printed, strict=True
            ):
                reader.take(bytes(data))

    def ask_to_stop(self, cause: str, *, is_followed: bool) -> None:
        """Let all save and exit at one boundary; it is enough to ask one of them.

        Args:
            is_followed: Whether successors wait on this machine, and on no other one.
        """
        message = {"type": "stop", "cause": cause, "is_followed": is_followed}
        for member in self.running[:1]:
            member.replica.channel.send(message)

    def dump_stacks(self) -> None:
        """Let each replica print its stacks; it can even where its program hangs."""
        for member in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member.pid, DUMP_SIGNAL)

    @property
    def places(self) -> str:
        """Where the replicas were when they printed their stacks, as far as known."""
        return describe_places({each.rank: each.stack for each in self.members})

    @property
    def has_dumped(self) -> bool:
        """Whether all running replicas have begun to print their stacks."""
        return all(member.has_dumped for member in self.running)

    def kill(self) -> None:
        """Kill all replicas, with the processes of their groups."""
        self.is_killed = True
        processes.kill_groups(member.pid for member in self.running)

    def discard(self) -> None:
        """Kill all replicas, which is no crash: others are to start in their place."""
        self.is_discarded = True
        self.kill()

    def _enroll(self, replica: ForkedReplica, log_dir: Path) -> Member:
        rank = self._offset + replica.rank
        log = Log(
            log_path(log_dir, generation=self.number, rank=rank),
            lambda error: self._on_log_failure(rank, error),
        )
        now = time.monotonic()
        pidfd = os.pidfd_open(replica.pid)
        member = Member(rank, replica.pid, replica, pidfd, now, log, moved_at=now)
        for descriptor, is_error in zip(replica.outputs, (False, True), strict=True):
            on_line = partial(self._on_line, member, is_error=is_error)
            reader = LineReader(descriptor, on_line)
            member.readers.append(reader)
            self._loop.watch(reader, partial(self._on_output, reader))
        self._loop.watch(replica.channel, partial(self._on_messages, member))
        self._loop.watch(pidfd, partial(self._on_end, member))
        return member

    def _on_line(self, member: Member, line: bytes, *, is_error: bool) -> None:
        member.log.write(line)
        member.has_dumped = member.has_dumped or _STACKS in line
        member.stack.take(line)
        self._audience.on_output(member.rank, line, is_error=is_error)

    def _on_log_failure(self, rank: int, error: OSError) -> None:
        if not self._has_log_failed:
            self._has_log_failed = True
            self._audience.on_log_failure(rank, error)

    def _on_output(self, reader: LineReader) -> None:
        reader.read()
        if not reader.is_open:
            self._loop.forget(reader)

    def _on_messages(self, member: Member) -> None:
        channel = member.replica.channel
        try:
            for message in channel.receive():
                self._on_message(member, message)
        except WireError:
            channel.is_open = False
        if not channel.is_open:
            self._loop.forget(channel)

    def _on_message(self, member: Member, message: dict[str, Any]) -> None:
        if message["type"] == "report":
            before = member.report.get("counts"), member.report.get("inside")
            if (message["counts"], message.get("inside")) != before:
                # What was said during a pause of the launcher is older than that.
                member.moved_at = max(member.moved_at, message["time"])
            member.report = message
            self._audience.on_report(member)
        elif message["type"] == "no room":
            member.moved_at = max(member.moved_at, message["time"])
        elif message["type"] == "imports":
            member.imports = message
        elif message["type"] == "failure":
            member.failure = Failure(message["summary"], message["trace"])
            member.failed_at = message["time"]
            self._keep_trace(member, message["full"])
        elif message["type"] == "end":
            member.has_failed_save = message["has_failed_save"]
            member.rescued = message["rescued"]
            member.no_rescue = message["no_rescue"]
        elif message["type"] == "failed":
            self._subscriber.on_trouble()

    def _keep_trace(self, member: Member, text: str) -> None:
        """Write a traceback into the log; whether it is the cause shows only later."""
        for reader in member.readers:  # What the replica has printed before.
            while reader.is_open and reader.read():
                continue
        for line in text.encode(errors="replace").splitlines(keepends=True):
            member.log.write(line)

    def _on_end(self, member: Member) -> None:
        now = time.monotonic()
        _, status = os.waitpid(member.pid, 0)
        self._loop.forget(member.pidfd)
        os.close(member.pidfd)
        channel = member.replica.channel
        if channel.is_open:
            with contextlib.suppress(WireError):
                for message in channel.drain():  # What it said before it ended.
                    self._on_message(member, message)
            self._loop.forget(channel)
        channel.close()
        member.ending = Ending(
            member.rank,
            os.waitstatus_to_exitcode(status),
            member.failed_at if member.failure else now,
            member.failure,
            self.is_killed,
        )
        if not self.is_killed:
            processes.kill_groups([member.pid])  # Its workers, if somebody killed it.
        for reader in member.readers:
            if reader.is_open:
                self._loop.forget(reader)
            reader.close()
        member.log.close()
        if not self.running:
            self._subscriber.on_all_ended()
        elif member.ending.is_failure and not self.is_killed:
            self._subscriber.on_trouble()
