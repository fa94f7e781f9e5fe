"""What the graph of the backward pass under way tells of its loss.

Whether it reads outputs of other replicas, and whether all of it is weighed.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor
from torch.autograd.graph import _engine_run_backward

from elasticrun.parallel.weighing import is_weighed

_COLLECTIVES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "allgather",
    "allreduce",
    "alltoall",
    "reduce_scatter",
)


def crossing_node() -> str | None:
    """Return what communicates in the backward pass under way, None if nothing does.

    To be called by a hook. It walks the whole graph.
    """
    for node in _nodes(is_whole=True):
        if _communicates(node):
            return str(node.name().removesuffix("Backward"))
    return None


def reaches_unweighed(parameters: Collection[Tensor]) -> bool:
    """Return whether gradients of the pass come to parameters through no weighed loss.

    To be called by a hook. What reentrant checkpoints compute anew is not seen.
    """
    return any(
        getattr(node, "variable", None) in parameters for node in _nodes(is_whole=False)
    )


def _nodes(*, is_whole: bool) -> Iterator[Any]:
    """Yield the graph's nodes, or those that come before weighed losses."""
    seen: set[Any] = set()
    nodes = [tensor.grad_fn for tensor in _roots(has_inner=is_whole)]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or (is_weighed(node) and not is_whole):
            continue
        seen.add(node)
        yield node
        nodes += [child for child, _ in node.next_functions]


def _roots(*, has_inner: bool) -> list[Any]:
    """Return what backward passes have been called for and are under way.

    A hook runs in the thread that has called for it (on a CPU), or in one of autograd's
    while that thread waits: either way a frame of torch's holds the roots.

    Args:
        has_inner: Whether to look into passes within passes, of reentrant checkpoints.
    """
    roots: list[Any] = []
    for innermost in sys._current_frames().values():
        frame = innermost
        own: list[Any] = []
        while frame is not None:
            if frame.f_code is _engine_run_backward.__code__:
                outputs = frame.f_locals["t_outputs"]
                own = [*own, *outputs] if has_inner else [*outputs]
            frame = frame.f_back  # type: ignore[assignment]
        roots += own
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
