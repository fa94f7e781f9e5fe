"""The only module of the launcher that reads and writes `os.environ`."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from elasticrun.replicas.gpus import count_gpus

Changes = Mapping[str, str | None]

# With more than one thread in it, a process must not be forked.
_IN_ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"
)
_MARK = "ELASTICRUN_LAUNCHER"
_HASH_SEED = "PYTHONHASHSEED"
_TOKEN = secrets.token_hex(8)
_LOOKS_OF_A_COPY = 3


def variables() -> dict[str, str]:
    """Return a copy of this process's variables."""
    return dict(os.environ)


def replace_variables_of_forkserver(new: Mapping[str, str]) -> None:
    """Let a replica have these variables, and those that importing torch has set."""
    apply_changes(dict.fromkeys(_IN_ONE_THREAD))
    os.environ.update(new)


def apply_changes(changed: Changes, *, but: Collection[str] = ()) -> None:
    """Change this process's variables, all but some."""
    for name, value in changed.items():
        if name in but:
            continue
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextlib.contextmanager
def noticing_reads(
    names: Collection[str], call: Callable[[str], object]
) -> Iterator[None]:
    """Call a function before this process's Python code reads one of some variables.

    Who copies all variables, as for a process to be started, asks for none of them. A
    copy is known by looking at one after the other in their order, in one thread.
    """
    numbers = {name: number for number, name in enumerate(os.environ)}
    encode = os.environ.encodekey  # Every access by name goes through it.
    # For each thread the number of the last one, and how many came in a row.
    looks: dict[int, tuple[int, int]] = {}

    def call_and_encode(name: str) -> Any:
        thread = threading.get_ident()
        number = numbers.get(name, -1)
        last, in_a_row = looks.get(thread, (-1, 0))
        in_a_row = in_a_row + 1 if number == last + 1 else 0
        looks[thread] = number, in_a_row
        if name in names and in_a_row < _LOOKS_OF_A_COPY:
            call(name)
        return encode(name)

    os.environ.encodekey = call_and_encode
    try:
        yield
    finally:
        os.environ.encodekey = encode


def notice_writes(call: Callable[[str, str | None], object]) -> None:
    """Call a function when this process's Python code sets or removes a variable.

    It is called with the name and the value, None for a variable that is removed.
    """

    def noticing(change: Callable[..., None]) -> Callable[..., None]:
        def change_and_call(name: Any, *value: Any) -> None:
            change(name, *value)
            call(os.fsdecode(name), os.fsdecode(value[0]) if value else None)

        return change_and_call

    os.putenv, os.unsetenv = noticing(os.putenv), noticing(os.unsetenv)


def mark() -> dict[str, str]:
    """Return the variable by which this launcher knows what its replicas have started.

    A launcher may be started by a replica of another one, which still is to know all.
    """
    outer = os.environ.get(_MARK)
    return {_MARK: f"{outer}:{_TOKEN}" if outer else _TOKEN}


def has_mark(variables_of_process: bytes) -> bool:
    """Return whether a process comes from a replica of this launcher."""
    return _TOKEN.encode() in variables_of_process


def hash_seed() -> dict[str, str]:
    """Return what gives sets of texts one order, in all replicas and after restarts."""
    return {} if os.environ.get(_HASH_SEED) else {_HASH_SEED: "0"}


def of_forkserver(*, is_bare: bool) -> dict[str, str]:
    """Return the variables under which importing torch starts no thread."""
    own = {**mark(), **hash_seed(), **({} if is_bare else _IN_ONE_THREAD)}
    return {**os.environ, **own}


def of_rendezvous() -> dict[str, str]:
    """Return the variables of the process that meets other nodes."""
    return {
        "TORCH_CPP_LOG_LEVEL": "ERROR",  # The launcher says what matters.
        **os.environ,
        **_IN_ONE_THREAD,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # Each generation has its own.
    }


def has_colours() -> bool:
    """Return whether the user has nothing against colours (https://no-color.org)."""
    return not os.environ.get("NO_COLOR")


def socket_directory() -> Path:
    """Return where this user's launchers listen.

    It is a temporary one: cleaners of those spare sockets that somebody listens at, and
    no logout removes it, as it does XDG_RUNTIME_DIR while the job runs on.
    """
    return Path(os.environ.get("TMPDIR") or "/tmp") / f"elasticrun-{os.getuid()}"


def num_gpus() -> int:
    """Return how many GPUs a replica of this node would see."""
    return count_gpus(os.environ)


def num_cores() -> int:
    """Return how many cores this process may use, by affinity and by cgroup."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # "max": no limit.
        return cores
