"""How the launcher answers callers, in its loop."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.supervisor.server import Server
from elasticrun.launcher.talk import sockets
from elasticrun.replicas.wire import Channel, Message


class Launcher:
    """A server, and what it asks of its supervisor."""

    def __init__(self, control: sockets.ControlSocket) -> None:
        self.loop = EventLoop()
        self.num_answers = 0
        supervisor: Any = SimpleNamespace(
            loop=self.loop,
            news=SimpleNamespace(on_started=[], on_ready=[], on_told=[]),
        )
        book: Any = self
        self.server = Server(control, supervisor, book)

    def status(self) -> Message:
        self.num_answers += 1
        return {"number": self.num_answers}

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


def test_answers_stop_with_their_caller(launcher: Launcher) -> None:
    """Each takes a look at all processes, and who has hung up reads none."""
    caller = call()
    for _ in range(20):
        caller.send({"type": "status"})
    while launcher.num_answers < 3:
        launcher.turn(1)
    caller.close()
    answered = launcher.num_answers
    launcher.turn(50)
    assert launcher.num_answers == answered < 20
    another = call()
    another.send({"type": "status"})
    launcher.turn(10)
    assert another.receive_one() == {"number": answered + 1}
    another.close()
    launcher.turn(5)
