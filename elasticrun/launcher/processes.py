"""Linux processes: which die together, which are left over, how they end."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from elasticrun.launcher import environment

CLEANING_SECONDS = 5.0  # torch's waits for two after the end of who used it.
_LOOK_SECONDS = 0.02
_TRACKER = b"resource_tracker import main"  # Also of libraries that copy it.
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36
_LINE = re.compile(r"^(\w+):?\s+(\d+)", re.MULTILINE)
_PARENT, _GROUP, _SESSION, _ARGUMENTS = 1, 2, 3, 45  # Fields of `_stat`.


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; at once if it has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def call_this_process(name: str) -> None:
    """Have `ps` and `top` show a name in the place of what this process was started by.

    Of a fork that is the forkserver's command line. What does not fit is cut off; where
    the kernel does not say where that is, it stays.
    """
    with contextlib.suppress(OSError, ValueError, IndexError):
        _prctl(_PR_SET_NAME, name.encode()[:15])
        # Behind the process's name, which may hold anything: the 48th and 49th fields.
        fields = _stat(os.getpid())
        begin, end = int(fields[_ARGUMENTS]), int(fields[_ARGUMENTS + 1])
        if 0 < begin < end:
            size = end - begin
            ctypes.memmove(begin, name.encode()[: size - 1].ljust(size, b"\0"), size)


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
    return [pid for pid in _all_processes() if _number_of(_PARENT, pid) == own]


def kill_groups(leaders: Iterable[int]) -> None:
    """Kill replicas' process groups: themselves and what they have started.

    But not who cleans up behind those: it ends by itself once they are gone.
    """
    groups = {leader for leader in leaders if _has_members(leader)}
    killed: set[int] = set()
    while victims := [
        pid
        for pid in (_all_processes() if groups else [])
        if pid not in killed
        and _number_of(_GROUP, pid) in groups
        and not _cleans_up(pid)
    ]:
        _kill(victims)
        killed.update(victims)


def kill_children(*, but: set[int], patience: float = 0.0) -> None:
    """Kill and wait for all children, and for those that become ours by that.

    Only for a process that adopts orphans: nothing that a replica has started then is
    left. A replica begins a session of its own and cannot come back to this one, so
    who is in this one is somebody else's, or has another task. Process 1 of a container
    adopts also what never was a descendant of it.

    Args:
        but: Processes that are left alone, with whoever is in a session of theirs.
        patience: Seconds that those may have who clean up behind the others. After
            that they are killed as well, unless it is 0: then they are left.
    """
    deadline = time.monotonic() + patience
    while left := [
        pid
        for pid in children()
        if not {pid, _number_of(_SESSION, pid)} & but and _is_of_job(pid)
    ]:
        victims = [pid for pid in left if not _cleans_up(pid)]
        if not victims and not patience:
            return
        if not victims and time.monotonic() > deadline:
            victims = left
        _kill(victims)
        for pid in victims:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)
        if not victims:
            time.sleep(_LOOK_SECONDS)


def reap(*, but: set[int]) -> None:
    """Forget children that have ended, but for those whose end somebody waits for."""
    try:
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
    except ChildProcessError:
        return
    for pid in children():
        fields = _stat(pid)
        if pid in but or fields[:1] != ["Z"] or int(fields[_SESSION]) == os.getsid(0):
            continue
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _has_members(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _is_of_job(pid: int) -> bool:
    """Return whether a child comes from a replica."""
    if _number_of(_SESSION, pid) == os.getsid(0):
        return False
    return os.getpid() != 1 or environment.has_mark(_read(pid, "environ"))


def _cleans_up(pid: int) -> bool:
    """Return whether a process removes shared memory and semaphores of ended ones.

    Those are torch's, for tensors that workers share by files, and multiprocessing's,
    for workers that are spawned. Killed, they would leave all that in memory.
    """
    command = _read(pid, "cmdline")
    name = command.partition(b"\0")[0]
    return name.endswith(b"torch_shm_manager") or _TRACKER in command


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
        if len(fields) > 21 and (leader := int(fields[_GROUP])) in usage:
            seconds, memory = usage[leader]
            seconds += (int(fields[11]) + int(fields[12])) / tick
            part = _numbers_in(Path(f"/proc/{pid}/smaps_rollup")).get("Pss", 0)
            usage[leader] = seconds, memory + (part << 10)
    return usage


def memory_of(pid: int) -> int:
    """Return the bytes of memory that a process has, shared ones included."""
    return _numbers_in(Path(f"/proc/{pid}/status")).get("VmRSS", 0) << 10


def num_out_of_memory_kills(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int | None:
    """Return how many processes the kernel has killed for memory, if it says so.

    Those of this process's control group, to which its replicas belong, where they are
    counted; else all of this machine, which may be those of somebody else.
    """
    for path in (_own_cgroup(proc, cgroups) / "memory.events", proc / "vmstat"):
        if (number := _numbers_in(path).get("oom_kill")) is not None:
            return number
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


def available_memory(
    *, proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")
) -> int:
    """Return the bytes that this process's replicas can still have.

    Of this machine, or of the control groups around this process if one of these gives
    less. What only keeps files at hand is given up for them.
    """
    memory = _numbers_in(proc / "meminfo")
    available = memory.get("MemAvailable", sys.maxsize >> 10) << 10
    group = _own_cgroup(proc, cgroups)
    for each in (group, *group.parents):
        if not each.is_relative_to(cgroups):
            break
        with contextlib.suppress(OSError, ValueError):  # "max": no limit.
            left = int((each / "memory.max").read_text())
            left -= int((each / "memory.current").read_text())
            sizes = _numbers_in(each / "memory.stat")
            left += sizes.get("active_file", 0) + sizes.get("inactive_file", 0)
            available = min(available, left)
    return available


@contextlib.contextmanager
def yielding_memory() -> Iterator[None]:
    """Let the kernel kill this process before others if memory runs out."""
    path = Path("/proc/self/oom_score_adj")
    before = ""
    with contextlib.suppress(OSError):  # A sandbox without it.
        before = path.read_text()
        path.write_text("1000")

    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.write_text(before)


def _numbers_in(path: Path) -> dict[str, int]:
    """Return what the kernel's lines of a name and a number say; nothing without it."""
    with contextlib.suppress(OSError):
        text = path.read_text(errors="replace")  # A process's name may be any bytes.
        return {name: int(number) for name, number in _LINE.findall(text)}
    return {}


def _all_processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _number_of(field: int, pid: int) -> int:
    """Return the parent, group or session of a process; 0 if it is gone."""
    fields = _stat(pid)
    return int(fields[field]) if fields else 0


def _stat(pid: int) -> list[str]:
    """Return what follows the name in /proc/PID/stat: state, parent, group, session."""
    return _read(pid, "stat").decode(errors="replace").rpartition(")")[2].split()


def _read(pid: int, name: str) -> bytes:
    """Return what /proc/PID has under a name; nothing if the process is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


def _prctl(option: int, value: int | bytes) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    given = value if isinstance(value, bytes) else ctypes.c_ulong(value)
    if libc.prctl(option, given, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl({option}): {os.strerror(code)}")
