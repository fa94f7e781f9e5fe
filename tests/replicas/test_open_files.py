"""A process may have as many files open as the system lets it."""

from __future__ import annotations

import subprocess
import sys

import pytest

SCRIPT = """
import resource
from elasticrun.replicas.open_files import raise_limit_of_open_files
raise_limit_of_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "limits"),
    [(100, 300, (300, 300)), (300, 300, (300, 300))],
)
def test_the_soft_limit_is_raised_to_the_hard_one(
    soft: int, hard: int, limits: tuple[int, int]
) -> None:
    limit = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"'
    result = subprocess.run(
        ["bash", "-c", limit, "bash", sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{limits}\n"
