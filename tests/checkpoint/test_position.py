"""A position in words, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from elasticrun.checkpoint.position import Position
from elasticrun.errors import CheckpointError


@pytest.mark.parametrize(
    ("position", "text"),
    [
        (Position(), "the beginning"),
        (Position(2), "the end of epoch 1"),
        (Position(0, False, 1), "loop 1 after 0 epochs"),
        (Position(1, False, 1), "loop 1 after 1 epoch"),
        (Position(2, True, 1, 40, "valid"), "epoch 2, loop 1, sample 40 of `valid`"),
        (Position(2, True, 1, 4, "steps of both"), "epoch 2, loop 1, step 4 of `both`"),
        (Position(2, False, 0, 4, "test"), "loop 0 after 2 epochs, sample 4 of `test`"),
    ],
)
def test_a_position_says_where_it_is(position: Position, text: str) -> None:
    assert str(position) == text


@pytest.mark.parametrize(
    "values",
    [
        None,
        [],
        {},
        {**Position().encode(), "more": 1},
        {**Position().encode(), "index": -1},
        {**Position().encode(), "index": True},
        {**Position().encode(), "index": 1.0},
        {**Position().encode(), "finished_epochs": -1},
        {**Position().encode(), "finished_loops": -1},
        {**Position().encode(), "in_epoch": 1},
        {**Position().encode(), "loader": None},
        {**Position().encode(), "breaks": None},
        {**Position().encode(), "breaks": [1, 2]},
        {**Position().encode(), "breaks": [[1, -2]]},
    ],
)
def test_what_is_no_position_is_refused(values: Any) -> None:
    with pytest.raises(CheckpointError, match="the saved position.* must be "):
        Position.decode(values)
