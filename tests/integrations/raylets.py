"""Ray clusters whose nodes are raylets of this machine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest

from tests.launcher.running import (
    processes_of,
    temporary,
    variables,
    wait_until_nothing_is_left,
)
from tests.support.stage import DEADLINE, Stage, wait_until


class Driven:
    """A cluster of raylets, and the process that trains on it."""

    def __init__(self, stage: Stage, cluster: Any) -> None:
        self.stage = stage
        self.cluster = cluster
        self.process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return (self.stage.root / "driver.log").read_text()

    @property
    def logs(self) -> str:
        """What Ray's processes have printed; the driver hears of it later."""
        paths = temporary(self.stage).glob("ray/session_*/logs/*.err")
        return "".join(path.read_text(errors="replace") for path in paths)

    def start(self, driver: str) -> None:
        script = self.stage.root / "driver.py"
        script.write_text(driver)
        own = variables(self.stage, RAY_ADDRESS=self.cluster.address)
        del own["ELASTICRUN_JOB"]
        with (self.stage.root / "driver.log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(script), str(self.stage.root)],
                env=own,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def add_node(self) -> Any:
        size = 80 << 20
        own = {"num_cpus": 1, "resources": {"w": 1}, "object_store_memory": size}
        return self.cluster.add_node(**own)

    def drain(self, node: Any) -> None:
        """Announce that a node will be taken away, as an autoscaler does."""
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
        command += ["--address", self.cluster.address, "--node-id", node.node_id]
        command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        command += ["--reason-message", "spot", "--deadline-remaining-seconds", "600"]
        subprocess.run(command, env=variables(self.stage), check=True)

    def kill(self, node: Any) -> None:
        """Let a machine die: everything on it ends at once."""
        for process in raylet_of(node).children(recursive=True):
            process.kill()
        self.cluster.remove_node(node, allow_graceful=False)

    def wait_until_trains(self, size: int, *, after: int = -1) -> int:
        """Wait for a generation of so many replicas that trains; return its number."""

        def newest() -> tuple[int, int]:
            paths = self.stage.trace.glob("*.jsonl")
            found = [int(p.stem.partition("-")[0]) for p in paths if p.stat().st_size]
            return max(found, default=-1), found.count(max(found, default=-1))

        def trains() -> bool:
            assert self.process.poll() is None, self.output
            generation, number = newest()
            return generation > after and number == size

        wait_until(trains, f"{size} replicas\n{self.output}")
        return newest()[0]

    def wait(self) -> int:
        return self.process.wait(DEADLINE)


def raylet_of(node: Any) -> psutil.Process:
    [raylet] = node.all_processes["raylet"]
    return psutil.Process(raylet.process.pid)


@contextmanager
def raylets(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, **more: object
) -> Iterator[Driven]:
    """Run a cluster, whose processes have these variables."""
    from ray.cluster_utils import Cluster

    more |= {"RAY_TMPDIR": temporary(stage), "RAY_AUTH_MODE": "disabled"}
    own = variables(stage, **more)
    for name in ("ELASTICRUN_JOB", "ELASTICRUN_CHECKPOINT_DIR"):
        del own[name]
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    head = {"num_cpus": 0, "object_store_memory": 80 << 20, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    driven = Driven(stage, cluster)
    try:
        yield driven
    finally:
        cluster.shutdown()
        for pid in processes_of(stage):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def check_nothing_is_left(driven: Driven) -> None:
    """No process but Ray's own, and no socket of a launcher."""
    driven.cluster.shutdown()
    wait_until_nothing_is_left(driven.stage)
    assert list(temporary(driven.stage).glob("elasticrun-*/*")) == []
