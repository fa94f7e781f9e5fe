"""Messages over a socket: whole, in order, and of limited size."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from elasticrun.replicas.wire import Channel, WireError


def test_messages_come_through_whatever_they_hold() -> None:
    left, right = map(Channel, socket.socketpair())
    message = {"type": "start", "environment": {"A": "\udcff\n", "B": "x" * 50_000}}
    left.send(message)
    left.send({"type": "end"})
    left.close()
    received = []
    while right.is_open:
        received += right.receive()
    assert received == [message, {"type": "end"}]
    right.close()


@pytest.mark.parametrize("data", [b"x" * 300, b"7\n", b"{]\n", b"[" * 250 + b"\n"])
def test_nonsense_is_an_error(data: bytes) -> None:
    left, right = socket.socketpair()
    with left, right:
        left.sendall(data)
        with pytest.raises(WireError):
            Channel(right, limit=256).receive()


def test_nobody_there_is_no_error() -> None:
    left, right = map(Channel, socket.socketpair())
    right.close()
    left.send({"type": "stop"})
    assert left.receive_one() is None
    left.close()


RAISING = """
import resource
from elasticrun.replicas.wire import raise_limit_of_open_files
raise_limit_of_open_files()
print(resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "limits"),
    [(100, 300, (300, 300)), (300, 300, (300, 300))],
)
def test_the_soft_limit_of_open_files_is_raised_to_the_hard_one(
    soft: int, hard: int, limits: tuple[int, int]
) -> None:
    limit = f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"'
    result = subprocess.run(
        ["bash", "-c", limit, "bash", sys.executable, "-c", RAISING],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout == f"{limits}\n"
