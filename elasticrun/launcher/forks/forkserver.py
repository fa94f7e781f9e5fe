"""The process that replicas are forked from: it has imported torch, and has one thread.

It forks a process that forks the replica and ends. So the replica becomes a child of
the launcher, which adopts orphans: the launcher can wait for it, and the replica dies
with the launcher, not with the forkserver. If the launcher is killed, the forkserver
kills what is left of the replicas' process groups. Stop signals are blocked in the
forkserver, and unblocked in replicas.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import sys
import traceback
import weakref

from elasticrun.errors import counted
from elasticrun.launcher import processes
from elasticrun.launcher.forks.waiting import MAX_MESSAGE
from elasticrun.launcher.replica import main as replica
from elasticrun.replicas.signals import unblock_stop_signals

_MOST_DESCRIPTORS = 5  # Of a replica: control, stdout, stderr, and two listeners.

_TORCH = (
    "torch.distributed",
    "torch.utils.data",
    "elasticrun.data.combined",
    "elasticrun.job.remaining",
    "elasticrun.parallel.module",
    "elasticrun.job.states",
    "elasticrun.launcher.replica.reporter",
)


def main() -> None:
    """Serve the launcher at the other end of the socket named on the command line."""
    launcher = socket.socket(fileno=int(sys.argv[1]))
    order = json.loads(launcher.recv(MAX_MESSAGE))
    problem = ""
    if not order["is_bare"]:
        processes.die_with_parent(os.getppid())  # While an import may hang.
        gc.disable()  # It would look at all that is made, again and again.
        for name in (*_TORCH, *order["imports"]):
            importlib.import_module(name)
        if (number := processes.num_threads() - 1) > 0:
            problem = f"importing torch started {counted(number, 'thread')}"
        _disown_libraries()
        gc.freeze()  # Or the collector of each replica would copy every page.
        gc.enable()
        processes.outlive_parent()
    launcher.send(json.dumps({"type": "ready", "problem": problem}).encode())
    _serve(launcher, is_bare=order["is_bare"])


def _disown_libraries() -> None:
    """Let replicas not take every operator out of torch's tables at their end.

    That takes 40 ms. All else they finalize as if they had imported it themselves.
    """
    for finalizer in list(getattr(weakref.finalize, "_registry", ())):
        alive = finalizer.peek()
        if alive is not None and getattr(alive[1], "__module__", "") == "torch.library":
            finalizer.atexit = False


def _serve(launcher: socket.socket, *, is_bare: bool) -> None:
    groups: set[int] = set()
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(
                launcher, MAX_MESSAGE, _MOST_DESCRIPTORS
            )
        except ConnectionResetError:  # It went before it had read all answers.
            break
        if not data:
            break
        order = json.loads(data)
        if order["type"] == "fork":
            pid = _fork_twice(launcher, descriptors, is_bare=is_bare)
            groups.add(pid)
            launcher.send(json.dumps({"type": "forked", "pid": pid}).encode())
        else:
            groups = set(order["groups"])
    processes.kill_groups(groups)


def _fork_twice(
    launcher: socket.socket, descriptors: list[int], *, is_bare: bool
) -> int:
    """Return a replica that is the launcher's child.

    Args:
        descriptors: Of the replica: control, stdout, stderr, and any listeners.
        is_bare: Let it begin anew.
    """
    reader, writer = os.pipe()
    between = os.fork()
    if between == 0:
        os.close(reader)
        _fork_replica(launcher, writer, descriptors, is_bare=is_bare)
    for descriptor in (writer, *descriptors):
        os.close(descriptor)
    _, status = os.waitpid(between, 0)
    if status:
        raise ChildProcessError("no replica was forked")
    pid = int(os.read(reader, 32))
    os.close(reader)
    return pid


def _fork_replica(
    launcher: socket.socket,
    writer: int,
    descriptors: list[int],
    *,
    is_bare: bool,
) -> None:
    """Fork, and never return to the forkserver's loop."""
    try:
        pid = os.fork()
        if pid == 0:
            os.setsid()
            unblock_stop_signals()
            launcher.close()
            os.close(writer)
            _become_replica(descriptors, is_bare=is_bare)
        os.write(writer, str(pid).encode())
        os._exit(0)
    except BaseException:  # Before the program begins, nobody else would say it.
        os.write(2, traceback.format_exc().encode(errors="replace"))
    finally:
        os._exit(1)


def _become_replica(descriptors: list[int], *, is_bare: bool) -> None:
    control, out, err, *listeners = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    for number, descriptor in enumerate((null, out, err)):
        os.dup2(descriptor, number)
        os.close(descriptor)
    run = replica.execute if is_bare else replica.main
    run(control, listeners)
