"""Where replicas are, by the stacks that they print; a hang's message says it."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Mapping

from elasticrun import errors

_THREAD = re.compile(rb"(Current thread|Thread) 0x")
_FRAME = re.compile(rb'  File "(.+)", line (\d+) in (.+?)\s*$')
_INSTALLED = re.compile(r"\b(site|dist)-packages\b")
_NOT_OWN = (os.path.dirname(errors.__file__), sysconfig.get_path("stdlib"), "<")
_MOST_PLACES, _MOST_RANKS = 4, 8


class Stack:
    """The stack of a replica's main thread, which faulthandler prints last."""

    def __init__(self) -> None:
        self._frames: list[tuple[str, str, str]] = []

    def take(self, line: bytes) -> None:
        """Look at a line that the replica printed."""
        if _THREAD.match(line):
            self._frames = []
        elif frame := _FRAME.match(line):
            file, number, function = (os.fsdecode(part) for part in frame.groups())
            self._frames.append((file, number, function))

    @property
    def place(self) -> str:
        """The program's line, and the function that it waits for; empty if unknown."""
        for file, number, function in self._frames:
            if not (file.startswith(_NOT_OWN) or _INSTALLED.search(file)):
                innermost = self._frames[0][2]
                called = "" if innermost == function else f", in {innermost}"
                return f"{os.path.basename(file)}:{number}{called}"
        return ""


def describe_places(stacks: Mapping[int, Stack]) -> str:
    """Return where ranks are, those first that few others are with."""
    ranks: dict[str, list[str]] = {}
    for rank, stack in stacks.items():
        if stack.place:
            ranks.setdefault(stack.place, []).append(str(rank))
    found = sorted(ranks.items(), key=lambda each: len(each[1]))
    return "; ".join(
        f"rank{'s' * (len(each) > 1)} {', '.join(each[:_MOST_RANKS])}"
        f"{' and others' * (len(each) > _MOST_RANKS)} at {place}"
        for place, each in found[:_MOST_PLACES]
    )
