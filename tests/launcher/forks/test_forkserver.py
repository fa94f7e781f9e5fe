"""The process that replicas are forked from."""

from __future__ import annotations

import json
import select
import socket

from elasticrun.launcher import environment, interpreter


def test_it_ends_when_the_launcher_goes_without_reading_an_answer() -> None:
    process, own = interpreter.start_helper(
        "launcher.forks.forkserver",
        environment.of_forkserver(is_bare=True),
        kind=socket.SOCK_SEQPACKET,
    )
    own.send(json.dumps({"is_bare": True, "imports": []}).encode())
    select.select([own], [], [])  # It is ready, and says so.
    own.close()
    assert process.wait(timeout=60) == 0
