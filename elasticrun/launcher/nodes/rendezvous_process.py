"""The launcher's side of the rendezvous process: starting, hearing and ending it."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
from collections.abc import Callable
from dataclasses import asdict

from elasticrun.launcher import environment, interpreter
from elasticrun.launcher.event_loop import EventLoop, Timer
from elasticrun.launcher.options import NodeSettings
from elasticrun.replicas.wire import Channel, Message, WireError

_SILENCE_SECONDS = 5.0  # Less than after which the others take this node for dead.
_FIRST_WORD_SECONDS = 300.0  # It imports torch, perhaps from a slow disk.
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
        self._timer: Timer | None = None
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
        self._expect_word(_FIRST_WORD_SECONDS)
        self.send({"launcher": os.getpid(), "name": name, **asdict(settings)})

    def send(self, message: Message) -> None:
        """Tell it something; nothing happens if it has ended."""
        self._channel.send(message)

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._expect_word(None)
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
        # A try to meet the others may take longer than a silence.
        is_trying = message["type"] == "failing"
        self._expect_word(None if is_trying else _SILENCE_SECONDS)
        if message["type"] == "lost":
            self._lose(message["text"])
        else:
            self._on_message(message)

    def _expect_word(self, seconds: float | None) -> None:
        """Give it up if it is silent, as it is only when the network holds it up."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._timer = self._loop.call_later(
                seconds, lambda: self._on_silence(seconds)
            )

    def _on_silence(self, seconds: float) -> None:
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if poll.poll(0):  # This launcher was held up, by a signal or a disk.
            self._expect_word(seconds)
            self._on_readable()
        else:
            self._lose(f"no message from it for {seconds:g} s")

    def _lose(self, why: str) -> None:
        self.close()
        self._on_lost(why)
