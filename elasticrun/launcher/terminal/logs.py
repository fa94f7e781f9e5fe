"""`elasticrun logs`: shows the logs of a generation, once or as they grow."""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from elasticrun.errors import NO_JOB
from elasticrun.launcher.talk.client import JobError
from elasticrun.launcher.terminal.log_files import Line, LogReader, find_logs
from elasticrun.launcher.terminal.output import marked

_FOLLOW_SECONDS = 0.2
_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Choice:
    """Which lines to show.

    Attributes:
        generation: Of this one only; None for the newest, or for all since a time.
        rank: Of this one only.
        tail: At most so many of each rank, the last ones.
        since: Those printed since then, in seconds since 1970.
        is_errors: Whether only those that went to stderr.
    """

    generation: int | None = None
    rank: int | None = None
    tail: int | None = None
    since: float = 0.0
    is_errors: bool = False

    def begins_with(self, numbers: Iterable[int]) -> int:
        """Return the first generation to show, of those that there are."""
        if self.generation is not None:
            return self.generation
        return 0 if self.since else max(numbers, default=0)

    def of(self, lines: Iterable[Line]) -> Iterable[Line]:
        """Return those of the lines that are chosen."""
        chosen = (
            line
            for line in lines
            if line.second >= int(self.since) and line.is_error >= self.is_errors
        )
        return chosen if self.tail is None else deque(chosen, self.tail)


def parse_since(text: str) -> float:
    """Return when that was: "90", "10m", "2h", "1d" ago, or a time as ISO 8601 has it.

    Raises:
        ValueError: It is none.
    """
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text):
        return time.time() - float(match[1]) * _SECONDS[match[2]]
    if re.fullmatch(r"\d\d:\d\d(:\d\d)?", text):
        text = f"{datetime.now():%Y-%m-%d}T{text}"
    return datetime.fromisoformat(text).timestamp()


def show_logs(log_dir: Path, choice: Choice, *, write: Callable[[str], None]) -> None:
    """Write the chosen lines, rank after rank.

    Raises:
        JobError: There are none.
    """
    logs = find_logs(log_dir)
    first = choice.begins_with(logs)
    chosen = [
        (rank, path)
        for number, ranks in logs.items()
        if number == first or (number > first and choice.generation is None)
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
            write(marked(rank, line.text) + "\n")
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
    later = Choice(since=choice.since, is_errors=choice.is_errors)
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
                    which = later if path in readers else choice
                    if path not in readers:
                        readers[path] = LogReader(path)
                        stack.callback(readers[path].close)
                    for line in which.of(readers[path].read()):
                        write(marked(rank, line.text) + "\n")
            if is_last:
                return
            time.sleep(_FOLLOW_SECONDS)
