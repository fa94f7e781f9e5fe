"""Whether a state from a file can take the place of one in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.state import check_state_name, state_of_file
from elasticrun.errors import StateNameError
from elasticrun.inspection.contents import Opaque, kind_of, leaves, load_file, shape_of
from elasticrun.inspection.entries import InspectionError

_MOST_SHOWN = 10


def check_name(state: str) -> None:
    """Refuse a name that no program can give to a state.

    Raises:
        InspectionError: It is none.
    """
    try:
        check_state_name(state)
    except StateNameError as error:
        raise InspectionError(str(error)) from error


def check_is_there(newest: Checkpoint, state: str) -> None:
    """Refuse a state that the checkpoint lacks, so that the program might never ask.

    Raises:
        InspectionError: It has none, or each rank has its own.
    """
    if newest.has(state):
        return
    states = sorted({state_of_file(name) for name in newest.names()})
    if state in states:
        raise InspectionError(
            f"in {newest.path} each rank has a {state!r} of its own, which one file "
            "cannot replace. Change it in the program."
        )
    raise InspectionError(
        f"{newest.path} has no state {state!r}, only: {', '.join(states)}. What the "
        "program does not register under that name is never loaded. Name one of them "
        "with --state; if the program has a state more than that, give --new."
    )


def check_fits(newest: Checkpoint, state: str, values: Any, *, source: object) -> None:
    """Refuse values that have other keys or shapes than those they would replace.

    Raises:
        InspectionError: They have; the differences are listed.
    """
    old = load_file(newest, state)
    if isinstance(old, Opaque):
        raise InspectionError(
            f"{newest.path / state} is in a format of the program's own ({old.kind}), "
            f"which would have to read {source}. Give --force if it can."
        )
    found = list(_differences(dict(leaves(old)), dict(leaves(values))))
    if not found:
        return
    more = len(found) - _MOST_SHOWN
    lines = [*found[:_MOST_SHOWN], *([f"and {more} more"] if more > 0 else [])]
    text = "".join(f"  {line}\n" for line in lines)
    raise InspectionError(
        f"{source} is not like {newest.path / state}:\n{text}The program would refuse "
        "to load it, unless it has changed as well; then give --force."
    )


def _differences(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    for path, leaf in old.items():
        if path not in new:
            yield f"{path} is missing; it was {kind_of(leaf)}"
        elif _shape(leaf) != _shape(new[path]):
            yield f"{path} is {kind_of(new[path])}; it was {kind_of(leaf)}"
    yield from (f"{path} is more than there was" for path in new if path not in old)


def _shape(leaf: Any) -> object:
    return shape_of(leaf) if isinstance(leaf, torch.Tensor) else None
