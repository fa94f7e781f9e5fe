"""The launcher's one reader and writer of `os.environ`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

Changes = Mapping[str, str | None]

# With more than one thread in it, a process must not be forked.
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def variables() -> dict[str, str]:
    """Return a copy of this process's variables."""
    return dict(os.environ)


def replace_variables(new: dict[str, str]) -> None:
    """Let this process have these variables and no others."""
    os.environ.clear()
    os.environ.update(new)


def changes(before: Mapping[str, str]) -> Changes:
    """Return this process's variables that were others before; None if removed."""
    return {
        name: os.environ.get(name)
        for name in before.keys() | os.environ.keys()
        if os.environ.get(name) != before.get(name)
    }


def apply_changes(changed: Changes, *, but: Collection[str]) -> None:
    """Change this process's variables, all but some."""
    for name, value in changed.items():
        if name in but:
            continue
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def noticing(names: Collection[str]) -> Iterator[set[str]]:
    """Note which of some variables this process's Python code looks at meanwhile."""
    used: set[str] = set()
    encode = os.environ.encodekey  # Every access by name goes through it.

    def note_and_encode(name: str) -> Any:
        if name in names:
            used.add(name)
        return encode(name)

    os.environ.encodekey = note_and_encode
    try:
        yield used
    finally:
        os.environ.encodekey = encode


def of_forkserver() -> dict[str, str]:
    """Return the variables under which importing torch starts no thread."""
    return {**os.environ, **dict.fromkeys(_ONE_THREAD, "1")}


def of_rendezvous() -> dict[str, str]:
    """Return the variables of the process that meets other nodes."""
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # The launcher says what matters.
        **of_forkserver(),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # Each generation has its own.
    }


def runtime_directory() -> Path:
    """Return where this process is to keep its control socket; it need not exist."""
    return runtime_directories()[0]


def runtime_directories() -> list[Path]:
    """Return where this user's control sockets can be, its own place first.

    A launcher may have been started with `XDG_RUNTIME_DIR` and be asked without, as
    from a cron job, or the other way round.
    """
    temporary = Path(tempfile.gettempdir()) / f"elasticrun-{os.getuid()}"
    given = os.environ.get("XDG_RUNTIME_DIR")
    if given and os.path.isdir(given):
        return [Path(given) / "elasticrun", temporary]
    usual = Path(f"/run/user/{os.getuid()}")
    return [temporary, usual / "elasticrun"]


def num_gpus() -> int:
    """Return how many GPUs a replica would see, without asking torch."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        names = [name.strip() for name in visible.split(",")]
        return len([name for name in names if name and name != "-1"])
    try:
        return len(
            [
                n
                for n in os.listdir("/dev")
                if n.removeprefix("nvidia").isdigit() and n.startswith("nvidia")
            ]
        )
    except OSError:
        return 0


def num_cores() -> int:
    """Return how many cores this process may use, by affinity and by cgroup."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # "max": no limit.
        return cores
