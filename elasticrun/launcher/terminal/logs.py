"""Showing logs: a generation's once, or as they grow."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from elasticrun.errors import NO_JOB
from elasticrun.launcher.talk.client import JobError
from elasticrun.launcher.terminal.output import find_logs, marked

_FOLLOW_SECONDS = 0.2


def show_logs(
    log_dir: Path,
    *,
    generation: int | None,
    rank: int | None,
    write: Callable[[str], None],
) -> None:
    """Write one generation's logs, rank after rank.

    Raises:
        JobError: There are none.
    """
    logs = find_logs(log_dir)
    chosen = logs.get(max(logs, default=0) if generation is None else generation, {})
    paths = {r: path for r, path in chosen.items() if rank in (None, r)}
    if not paths:
        known = ", ".join(
            f"{g} (ranks {', '.join(map(str, each))})" for g, each in logs.items()
        )
        raise JobError(
            f"{log_dir} has no such log; it has generations: {known or 'none'}",
            exit_code=NO_JOB,
        )
    for each, path in paths.items():
        with open(path, "rb") as file:
            for line in file:
                write(marked(each, line) + "\n")


def follow_logs(
    log_dir: Path,
    *,
    generation: int | None,
    rank: int | None,
    has_ended: Callable[[], bool],
    write: Callable[[str], None],
) -> None:
    """Write logs as they grow, of every generation to come, until the job ends."""
    read_until: dict[Path, int] = {}
    first = max(find_logs(log_dir), default=0) if generation is None else generation
    while True:
        is_last = has_ended()
        for number, ranks in find_logs(log_dir).items():
            if number < first or (generation is not None and number != generation):
                continue
            for each, path in ranks.items():
                if rank in (None, each):
                    read_until[path] = _write_new(
                        path, read_until.get(path, 0), each, write
                    )
        if is_last:
            return
        time.sleep(_FOLLOW_SECONDS)


def _write_new(path: Path, start: int, rank: int, write: Callable[[str], None]) -> int:
    """Write the whole lines from a byte on; return the byte after the last one."""
    with open(path, "rb") as file:
        file.seek(start)
        for line in file:
            if not line.endswith(b"\n"):
                break
            start += len(line)
            write(marked(rank, line) + "\n")
    return start
