"""What the rendezvous process needs of torch, and of clocks."""

from __future__ import annotations

import inspect
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from importlib import import_module
from typing import Any

import pytest
import torch.library
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from elasticrun.launcher.nodes.rendezvous import Rendezvous
from tests.launcher.running import elasticrun
from tests.support.stage import Stage

# All private names of torch that the launcher uses, with what is lost without them.
PRIVATE_NAMES = {
    "torch.distributed.elastic.rendezvous.dynamic_rendezvous": [
        # A node that leaves: the others wait for its heartbeats to look too old.
        "_RendezvousExitOp.__call__",
        "_DistributedRendezvousOpExecutor.run",
        "DynamicRendezvousHandler._stop_heartbeats",
    ],
    "torch.library": [
        # The end of a replica: 40 ms for operators that are taken out one by one.
        "_del_library",
    ],
}


@pytest.mark.parametrize(
    ("module", "name"),
    [(module, name) for module, names in PRIVATE_NAMES.items() for name in names],
)
def test_torch_still_has_a_private_name(module: str, name: str) -> None:
    found: Any = import_module(module)
    for part in name.split("."):
        assert hasattr(found, part), f"{module}.{name} is gone from torch"
        found = getattr(found, part)


def test_torch_still_runs_the_steps_of_a_rendezvous_as_the_launcher_does() -> None:
    source = inspect.getsource(dynamic_rendezvous.DynamicRendezvousHandler)
    assert "self._op_executor.run(exit_op, deadline)" in source
    assert "weakref.finalize(" in inspect.getsource(torch.library)


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
    rendezvous._give_up_seat()
    assert "lets no node leave at once ('object' object has no attribute" in (
        capsys.readouterr().err
    )
