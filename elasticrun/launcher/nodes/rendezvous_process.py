"""The launcher's side of the rendezvous process: starting, hearing and ending it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import asdict

from elasticrun.launcher import environment, interpreter
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.options import NodeSettings
from elasticrun.replicas.wire import Channel, Message, WireError

_SILENCE_SECONDS = 5.0  # Less than after which the others take this node for dead.
_FIRST_WORD_SECONDS = 300.0  # It imports torch, perhaps from a slow disk.
_TICK = 1.0
_MAX_BYTES = 1 << 24  # A note of each node.
_GOODBYE_SECONDS = 20.0


class RendezvousProcess:
    """One rendezvous process: started, heard while it lives, and ended.

    Args:
        on_message: Called with what it says.
        on_lost: Called once, with why it says nothing more.
    """

    def __init__(
        self,
        settings: NodeSettings,
        name: str,
        *,
        loop: EventLoop,
        on_message: Callable[[Message], None],
        on_lost: Callable[[str], None],
    ) -> None:
        self._loop = loop
        self._on_message = on_message
        self._on_lost = on_lost
        self._heard_at: float | None = None
        self._has_spoken = False
        self._process, own = interpreter.start_helper(
            "launcher.nodes.rendezvous",
            environment.of_rendezvous(),
            kind=socket.SOCK_STREAM,
        )
        own.settimeout(_SILENCE_SECONDS)
        self.pid = self._process.pid
        self._channel = Channel(own, limit=_MAX_BYTES)
        self._is_open = True
        loop.watch(self._channel, self._on_readable)
        # It says something when it finds nobody.
        loop.call_later(_FIRST_WORD_SECONDS, self._check_first_word)
        self.send({"launcher": os.getpid(), "name": name, **asdict(settings)})

    def send(self, message: Message) -> None:
        """Tell it something; nothing happens if it has ended."""
        self._channel.send(message)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._loop.forget(self._channel)
            self._channel.close()
            self._process.kill()
            self._process.wait()

    def say_goodbye(self, message: Message) -> None:
        """Let it end by itself, for a limited time."""
        if self._is_open:
            self.send(message)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_GOODBYE_SECONDS)
        self.close()

    def _on_readable(self) -> None:
        try:
            messages = self._channel.receive()
        except WireError as error:
            self._lose(str(error))
            return
        for message in messages:
            if not self._is_open:
                return
            self._take(message)
        if self._is_open and not self._channel.is_open:
            self._lose("the process that meets the other nodes has ended")

    def _take(self, message: Message) -> None:
        self._has_spoken = True
        if message["type"] == "failing":  # A try may take longer than a silence.
            self._on_message(message)
            return
        if self._heard_at is None:
            self._loop.call_later(_TICK, self._tick)
        self._heard_at = time.monotonic()
        if message["type"] == "lost":
            self._lose(message["text"])
        else:
            self._on_message(message)

    def _tick(self) -> None:
        """Give it up once it is silent, as it is only when the network holds it up."""
        assert self._heard_at is not None
        if not self._is_open:
            return
        if time.monotonic() - self._heard_at > _SILENCE_SECONDS:
            self._lose(f"no message from it for {_SILENCE_SECONDS:g} s")
        else:
            self._loop.call_later(_TICK, self._tick)

    def _check_first_word(self) -> None:
        if self._is_open and not self._has_spoken:
            self._lose("the process that meets the other nodes said nothing")

    def _lose(self, why: str) -> None:
        self.close()
        self._on_lost(why)
