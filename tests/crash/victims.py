"""Lives of a job, each killed by strace at one of its system calls; run as a module.

    python -m tests.crash.victims DIRECTORY

DIRECTORY/old is copied for each life. Prints the name and number of each system call
that does more than read, and how its life ended. Every life is forked from this
process, which has one thread, so that nothing has to be imported again; strace is told
of it before it begins.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.crash.lives import live

# Those that only read, or change this process alone: a kill at one of them leaves what
# a kill at the next call of another kind leaves.
_HARMLESS = frozenset(
    (
        *("access", "fstat", "getdents64", "ioctl", "lseek", "newfstatat", "read"),
        *("brk", "madvise", "mmap", "mprotect", "munmap", "rt_sigaction", "uname"),
    )
)
_CALL = re.compile(r"^(\d*) *(\w+)\(", re.MULTILINE)


class Life:
    """A forked process that prepares itself, and then waits to be let go.

    Args:
        run: Calls what it is given when it is prepared.
    """

    def __init__(self, run: Callable[[Callable[[], None]], None]) -> None:
        waits, self._leash = os.pipe()
        self._ready, is_ready = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            os.close(self._leash)

            def wait() -> None:
                os.write(is_ready, b"\n")
                os.read(waits, 1)

            run(wait)
            os._exit(0)
        os.close(waits)
        os.close(is_ready)

    def let_go(self) -> None:
        with contextlib.suppress(BrokenPipeError):  # The kill was at this very read.
            os.write(self._leash, b"\n")

    def wait_until_ready(self) -> None:
        assert os.read(self._ready, 1), "a life ended before it began"

    def end(self) -> int:
        """Wait for its end; return its exit code."""
        status = os.waitpid(self.process, 0)[1]
        os.close(self._leash)
        os.close(self._ready)
        return os.waitstatus_to_exitcode(status)


def trace(life: Life, *options: str) -> int:
    """Let a life go under strace with these options; return its exit code."""
    life.wait_until_ready()
    with subprocess.Popen(
        ["strace", "-p", str(life.process), *options],
        stderr=subprocess.PIPE,
        text=True,
    ) as strace:
        assert strace.stderr is not None
        told = strace.stderr.readline()
        if "attached" not in told:
            os.kill(life.process, signal.SIGKILL)
            life.end()
            raise SystemExit(f"cannot trace: {told}")
        life.let_go()
        code = life.end()
        strace.stderr.read()
    return code


def count_calls(log: Path) -> Counter[str]:
    """Return how often each system call stands in what strace wrote.

    Of several threads, each of which strace counts by itself, the most.
    """
    counts: Counter[str] = Counter()
    for (_, name), count in Counter(_CALL.findall(log.read_text())).items():
        counts[name] = max(counts[name], count)
    return counts


def killing(name: str, number: int) -> list[str]:
    """Return strace's options for a kill at the call of this name and number."""
    kill = f"inject={name}:signal=SIGKILL:when={number}"
    return ["-o", "/dev/null", "-e", f"trace={name}", "-e", kill]


def alone(directory: Path) -> Life:
    """Return the life of a job of one rank: it starts, saves, removes old ones."""

    def run(wait: Callable[[], None]) -> None:
        wait()
        live(directory)

    return Life(run)


def main(root: Path) -> None:
    shutil.copytree(root / "old", root / "traced")
    assert trace(alone(root / "traced"), "-o", str(root / "log")) == 0
    for name, count in count_calls(root / "log").items():
        for number in range(1, count + 1) if name not in _HARMLESS else ():
            directory = root / f"{name}-{number}"
            shutil.copytree(root / "old", directory)
            code = trace(alone(directory), *killing(name, number))
            print(json.dumps([directory.name, code]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
