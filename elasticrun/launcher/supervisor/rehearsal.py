"""Successors that run their script beside the generation that they succeed."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks.parked import Parked
from elasticrun.replicas.wire import Message, WireError

_MOST_PRINTED = 1 << 20
_MOST_TOLD = 1 << 12

_Version = tuple[float, int, int]


class Rehearsal:
    """Lets successors come to where their script first needs the job, and wait there.

    What they print is kept until their generation begins. One that prints more than a
    MiB comes no further before that.

    Args:
        orders: Theirs, by rank.
        limit: Seconds after which they are late.
        on_waiting: Called when all wait.
        on_late: Called with the reason if they do not in time, or are not taken then,
            since others elsewhere do not.
        on_failure: Called when one has failed, with the reason, and whether it waited.
        on_barred: Called when one could not use GPUs as a fork, and has begun anew.
    """

    def __init__(
        self,
        orders: Sequence[Message],
        loop: EventLoop,
        *,
        limit: float,
        on_waiting: Callable[[], None],
        on_late: Callable[[str], None],
        on_failure: Callable[[str, bool], None],
        on_barred: Callable[[], object],
    ) -> None:
        self._loop = loop
        self._on_waiting = on_waiting
        self._on_failure = on_failure
        self._on_barred = on_barred
        self._orders = orders
        self._left = set(range(len(orders)))
        self._watched: list[object] = []
        self._begun_at = time.time()
        self._files: dict[str, _Version] = {}
        late = f"not all new replicas have needed the job within {limit:.0f} s"
        self._timer = loop.call_later(limit, lambda: on_late(late))

    def begin(self, parked: Parked) -> None:
        """Let one of them begin, while others may still be on their way."""
        parked.begin(self._orders[parked.rank])
        self._watch(parked.channel, partial(self._hear, parked))
        for output, printed in zip(parked.outputs, parked.printed, strict=True):
            os.set_blocking(output, False)
            self._watch(output, partial(self._keep, output, printed))

    @property
    def num_waiting(self) -> int:
        """How many have come to where their script needs the job."""
        return len(self._orders) - len(self._left)

    @property
    def is_outdated(self) -> bool:
        """Whether files of the program have changed since these began to run it."""
        return any(
            version != _version_of(path) or version[0] > self._begun_at
            for path, version in self._files.items()
        )

    def end(self) -> None:
        """Hear no more of them."""
        self._timer.cancel()
        for each in self._watched:
            self._loop.forget(each)
        self._watched = []

    def _watch(self, source: object, callback: Callable[[], None]) -> None:
        self._watched.append(source)
        self._loop.watch(source, callback)

    def _forget(self, source: object) -> None:
        self._watched.remove(source)
        self._loop.forget(source)

    def _keep(self, output: int, printed: bytearray) -> None:
        try:
            data = os.read(output, _MOST_PRINTED)
        except BlockingIOError:
            return
        printed += data
        if not data or len(printed) >= _MOST_PRINTED:
            self._forget(output)

    def _hear(self, parked: Parked) -> None:
        try:
            messages = parked.channel.receive()
        except WireError:
            messages, parked.channel.is_open = [], False
        for message in messages:
            if message["type"] == "waiting":
                self._note_waiting(parked, message["files"])
            elif message["type"] == "barred":
                self._on_barred()
            elif message["type"] == "failure":
                self._fail(parked, message["trace"])
                return
        if not parked.channel.is_open:
            for output, printed in zip(parked.outputs, parked.printed, strict=True):
                if output in self._watched:
                    self._keep(output, printed)
            last = parked.printed[1][-_MOST_TOLD:].decode(errors="replace")
            self._fail(parked, f"killed, or ended, before its generation began\n{last}")

    def _fail(self, parked: Parked, why: str) -> None:
        self.end()
        has_waited = parked.rank not in self._left
        self._on_failure(f"local rank {parked.rank}: {why.rstrip()}", has_waited)

    def _note_waiting(self, parked: Parked, files: list[str]) -> None:
        for path in files:
            self._files.setdefault(path, _version_of(path))
        if parked.rank in self._left:
            self._left.remove(parked.rank)
            if not self._left:
                self._on_waiting()


def _version_of(path: str) -> _Version:
    try:
        status = os.stat(path)
    except OSError:
        return 0.0, 0, 0
    return status.st_mtime, status.st_size, status.st_ino
