"""Where the replicas of a hung generation wait, from the stacks that they printed."""

from __future__ import annotations

import re
from typing import NamedTuple

from elasticrun.check.runs.source import ProgramSource, original_path
from elasticrun.lint.naming import named

_FRAME = re.compile(
    r'\s*File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<function>.+)'
)
_START = "(most recent call first)"
_COLLECTIVES = named("""
    all_gather all_gather_into_tensor all_gather_object all_reduce all_to_all barrier
    broadcast broadcast_object_list gather gather_object monitored_barrier recv reduce
    reduce_scatter reduce_scatter_tensor scatter send
""")
# What a replica waits in whose stack leads through a file.
_WAITING = {
    "torch/autograd/graph.py": "a backward pass, whose gradients all replicas sum",
    "torch/nn/parallel/distributed.py": "DistributedDataParallel",
    "/elasticrun/saving/saver.py": "a checkpoint, or sums over replicas",
    "/elasticrun/replicas/gathering.py": "a checkpoint, or sums over replicas",
    "/elasticrun/replicas/gate.py": "a boundary, for other replicas",
    "/elasticrun/data/alike.py": "a loop, for what loader other replicas have",
    "/elasticrun/replicas/membership.py": "the start or the end, for other replicas",
    "/elasticrun/saving/opening.py": "the start, for other replicas",
}


class Wait(NamedTuple):
    """Where one replica waits.

    Attributes:
        what: The collective, or the innermost function; empty if nothing is known.
        path: The innermost of the program's own lines, in the user's directory.
    """

    rank: int
    what: str
    path: str
    line: int
    function: str

    def describe(self) -> str:
        what = f"waits in {self.what}" if self.what else "said nothing"
        where = f" at {self.path}:{self.line} in {self.function}" if self.path else ""
        return f"rank {self.rank} {what}{where}"


def waits_of(
    output: dict[int, list[str]], size: int, source: ProgramSource
) -> list[Wait]:
    """Return where each replica waits."""
    return [_wait(rank, output.get(rank, []), source) for rank in range(size)]


def _wait(rank: int, lines: list[str], source: ProgramSource) -> Wait:
    main = _main_stack(lines)
    if not main:
        return Wait(rank, "", "", 0, "")
    what = next(
        (text for path, _, name in main if (text := _collective(path, name))),
        main[0][2],
    )
    for path, line, function in main:
        own = original_path(path, source)
        if own != path:
            return Wait(rank, what, own, line, function)
    return Wait(rank, what, "", 0, "")


def _main_stack(lines: list[str]) -> list[tuple[str, int, str]]:
    """Return the frames of the thread that runs the program, the innermost first."""
    stacks: list[list[tuple[str, int, str]]] = []
    for text in lines:
        if _START in text:
            stacks.append([])
        elif stacks and (match := _FRAME.fullmatch(text)):
            frame = (match["path"], int(match["line"]), match["function"])
            stacks[-1].append(frame)
    for stack in reversed(stacks):
        if any(function == "_run_script" for _, _, function in stack):
            return stack
    return []


def _collective(path: str, function: str) -> str:
    if "torch/distributed" in path and function in _COLLECTIVES:
        return function
    return next((what for end, what in _WAITING.items() if path.endswith(end)), "")
