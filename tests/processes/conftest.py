"""Fixtures of the tests of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stage import Stage


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)
