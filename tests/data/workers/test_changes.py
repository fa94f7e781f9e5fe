"""What a data set holds, by which workers are made anew."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from elasticrun.data.workers.changes import changed, seen


def compose(*transforms: Any) -> SimpleNamespace:
    return SimpleNamespace(transforms=[*transforms])


def data_set(**attributes: Any) -> SimpleNamespace:
    """One with a long list of samples first, as an ImageFolder has it."""
    return SimpleNamespace(
        samples=[(f"{n}.png", n) for n in range(20_000)], **attributes
    )


CHANGES: dict[str, tuple[Any, Callable[[Any], object]]] = {
    "attribute": (data_set(level=1), lambda own: vars(own).update(level=2)),
    "transform": (
        data_set(transform=compose(SimpleNamespace(p=0.5))),
        lambda own: vars(own.transform.transforms[0]).update(p=0.1),
    ),
    "numpy": (
        data_set(p=np.float32(0.5)),
        lambda own: vars(own).update(p=np.float32(1)),
    ),
    "set": (data_set(kinds={"a", "b"}), lambda own: own.kinds.add("c")),
    "tensor": (data_set(mask=torch.ones(3)), lambda own: own.mask.zero_()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    own, change = CHANGES[name]
    before = seen(dataset=own)
    assert changed(before, seen(dataset=own)) is None
    change(own)
    assert changed(before, seen(dataset=own)) is not None


def test_what_a_logger_notes_for_itself_is_no_change() -> None:
    own = data_set(log=logging.getLogger("a data set"))
    before = seen(dataset=own)
    own.log.debug("its first message")
    assert changed(before, seen(dataset=own)) is None


def test_tensors_without_a_version_and_empty_cells_are_looked_at() -> None:
    with torch.inference_mode():
        embedded = torch.ones(3)

    def later() -> Any:
        return unset

    own = data_set(embedded=embedded, edges=torch.eye(3).to_sparse(), hook=later)
    before = seen(dataset=own)
    assert changed(before, seen(dataset=own)) is None
    unset = 1
    assert changed(before, seen(dataset=own)) == "dataset.hook.unset"
