"""How one launcher meets the others, where the machine lets it do less than usual."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from elasticrun.launcher import interpreter
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.nodes.many_nodes import ManyNodes
from elasticrun.launcher.options import NodeSettings


def test_meeting_is_tried_again_where_no_process_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tries: list[object] = []

    def refuse(*arguments: object, **options: object) -> None:
        tries.append(arguments)
        raise BlockingIOError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr(interpreter, "start_helper", refuse)
    loop, said = EventLoop(), list[str]()
    subscriber: Any = None  # Nobody is told before others are met.
    nodes = ManyNodes(
        NodeSettings(1, 2, "host", 29400),
        "job",
        share=1,
        loop=loop,
        subscriber=subscriber,
        say=said.append,
    )
    nodes.open()
    while len(tries) < 3:
        loop.run_once()
    assert said == ["looking for host:29400 ([Errno 11] no more processes)"]
    assert nodes.pids == set()
