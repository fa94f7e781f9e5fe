"""A weight that is trained with means of numbers, and the warnings that come of it."""

from __future__ import annotations

import contextlib
import linecache
import warnings
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from elasticrun import (
    AdaptiveDataLoader,
)
from tests.support.data import Numbers


def linear(value: float = 0.0) -> nn.Linear:
    net = nn.Linear(1, 1, bias=False)
    nn.init.constant_(net.weight, value)
    return net


def loader(
    max_local_batch_size: int | None = 2, *, size: int = 8
) -> AdaptiveDataLoader:
    """Return one with global batches of four samples."""
    return AdaptiveDataLoader(
        Numbers(size), 4, max_local_batch_size=max_local_batch_size, name=None
    )


def backward(model: Any, batch: Tensor) -> None:
    """Give each weight the mean of the batch as its gradient."""
    model(batch[:, None].float()).mean().backward()


@contextlib.contextmanager
def warned() -> Iterator[list[warnings.WarningMessage]]:
    """Return a list that gets the warnings, which are no errors for once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


def assert_at_line(
    caught: list[warnings.WarningMessage], texts: list[str], file: str
) -> None:
    """Compare warnings, each of which is to name a line of `file` that says so."""
    assert len(caught) == len(texts)
    for each, text in zip(caught, texts, strict=True):
        assert text in str(each.message)
        assert each.filename == file
        assert linecache.getline(file, each.lineno).endswith("# warned of\n")
