"""The trace on a disk that is full."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.job.trace import Trace
from tests.support.full_disk import limited_files


def test_a_full_disk_is_named_with_the_file(tmp_path: Path) -> None:
    trace = Trace(str(tmp_path), generation=0, rank=1, world_size=2)
    with limited_files(8):
        with pytest.raises(OSError, match=r"0-1\.jsonl"):
            trace.write(epoch=0, loop=0, batch=0, micro=0, indices=[1], num_valid=1)
        with pytest.raises(OSError, match=r"0-1\.jsonl"):
            trace.close()
