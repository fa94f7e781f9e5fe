"""Fixtures of the tests of Lightning."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.forkservers import forks_that_have_imported


@pytest.fixture
def lightning_in_forks() -> Iterator[None]:
    """Let replicas not import Lightning each, which takes seconds."""
    with forks_that_have_imported("tests.integrations.lightning.validating"):
        yield
