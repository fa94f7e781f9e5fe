"""Runs functions of this package in a new Python, whatever its working directory."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from elasticrun.replicas.signals import stop_signals_blocked

# As with `python FILE`, modules that lie in the working directory are not found.
_BOOT = """
import sys
if sys.path and sys.path[0] == "":
    del sys.path[0]
parent = sys.argv.pop(1)
if parent not in sys.path:
    sys.path.append(parent)
from elasticrun.{module} import {function}
sys.exit({function}())
"""
_PACKAGE_PARENT = str(Path(__file__).parents[2])


def command(module: str, function: str, *arguments: object) -> list[str]:
    """Return the command that calls a function, which finds `arguments` in sys.argv."""
    code = _BOOT.format(module=module, function=function)
    return [sys.executable, "-c", code, _PACKAGE_PARENT, *map(str, arguments)]


def start_helper(
    module: str, variables: Mapping[str, str], *, kind: socket.SocketKind
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start a process with a session of its own that serves the launcher.

    It runs `main` of a module, which finds its end of a socket in sys.argv, and ends
    when the launcher hangs up. A stop signal to every process of the job is not for it,
    so it holds these back: the last save still needs it.
    """
    own, other = socket.socketpair(socket.AF_UNIX, kind)
    with contextlib.ExitStack() as stack, other, stop_signals_blocked():
        stack.enter_context(own)
        process = subprocess.Popen(
            command(module, "main", other.fileno()),
            env=variables,
            stdin=subprocess.DEVNULL,
            pass_fds=[other.fileno()],
            start_new_session=True,
        )
        stack.pop_all()
    return process, own
