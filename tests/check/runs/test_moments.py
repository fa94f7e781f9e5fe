"""Moments of a run, in words."""

from __future__ import annotations

from elasticrun.check.runs.moments import MomentKey


def test_moments_have_words() -> None:
    assert MomentKey("leave", 2, 1).describe() == "the end of loop 1 of epoch 2"
    assert MomentKey("exit").describe() == "the end of the program"
