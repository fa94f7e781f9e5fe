"""Replicas that were forked and wait for their order to start."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field

from elasticrun.launcher import processes
from elasticrun.replicas.wire import Channel, Message


@dataclass
class Parked:
    """A replica that waits, on the launcher's side.

    It waits for its order, or, once it has that, for its generation to begin.

    Attributes:
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


@dataclass
class Batch:
    """Replicas that were asked for together.

    Attributes:
        on_forked: Called with each of them.
        num_forked: How many there are by now.
    """

    size: int
    on_forked: Callable[[Parked], None]
    num_forked: int = 0
