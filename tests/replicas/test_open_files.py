"""Rank 0 gets the files that it needs, or is refused with the numbers."""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from elasticrun.replicas.open_files import files_of_rank_0, largest_world

SCRIPT = """
import sys
from elasticrun.replicas.open_files import allow_open_files
print([allow_open_files(int(number)) for number in sys.argv[1:]])
"""


def limited(soft: int, hard: int) -> list[str]:
    return ["bash", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "bash"]


def test_the_soft_limit_is_raised_only_where_that_is_needed() -> None:
    command = [*limited(100, 300), sys.executable, "-c", SCRIPT, "50", "200", "400"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout == "[100, 200, 300]\n"
    for size in (1, 2, 340, 10_000):
        assert largest_world(files_of_rank_0(size)) == size
    assert largest_world(10) == 0


def test_more_replicas_than_rank_0_can_serve_are_refused() -> None:
    place = {"RANK": "0", "WORLD_SIZE": "60", "MASTER_ADDR": "127.0.0.1"}
    script = "import elasticrun; elasticrun.init()"
    result = subprocess.run(
        [*limited(100, 200), sys.executable, "-c", script],
        env={**os.environ, **place, "MASTER_PORT": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    needed = files_of_rank_0(60)
    assert needed > 200 <= resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    assert f"rank 0 would have about {needed} files open with 60" in result.stderr
    assert "and may have 200" in result.stderr
    assert f"at most {largest_world(200)}." in result.stderr
