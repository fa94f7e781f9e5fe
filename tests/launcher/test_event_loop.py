"""Callbacks that were taken back do not come."""

from __future__ import annotations

import os

from elasticrun.launcher.event_loop import EventLoop


def test_a_cancelled_timer_does_not_fire() -> None:
    loop, fired = EventLoop(), []
    loop.call_later(0.0, lambda: fired.append(1)).cancel()
    loop.call_later(0.0, lambda: fired.append(2))
    loop.run_once()
    assert fired == [2]


def test_what_was_forgotten_is_not_called() -> None:
    loop, called = EventLoop(), []
    pipes = [os.pipe() for _ in range(2)]

    def on_readable(own: int, other: int) -> None:
        called.append(own)
        loop.forget(other)

    first, second = pipes[0][0], pipes[1][0]
    loop.watch(first, lambda: on_readable(first, second))
    loop.watch(second, lambda: on_readable(second, first))
    for _, writer in pipes:
        os.write(writer, b"x")
    loop.run_once()
    assert len(called) == 1
    for descriptor in (*pipes[0], *pipes[1]):
        os.close(descriptor)
