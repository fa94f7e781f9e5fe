"""Places of restarts are written as they are read."""

from __future__ import annotations

import pytest

from elasticrun.check.runs.places import parse_restart_place


@pytest.mark.parametrize("text", ["0:1:3", "2:end", "after3:0:2"])
def test_a_place_is_read_as_it_is_written(text: str) -> None:
    assert str(parse_restart_place(text)) == text


@pytest.mark.parametrize(
    "text", ["", "1", "0:0", "0:0:0", "after1:end", "a:b:c", "-1:0:1"]
)
def test_what_is_no_place(text: str) -> None:
    with pytest.raises(ValueError, match=r"--at"):
        parse_restart_place(text)
