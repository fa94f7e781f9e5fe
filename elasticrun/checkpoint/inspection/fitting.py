"""Whether a state from a file can take the place of one in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.inspection.contents import (
    Opaque,
    kind_of,
    leaves,
    load_file,
    shape_of,
)
from elasticrun.checkpoint.inspection.entries import InspectionError
from elasticrun.checkpoint.states.state import check_state_name, state_of_file

_MOST_SHOWN = 10
_OF_EACH_RANK = "random"  # Which every job has.


def check_name(state: str) -> None:
    """Refuse a name that no program can give to a state.

    Raises:
        StateNameError: It is none.
        InspectionError: It is elasticrun's own.
    """
    check_state_name(state)
    if state.lower() == _OF_EACH_RANK:
        raise InspectionError(
            f"each rank has a {_OF_EACH_RANK!r} of its own, in which elasticrun keeps "
            f"its random generators, so every job would refuse a {state!r} beside it. "
            "Give the state another name."
        )


def check_is_asked_for(newest: Checkpoint, state: str, *, is_new: bool) -> None:
    """Refuse a state that the program would refuse, or perhaps never ask for.

    Args:
        is_new: Whether the checkpoint may lack it.

    Raises:
        InspectionError: Each rank has its own, or another state almost this name; or
            there is none, though it must not be new.
    """
    if newest.has(state):
        return
    states = sorted({state_of_file(name) for name in newest.names()})
    if state in states:
        raise InspectionError(
            f"in {newest.path} each rank has a {state!r} of its own, which one file "
            "cannot replace. Change it in the program."
        )
    for other in states:
        if other.lower() == state.lower():
            raise InspectionError(
                f"{newest.path} has a state {other!r}. A program cannot have one named "
                f"{state!r} beside it, since some file systems do not tell them apart. "
                f"Give --state {other}, or another name."
            )
    if is_new:
        return
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
