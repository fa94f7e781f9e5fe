"""`elasticrun logs`: shows the logs of a generation, once or as they grow."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from elasticrun.errors import NO_JOB
from elasticrun.launcher.talk.client import JobError
from elasticrun.launcher.terminal.log_files import LogReader, find_logs
from elasticrun.launcher.terminal.output import marked

_FOLLOW_SECONDS = 0.2


@dataclass(frozen=True)
class Choice:
    """Which lines to show."""

    generation: int | None = None
    rank: int | None = None
    tail: int | None = None

    def begins_with(self, numbers: Iterable[int]) -> int:
        """Return the first generation to show, of those that there are."""
        return max(numbers, default=0) if self.generation is None else self.generation

    def of(self, lines: Iterable[bytes]) -> Iterable[bytes]:
        """Return those of a rank's lines that are chosen."""
        return lines if self.tail is None else deque(lines, self.tail)


def show_logs(log_dir: Path, choice: Choice, *, write: Callable[[str], None]) -> None:
    """Write the chosen lines, rank after rank."""
    logs = find_logs(log_dir)
    first = choice.begins_with(logs)
    chosen = [
        (rank, path)
        for number, ranks in logs.items()
        if number == first
        for rank, path in ranks.items()
        if choice.rank in (None, rank)
    ]
    if not chosen:
        known = ", ".join(
            f"{g} (ranks {', '.join(map(str, each))})" for g, each in logs.items()
        )
        raise JobError(
            f"{log_dir} has no such log; it has generations: {known or 'none'}",
            exit_code=NO_JOB,
        )
    for rank, path in chosen:
        reader = LogReader(path)
        for line in choice.of(reader.read()):
            write(marked(rank, line) + "\n")
        reader.close()


def follow_logs(
    log_dir: Path,
    choice: Choice,
    *,
    has_ended: Callable[[], bool],
    write: Callable[[str], None],
) -> None:
    """Write logs as they grow, of every generation to come, until the job ends."""
    first = choice.begins_with(find_logs(log_dir))
    readers: dict[Path, LogReader] = {}
    with ExitStack() as stack:
        while True:
            is_last = has_ended()
            for number, ranks in find_logs(log_dir).items():
                if number < first or choice.generation not in (None, number):
                    continue
                for rank, path in ranks.items():
                    if choice.rank not in (None, rank):
                        continue
                    which = Choice() if path in readers else choice
                    if path not in readers:
                        readers[path] = LogReader(path)
                        stack.callback(readers[path].close)
                    for line in which.of(readers[path].read()):
                        write(marked(rank, line) + "\n")
            if is_last:
                return
            time.sleep(_FOLLOW_SECONDS)
