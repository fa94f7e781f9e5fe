"""A replica that was forked, and waits until its generation begins."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from elasticrun.launcher import processes
from elasticrun.replicas.wire import Channel, Message

MAX_MESSAGE = 1 << 16  # Bytes between the launcher and the forkserver.


@dataclass
class ForkedReplica:
    """A replica that waits, on the launcher's side.

    It waits for its order, or, once it has that, for its generation to begin.

    Attributes:
        rank: On this node.
        pid: 0 until it is forked.
        channel: For orders and reports.
        outputs: The reading ends of its stdout and stderr.
        printed: What has been read from them before its generation began.
        ports: Where it could serve the store: on loopback, and at the address that
            other nodes reach; none but for the first one of this node.
    """

    rank: int
    pid: int
    channel: Channel
    outputs: tuple[int, int]
    ports: tuple[int, ...]
    has_order: bool = False
    printed: tuple[bytearray, bytearray] = field(
        default_factory=lambda: (bytearray(), bytearray())
    )

    def begin(self, order: Message) -> None:
        """Let it run its program; or go on with it, if it waits for its generation."""
        self.channel.send({**order, "type": "begin"} if self.has_order else order)
        self.has_order = True

    def discard(self) -> None:
        """Let it end, since it is not needed."""
        if self.has_order:
            processes.kill_groups([self.pid])
        self.channel.close()
        for descriptor in self.outputs:
            os.close(descriptor)


def discard_all(replicas: list[ForkedReplica]) -> None:
    """Let all of them end."""
    for each in replicas:
        each.discard()
