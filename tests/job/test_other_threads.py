"""What other threads ask of a job is answered while its own thread goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from elasticrun.checkpoint.position import Position
from elasticrun.job.loop import StepLoop
from elasticrun.job.progress import LoopStack, Progress


def asked_while(thing: Any, name: str, goes_on: Callable[[], object]) -> Any:
    """Return what a property says if the main thread goes on behind its first line."""
    code = getattr(type(thing), name).fget.__code__
    num_lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal num_lines
        if frame.f_code is code and event == "line":
            num_lines += 1
            if num_lines == 2:
                goes_on()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return getattr(thing, name)
    finally:
        sys.settrace(before)


def test_loops_may_end_while_it_is_asked_what_a_boundary_waits_for() -> None:
    loops = LoopStack()
    for name in ("outer", "inner"):
        loops.begin(StepLoop(name, 4, "train.py:7", world_size=1), "train.py:7")
    why = asked_while(loops, "why_no_boundary", loops.clear)
    assert "the loop over `inner` (train.py:7) runs in the body" in why
    assert loops.why_no_boundary is None


@pytest.mark.parametrize("index", [0, 3])
def test_the_replay_may_end_while_it_is_asked_where_it_goes_on(index: int) -> None:
    resume = Position(loader="train", index=index)
    progress = Progress(resume)
    position = asked_while(progress, "position", lambda: progress.begin_loop("train"))
    assert position == resume
    assert not progress.is_replaying
