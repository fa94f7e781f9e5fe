"""Lives of a job, each killed by strace at one of its system calls; run as a module.

    python -m tests.crash.victims DIRECTORY

DIRECTORY/old is copied for each life. Prints the name and number of each system call
and how its life ended. Every life is forked from this process, which has one thread, so
that nothing has to be imported again; strace is told of it before it begins.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.crash.test_store_crashes import live

_CALL = re.compile(r"^(?:\d+ +)?(\w+)\(", re.MULTILINE)


@contextmanager
def waiting_life(directory: Path) -> Iterator[tuple[int, int]]:
    """Fork a life that waits to be let go; yield its process and its leash's end."""
    waits, leash = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(leash)
        os.read(waits, 1)
        live(directory)
        os._exit(0)
    os.close(waits)
    try:
        yield process, leash
    finally:
        os.close(leash)


def trace(directory: Path, *options: str) -> int:
    """Let one life run under strace with these options; return its exit code."""
    with (
        waiting_life(directory) as (process, leash),
        subprocess.Popen(
            ["strace", "-p", str(process), *options], stderr=subprocess.PIPE, text=True
        ) as strace,
    ):
        assert strace.stderr is not None
        told = strace.stderr.readline()
        if "attached" not in told:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            raise SystemExit(f"cannot trace: {told}")
        os.write(leash, b"\n")
        status = os.waitpid(process, 0)[1]
        strace.stderr.read()
    return os.waitstatus_to_exitcode(status)


def main(root: Path) -> None:
    log = root / "log"
    shutil.copytree(root / "old", root / "traced")
    assert trace(root / "traced", "-o", str(log)) == 0
    calls = Counter(_CALL.findall(log.read_text()))
    for name, count in calls.items():
        for number in range(1, count + 1):
            directory = root / f"{name}-{number}"
            shutil.copytree(root / "old", directory)
            kill = f"inject={name}:signal=SIGKILL:when={number}"
            code = trace(
                directory, "-o", "/dev/null", "-e", f"trace={name}", "-e", kill
            )
            print(json.dumps([directory.name, code]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
