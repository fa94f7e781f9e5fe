"""What the rendezvous process says of clocks, and of a torch it does not know."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from elasticrun.launcher.nodes.rendezvous import Rendezvous
from tests.launcher.running import elasticrun
from tests.support.stage import Stage


@pytest.mark.slow
def test_a_clock_that_goes_wrong_is_named(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.touch()
    server = TCPStore(
        "127.0.0.1",
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=60),
    )
    where = f"127.0.0.1:{server.port}"
    options = ["--replicas", 1, "--nodes", "2", "--rdzv-endpoint", where]
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(elasticrun, stage, "run", *options, script)
        while not running.done():
            server.set("elasticrun/clock", str(time.time() - 60))
            time.sleep(0.02)
        ended = running.result()
    assert ended.returncode == 1
    assert "the clock of this machine differs by" in ended.stderr


def test_a_torch_that_lets_no_node_leave_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rendezvous = Rendezvous.__new__(Rendezvous)  # Whose torch has none of the names.
    rendezvous._handler = object()
    rendezvous._leave_round()
    assert "no node can leave at once ('object' object has no attribute" in (
        capsys.readouterr().err
    )
