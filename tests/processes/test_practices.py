"""What the tests on GPUs train, where it can be tried without one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu.practices import check_that_a_restart_does_not_show

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("practice", ["bf16", "fp16", "norm", "fsdp"])
def test_a_restart_does_not_show(tmp_path: Path, practice: str) -> None:
    check_that_a_restart_does_not_show(tmp_path, practice, stops=(4,))
