"""How the launcher answers callers, in its loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrun.launcher.control import server, sockets
from elasticrun.launcher.control.server import Server
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.stop_signals import StopSignals
from elasticrun.replicas.wire import Channel, Message


class Launcher:
    """A server, and what it asks of its supervisor."""

    def __init__(self, control: sockets.ControlSocket) -> None:
        self.loop = EventLoop()
        self.answer: Message = {}
        supervisor: Any = SimpleNamespace(
            loop=self.loop,
            reports=SimpleNamespace(on_ready=[], on_message=[]),
            exit_code=None,
            problem="stopped without a new checkpoint",
            stop=lambda *_, **__: None,
        )
        book: Any = self
        stops = StopSignals(lambda cause, code: None)
        self.server = Server(control, supervisor, book, stops)

    def status(self) -> Message:
        return self.answer

    def turn(self, times: int) -> None:
        for _ in range(times):
            self.loop.call_later(0.0, lambda: None)  # So that it never waits.
            self.loop.run_once()


@pytest.fixture
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launcher]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # Others' are elsewhere.
    control = sockets.ControlSocket()
    yield Launcher(control)
    control.close()


def call() -> Channel:
    [(_, connection)] = sockets.connections()
    assert connection is not None
    return Channel(connection)


def test_a_caller_that_does_not_read_is_hung_up_on(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And soon: nothing else is done meanwhile."""
    monkeypatch.setattr(server, "_READING_SECONDS", 0.05)
    launcher.answer["text"] = "x" * (1 << 22)
    caller = call()
    caller.send({"type": "status"})
    launcher.turn(3)
    launcher.answer.clear()
    another = call()
    another.send({"type": "status"})
    launcher.turn(3)
    assert another.receive_one() == {}
    another.close()
    launcher.turn(1)
    assert launcher.server._callers == []
    caller.close()


def test_a_stop_that_saved_nothing_is_told_from_one_that_did(
    launcher: Launcher,
) -> None:
    caller = call()
    caller.send({"type": "stop"})
    launcher.turn(2)
    assert caller.receive_one() == {"text": "saving and ending"}
    launcher.server.close()
    assert caller.receive_one() == {"error": "stopped without a new checkpoint"}
    caller.close()
    launcher.turn(1)
