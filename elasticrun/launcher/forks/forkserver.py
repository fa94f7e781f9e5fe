"""The process that replicas are forked from: it has imported torch, and has one thread.

It forks twice and lets the process between end, so that replicas become children of
the launcher, which adopts orphans. The launcher can then wait for them, and they die
with the launcher and not with the forkserver. If the launcher is killed, the
forkserver kills what is left of the replicas' process groups. It starts with every stop
signal held back, and lets only the replicas have them.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import sys
import traceback

from elasticrun.launcher import environment, processes
from elasticrun.launcher.environment import Changes
from elasticrun.launcher.forks.preloading import preload
from elasticrun.launcher.replica import main as replica
from elasticrun.replicas.signals import take_stops

MAX_MESSAGE = 1 << 16
MOST_AT_ONCE = 4  # Replicas of one order; the process between is forked but once.
NUM_DESCRIPTORS = 3  # Of a replica: control, stdout, stderr.
_MOST_LISTENERS = 2  # Of the first one, after these.

_TORCH = (
    "torch.distributed",
    "torch.utils.data",
    "elasticrun.data.combined",
    "elasticrun.job.epochs",
    "elasticrun.parallel.module",
    "elasticrun.job.states",
    "elasticrun.launcher.replica.reporter",
)


def main() -> None:
    """Serve the launcher at the other end of the socket named on the command line."""
    before = environment.variables()
    launcher = socket.socket(fileno=int(sys.argv[1]))
    order = json.loads(launcher.recv(MAX_MESSAGE))
    problem, num_sound = "", 0
    if not order["is_bare"]:
        processes.die_with_parent(os.getppid())  # While an import may hang.
        for name in _TORCH:
            importlib.import_module(name)
        problem, num_sound = preload(order["imports"], names_culprit=True)
        processes.outlive_parent()
    answer = {"type": "ready", "problem": problem, "num_sound": num_sound}
    launcher.send(json.dumps(answer).encode())
    _serve(launcher, before, is_bare=order["is_bare"])


def _has_variables(wanted: dict[str, str | None]) -> bool:
    """Return whether imports gave this process the variables that a replica has."""
    own = environment.variables()
    return all(own.get(name) == value for name, value in wanted.items())


def _serve(launcher: socket.socket, before: dict[str, str], *, is_bare: bool) -> None:
    groups: set[int] = set()
    is_unsound = False
    while True:
        data, descriptors, _, _ = socket.recv_fds(
            launcher, MAX_MESSAGE, MOST_AT_ONCE * NUM_DESCRIPTORS + _MOST_LISTENERS
        )
        if not data:
            break
        order = json.loads(data)
        if order["type"] == "fork" and is_unsound:  # Another one will be asked.
            for descriptor in descriptors:
                os.close(descriptor)
        elif order["type"] == "fork":
            now = environment.variables()
            changed = None if is_bare else environment.changes(before, now)
            pids = _fork_twice(order["size"], launcher, descriptors, changed)
            groups.update(pids)
            launcher.send(json.dumps({"type": "forked", "pids": pids}).encode())
        elif order["type"] == "import":
            problem, _ = preload(order["names"], names_culprit=False)
            is_unsound |= bool(problem) or not _has_variables(order["variables"])
            if is_unsound:
                launcher.send(json.dumps({"type": "unsound"}).encode())
        else:
            groups = set(order["groups"])
    processes.kill_groups(groups)


def _fork_twice(
    size: int, launcher: socket.socket, descriptors: list[int], changed: Changes | None
) -> list[int]:
    """Return replicas that are the launcher's children."""
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        _fork_replicas(size, launcher, reader, writer, descriptors, changed)
    for descriptor in (writer, *descriptors):
        os.close(descriptor)
    _, status = os.waitpid(between, 0)
    pids = [int(pid) for pid in os.read(reader, 32 * size).split()]
    os.close(reader)
    if status:  # Those that it has forked end, as the launcher hangs up.
        raise ChildProcessError(f"only {len(pids)} of {size} replicas were forked")
    return pids


def _fork_replicas(
    size: int,
    launcher: socket.socket,
    reader: int,
    writer: int,
    descriptors: list[int],
    changed: Changes | None,
) -> None:
    """Fork, and never return to the forkserver's loop.

    Args:
        descriptors: Of each replica, and then the first one's listeners.
        changed: The variables that imports have changed here; None to begin anew.
    """
    try:
        for number in range(size):
            pid = os.fork()
            if pid == 0:
                os.setsid()
                take_stops()
                launcher.close()
                os.close(reader)
                os.close(writer)
                _become_replica(number, size, descriptors, changed)
            os.write(writer, f"{pid} ".encode())
        os._exit(0)
    except BaseException:  # Before the program begins, nobody else would say it.
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(1)


def _become_replica(
    number: int, size: int, descriptors: list[int], changed: Changes | None
) -> None:
    """Keep what is this replica's own, and run it."""
    start, end = number * NUM_DESCRIPTORS, size * NUM_DESCRIPTORS
    own = descriptors[start : start + NUM_DESCRIPTORS]
    listeners = [] if number else descriptors[end:]
    for descriptor in {*descriptors} - {*own, *listeners}:
        os.close(descriptor)
    control = _take_descriptors(own)
    if changed is None:
        replica.execute(control, listeners)
    else:
        replica.main(control, listeners, changed)


def _take_descriptors(descriptors: list[int]) -> int:
    control, *outputs = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, *outputs)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    return control
