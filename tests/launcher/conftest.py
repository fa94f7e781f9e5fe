"""Fixtures of the launcher's tests."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.stage import Stage

# A shell has what it puts into the background ignore this signal; launchers would
# inherit that, and leave it so.
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)
