"""A process ends well while threads of C++ are not done with its last collective."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sockets import kept_port

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which("cc")
SCRIPT = """
import elasticrun
import torch
from torch.distributed import _functional_collectives as collectives

elasticrun.init()
# That the interpreter is busy with at its end.
kept = [[] for _ in range(1_000_000)]
part = torch.ones(10)
for _ in range(3):
    whole = collectives.all_gather_tensor(part, 0, torch.distributed.group.WORLD) + 1
"""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux", reason="elsewhere nothing is preloaded"
    ),
    pytest.mark.skipif(COMPILER is None, reason="needs a C compiler, as cc"),
]


@pytest.fixture(scope="module")
def slow_gloo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = tmp_path_factory.mktemp("library") / "slow_gloo.so"
    source = Path(__file__).with_name("slow_gloo.c")
    assert COMPILER is not None
    command = [COMPILER, "-shared", "-fPIC", "-o", library, source, "-ldl", "-lpthread"]
    subprocess.run(command, check=True)
    return library


@pytest.mark.parametrize(
    "milliseconds", [12, *(pytest.param(n, marks=pytest.mark.soak) for n in (8, 16))]
)
@pytest.mark.wide
def test_threads_of_gloo_do_not_abort_an_ending_interpreter(
    slow_gloo: Path, milliseconds: int
) -> None:
    port = kept_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT],
            cwd=ROOT,
            env={
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "2",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "LD_PRELOAD": str(slow_gloo),
                "SLOW_GLOO_MS": str(milliseconds),
            },
        )
        for rank in range(2)
    ]
    assert [each.wait() for each in ranks] == [0, 0]
