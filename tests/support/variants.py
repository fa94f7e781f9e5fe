"""Cases of a test that run in another target than its other ones."""

from __future__ import annotations

from typing import Any

import pytest


def in_wide(*cases: Any) -> list[Any]:
    """Return cases that only `make wide` runs; a tuple is one of several parameters."""
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)), marks=pytest.mark.wide
        )
        for each in cases
    ]
