"""Processes of Linux: who dies with whom, who is left, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; at once if it has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with_parent` back."""
    _prctl(_PR_SET_PDEATHSIG, 0)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends, and wait for it.

    Whoever started this process may have ignored its children's ends, which is
    inherited; then the kernel would forget how they ended before anybody asks.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> list[int]:
    """Return the children of this process, ended ones that nobody waited for too."""
    own = os.getpid()
    return [pid for pid in _all_processes() if _parent_of(pid) == own]


def kill_group(leader: int) -> None:
    """Kill a replica's process group: itself and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def kill_children(*, but: set[int]) -> None:
    """Kill and wait for all children, and for those that become ours by that.

    Only for a process that adopts orphans: nothing that a replica has started then is
    left. A replica begins a session of its own and cannot come back to this one, so
    who is in this one is somebody else's, or has another task.
    """
    own = os.getsid(0)
    while victims := [
        pid for pid in children() if pid not in but and _session_of(pid) != own
    ]:
        for pid in victims:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in victims:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def num_threads() -> int:
    """Return how many threads this process has, those of C libraries included."""
    return len(os.listdir("/proc/self/task"))


def usage_of_groups(leaders: Iterable[int]) -> dict[int, tuple[float, int]]:
    """Return CPU seconds and bytes of memory of process groups, by their leaders.

    What processes share, as forks do, counts for each with its part.
    """
    usage = dict.fromkeys(leaders, (0.0, 0))
    tick = os.sysconf("SC_CLK_TCK")
    for pid in _all_processes() if usage else []:
        fields = _stat(pid)
        if len(fields) > 21 and (leader := int(fields[2])) in usage:
            seconds, memory = usage[leader]
            seconds += (int(fields[11]) + int(fields[12])) / tick
            usage[leader] = seconds, memory + _own_memory(pid)
    return usage


def _own_memory(pid: int) -> int:
    path = f"/proc/{pid}/smaps_rollup"
    with contextlib.suppress(OSError, ValueError), open(path) as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def num_out_of_memory_kills(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return how many processes the kernel has killed for memory, if it says so.

    Those of this process's control group, to which its replicas belong, where they are
    counted; else all of this machine, which may be those of somebody else.
    """
    for path in (_own_cgroup(proc, cgroups) / "memory.events", proc / "vmstat"):
        with contextlib.suppress(OSError, ValueError), path.open() as file:
            for line in file:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return None


def _own_cgroup(proc: Path, cgroups: Path) -> Path:
    with (
        contextlib.suppress(OSError, ValueError),
        (proc / "self" / "cgroup").open() as file,
    ):
        for line in file:
            if line.startswith("0::"):
                return cgroups / line[3:].strip().lstrip("/")
    return cgroups


def free_memory() -> float:
    """Return the share of this machine's memory that is available."""
    with (
        contextlib.suppress(OSError, ValueError, KeyError),
        open("/proc/meminfo") as file,
    ):
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in file}
        return sizes["MemAvailable"] / sizes["MemTotal"]
    return 1.0


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _parent_of(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[1]) if len(fields) > 1 else 0


def _session_of(pid: int) -> int:
    fields = _stat(pid)
    return int(fields[3]) if len(fields) > 3 else 0


def _stat(pid: int) -> list[str]:
    """Return what follows the name in /proc/PID/stat: state, parent, group, session."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
