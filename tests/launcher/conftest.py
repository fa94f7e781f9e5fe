"""Fixtures of the launcher's tests."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.launcher.running import Running, Start, running
from tests.support.sockets import kept_port
from tests.support.stage import Stage, wait_until

# A shell has what it puts into the background ignore this signal; launchers would
# inherit that, and leave it so.
if signal.getsignal(signal.SIGQUIT) is signal.SIG_IGN:
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)


@pytest.fixture
def stage(tmp_path: Path) -> Stage:
    return Stage(tmp_path)


@pytest.fixture
def endpoint() -> str:
    return f"127.0.0.1:{kept_port()}"


@pytest.fixture
def start(stage: Stage, endpoint: str) -> Iterator[Start]:
    """Return what starts one node more; the first one serves the endpoint."""
    with ExitStack() as stack:
        number = 0

        def start_node(*options: object, nodes: str, **more: object) -> Running:
            nonlocal number
            own = ["--nodes", nodes, "--rdzv-endpoint", endpoint, *options]
            own = own if "--replicas" in options else ["--replicas", 1, *own]
            name = f"-{number}"
            number += 1
            node = stack.enter_context(running(stage, *own, name=name, **more))
            wait_until(lambda: is_served(endpoint) or node.process.poll() is not None)
            return node

        yield start_node


def is_served(endpoint: str) -> bool:
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port))).close()
    except OSError:
        return False
    return True
