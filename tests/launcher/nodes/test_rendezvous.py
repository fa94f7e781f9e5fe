"""What the rendezvous process says of clocks, and of a torch it does not know."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from elasticrun.launcher.nodes.rendezvous import Rendezvous, calm_left
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


def test_the_more_rounds_began_within_an_hour_the_longer_the_last_one_lasts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 1e9
    monkeypatch.setattr(time, "time", lambda: now)
    left = [calm_left([now - 10.0] * number) for number in range(16)]
    assert left[:9] == [0.0] * 8 + [6.0]
    assert left[9:] == [22.0, 54.0, 118.0, 246.0, 290.0, 290.0, 290.0]
    assert calm_left([now - 3600.0] * 20) == 0.0


def test_a_torch_that_lets_no_node_leave_is_told(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rendezvous = Rendezvous.__new__(Rendezvous)  # Whose torch has none of the names.
    rendezvous._handler = object()
    rendezvous._leave_round()
    assert "no node can leave at once ('object' object has no attribute" in (
        capsys.readouterr().err
    )
