"""What a data set holds, by which workers are made anew."""

from __future__ import annotations

import logging
import mmap
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
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


LEVEL = 1


class Level:
    """What reads a variable of its module, and one of its class."""

    __slots__ = ("own",)
    shared = 1

    def __init__(self) -> None:
        self.own = 1

    def __call__(self) -> int:
        return max(self.shared, *(LEVEL + n for n in range(self.own)))


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
    "nested": (
        data_set(options={"levels": [0, 0]}),
        lambda own: own.options["levels"].__setitem__(1, 1),
    ),
    "another tensor": (
        data_set(mask=torch.ones(3)),
        lambda own: vars(own).update(mask=torch.ones(3)),
    ),
    "set": (data_set(kinds={"a", "b"}), lambda own: own.kinds.add("c")),
    "tensor": (data_set(mask=torch.ones(3)), lambda own: own.mask.zero_()),
    "array": (data_set(mask=np.ones((4, 3))[::2]), lambda own: own.mask[1].fill(0)),
    "array of a tensor": (
        data_set(mask=torch.ones(3).numpy()),
        lambda own: own.mask.fill(0),
    ),
    "far in a list": (
        data_set(targets=[0] * 50_000),
        lambda own: own.targets.__setitem__(-1, 1),
    ),
    "slot": (data_set(level=Level()), lambda own: setattr(own.level, "own", 2)),
    "class": (data_set(level=Level()), lambda own: setattr(Level, "shared", 5)),
    "global": (data_set(level=Level()), lambda own: globals().update(LEVEL=2)),
    "compiled": (
        data_set(pattern=re.compile("a")),
        lambda own: vars(own).update(pattern=re.compile("b")),
    ),
    "frame": (
        data_set(frame=pandas.DataFrame({"a": [1, 2]})),
        lambda own: own.frame.loc.__setitem__((0, "a"), 3),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_seen(name: str) -> None:
    own, change = CHANGES[name]
    before = seen(dataset=own)
    assert changed(before, seen(dataset=own)) is None
    change(own)
    assert changed(before, seen(dataset=own)) is not None


def test_what_workers_share_is_no_change() -> None:
    shared = torch.ones(3).share_memory_().numpy()
    mapped = np.frombuffer(mmap.mmap(-1, 8), np.uint8)
    own = data_set(shared=shared, mapped=mapped)
    before = seen(dataset=own)
    shared[0] = mapped[0] = 2
    assert changed(before, seen(dataset=own)) is None


batch = 1


class Rows:
    """What reads an attribute that is called as a variable of its module."""

    batch = 1

    def __call__(self) -> int:
        return self.batch


def test_a_variable_that_is_called_as_an_attribute_is_no_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = data_set(rows=Rows())
    before = seen(dataset=own)
    monkeypatch.setitem(globals(), "batch", 2)
    assert changed(before, seen(dataset=own)) is None


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
