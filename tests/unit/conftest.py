"""Fixtures of the unit tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.held import Held, held_writer


@pytest.fixture
def held() -> Iterator[Held]:
    """Hold every save in flight until the test lets it go."""
    with held_writer() as held:
        yield held
