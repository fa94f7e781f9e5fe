"""Sets of names, written as text."""

from __future__ import annotations


def named(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())
