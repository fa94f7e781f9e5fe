"""Finds collectives of the program itself in the backward pass."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

from torch.autograd.graph import _engine_run_backward

_COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allgather",
    "allreduce",
    "alltoall",
    "reduce_scatter",
)


def collective_in_backward() -> str | None:
    """Return the name of a node that communicates in the backward pass under way.

    None if there is none. To be called by a hook; it walks the whole graph.
    """
    seen: set[Any] = set()
    nodes = [tensor.grad_fn for tensor in _roots()]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if _communicates(node):
            return str(node.name().removesuffix("Backward"))
        nodes += [child for child, _ in node.next_functions]
    return None


def _roots() -> list[Any]:
    """Return what backward passes have been called for and are under way.

    A hook runs in the thread that has called for it (on a CPU), or in one of autograd's
    while that thread waits: either way a frame of torch's holds the roots. Reentrant
    checkpoints have passes within passes.
    """
    roots: list[Any] = []
    for innermost in sys._current_frames().values():
        frame: FrameType | None = innermost
        while frame is not None:
            if frame.f_code is _engine_run_backward.__code__:
                roots += frame.f_locals["t_outputs"]
            frame = frame.f_back
    del innermost  # Of this function, perhaps: a cycle that holds on to all callers'.
    return roots


def _communicates(node: Any) -> bool:
    """Return whether a node's function calls a collective, as far as its code tells."""
    if "c10d" in node.name():
        return True
    function = getattr(type(node), "_forward_cls", None)
    if function is None or function.__module__.startswith("torch.nn.parallel."):
        return False  # DDP's own may set its reduction going.
    codes = [getattr(function.forward, "__code__", None)]
    codes.append(getattr(function.backward, "__code__", None))
    return any(
        collective in name
        for code in codes
        if code is not None
        for name in code.co_names
        for collective in _COLLECTIVES
    )
