"""The command `elasticrun report [JOB | DIR]`, which writes the page as one file."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from elasticrun.checkpoint.events import Event
from elasticrun.checkpoint.manifest import version
from elasticrun.errors import STOP_CODES, USAGE
from elasticrun.launcher.control.jobs import (
    JobError,
    KnownJob,
    find_known_job,
    status_of_ended,
)

_FOLDER = Path(__file__).with_name("page")
_MOST_POINTS = 1500  # Of a line; more than a screen has room for.
_MOST_GENERATIONS = 10_000  # The newest ones; a browser passes no more arguments.
_MOST_ROWS = 200  # Of a table, the newest ones.
_CAUSES = {"start": "start", "restart": "crash", "rescaling": "rescaling"}


@dataclass
class Generation:
    """One generation.

    Attributes:
        cause: Why there is one: "start", "crash", "rescaling".
        why: The same in words, as far as it is known.
        base: Samples before it, since the job's beginning.
        points: Time and samples since the job's beginning, in their order.
        repeated: Samples that were trained before, and come again in it.
        repeated_seconds: How long they had taken.
        ending: How it ended, in words; empty if it has not.
    """

    number: int
    begin: float
    world_size: int
    cause: str
    why: str
    checkpoint: int | None
    position: str
    base: int
    end: float = 0.0
    points: list[tuple[float, int]] = field(default_factory=list)
    repeated: int = 0
    repeated_seconds: float = 0.0
    ending: str = ""

    def note(self, event: Event) -> None:
        """Take what says how far it has come."""
        done = self.base + int(event.get("samples", 0))
        if not self.points or done >= self.points[-1][1]:
            self.points.append((event["time"], done))
        self.end = max(self.end, event["time"])
        self.position = event.get("position", self.position)


class Timeline:
    """What events tell of a job.

    Attributes:
        checkpoints: All that were committed, with the samples since the beginning.
        values: Times and values of each number in `Variables`, by its name.
        start: The newest start of a launcher; empty without one.
        num_epochs: How many the job is to have, if that is known.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.generations: list[Generation] = []
        self.checkpoints: list[Event] = []
        self.crashes: list[Event] = []
        self.values: dict[str, list[tuple[float, float]]] = {}
        self.start: Event = {}
        self.last: Event = events[-1] if events else {}
        self.num_epochs: int | None = None
        self.num_finished = 0
        self.unit = "samples"
        self._cause: Event = {}
        self._samples_at: dict[int, tuple[int, float]] = {}  # By checkpoint.
        for event in events:
            take = getattr(self, f"on_{event['event']}", None)
            if take is not None:
                take(event)

    def _newest(self, event: Event) -> Generation | None:
        """Return the generation that an event is of, unless another one has begun."""
        newest = self.generations[-1] if self.generations else None
        is_of_it = newest and event.get("generation", newest.number) == newest.number
        return newest if is_of_it else None

    def on_start(self, event: Event) -> None:
        self.start = self._cause = event
        self._end("its launcher ended unexpectedly", event["time"], is_known=False)

    def on_restart(self, event: Event) -> None:
        self._cause = event

    def on_rescaling(self, event: Event) -> None:
        self._cause = event
        self._end(event["text"], event["time"])

    def on_begin(self, event: Event) -> None:
        before = self.generations[-1] if self.generations else None
        self._end("it ended unexpectedly", event["time"], is_known=False)
        number = event["checkpoint"]
        unknown = before.points[-1][1] if before and number is not None else 0
        base, saved_at = self._samples_at.get(number, (unknown, event["time"]))
        cause = self._cause or {"event": "start", "text": ""}
        made = Generation(
            number=event["generation"],
            begin=event["time"],
            end=event["time"],
            world_size=event["world_size"],
            cause=_CAUSES[cause["event"]],
            why=_why(cause, event, before),
            checkpoint=number,
            position=event["position"],
            base=base,
            points=[(event["time"], base)],
        )
        if before is not None and (number is None or number in self._samples_at):
            made.repeated = max(0, before.points[-1][1] - base)
            lost_from = saved_at if number is not None else before.begin
            if made.repeated:
                made.repeated_seconds = max(0.0, before.end - lost_from)
        self.generations.append(made)
        self._cause = {}

    def on_progress(self, event: Event) -> None:
        newest = self._newest(event)
        if newest is not None:
            newest.note(event)
        self.num_finished = event.get("epoch", 0)
        self.num_epochs = event.get("num_epochs") or self.num_epochs
        self.unit = event.get("unit", self.unit) if event.get("samples") else self.unit

    def on_leave(self, event: Event) -> None:
        self.on_progress({**event, "unit": self.unit})
        code = event.get("code")
        newest = self._newest(event)
        if newest is not None and code in STOP_CODES and not newest.ending:
            newest.ending = f"stopped with exit code {code}"

    def on_checkpoint(self, event: Event) -> None:
        newest = self._newest(event)
        if newest is None:
            return
        newest.note(event)
        done = newest.base + event["samples"]
        self._samples_at[event["checkpoint"]] = done, event["time"]
        self.checkpoints.append({**event, "done": done})
        for name, value in event["values"].items():
            self.values.setdefault(name, []).append((event["time"], value))

    def on_crash(self, event: Event) -> None:
        newest = self._newest(event)
        if newest is not None:
            newest.note(event)
            newest.ending = f"crashed: {event['error'].partition(chr(10))[0]}"
        self.crashes.append(event)

    def on_end(self, event: Event) -> None:
        self._end(event["text"], event["time"])

    def _end(self, how: str, when: float, *, is_known: bool = True) -> None:
        newest = self.generations[-1] if self.generations else None
        if newest is not None and not newest.ending:
            newest.ending = how
            newest.end = when if is_known else newest.end

    def describe(self) -> dict[str, Any]:
        """Return all of it as plain values, thinned out to what a page can show."""
        newest = self.generations[-_MOST_GENERATIONS:]
        generations = [
            {**asdict(each), "points": _thinned(each.points, len(newest))}
            for each in newest
        ]
        return {
            "unit": self.unit,
            "num_epochs": self.num_epochs,
            "num_finished": self.num_finished,
            "start": self.start,
            "last": self.last,
            "generations": generations,
            "speeds": [_speeds(each["points"]) for each in generations],
            "checkpoints": _thinned(self.checkpoints, 1),
            "num_checkpoints": len(self.checkpoints),
            "saving": sum(each["paused"] for each in self.checkpoints),
            "crashes": self.crashes[-_MOST_ROWS:],
            "num_crashes": len(self.crashes),
            "values": {name: _thinned(each, 1) for name, each in self.values.items()},
            "training": sum(each.end - each.begin for each in self.generations),
            "repeated": sum(each.repeated for each in self.generations),
            "repeated_seconds": sum(each.repeated_seconds for each in self.generations),
            "done": self.generations[-1].points[-1][1] if self.generations else 0,
        }


def _why(cause: Event, event: Event, before: Generation | None) -> str:
    if cause["event"] == "restart":
        return str(cause.get("cause", "a crash"))
    if cause["event"] == "rescaling":
        return f"from {before.world_size if before else '?'} to {event['world_size']}"
    return "the beginning" if event["checkpoint"] is None else "started again"


def _thinned(points: Sequence[Any], num_lines: int) -> list[Any]:
    """Return evenly chosen points, with the first and the last one."""
    most = max(2, _MOST_POINTS // max(1, num_lines))
    if len(points) <= most:
        return list(points)
    step = (len(points) - 1) / (most - 1)
    return [points[round(number * step)] for number in range(most)]


def _speeds(points: Iterable[Sequence[float]]) -> list[tuple[float, float]]:
    """Return times, and how many samples a second passed up to each of them.

    Points that are close together, as at a checkpoint, make one.
    """
    points = list(points)
    least = max(0.25, (points[-1][0] - points[0][0]) / _MOST_POINTS)
    kept = [points[0]]
    for point in points[1:]:
        if point[0] - kept[-1][0] >= least:
            kept.append(point)
    speeds = [
        (when, (done - before) / (when - since))
        for (since, before), (when, done) in pairwise(kept)
    ]
    return [(kept[0][0], speeds[0][1]), *speeds] if speeds else []


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `elasticrun report` takes."""
    parser.add_argument("job", nargs="?", metavar="JOB|DIR",
        help="a job's name, or its checkpoint directory; needed if there are "
        "several")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", default="report.html",
        help="where to write the page; default: report.html")  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    try:
        page = page_of(find_known_job(options.job))
    except JobError as error:
        sys.stderr.write(f"elasticrun: {error}\n")
        return error.exit_code
    try:
        Path(options.out).write_text(page, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"elasticrun: {options.out}: {error.strerror}\n")
        return USAGE
    sys.stdout.write(f"{options.out}\n")
    return 0


def page_of(job: KnownJob) -> str:
    """Return the page of a job, which loads nothing from elsewhere."""
    values = {
        **Timeline(job.events).describe(),
        "job": job.name,
        "directory": str(job.directory),
        "state": _state(job),
        "time": time.time(),
        "version": version(),
    }
    parts = {
        "data": json.dumps(values).replace("<", "\\u003c"),  # No tag ends there.
        "uPlot.min.css": _read("uPlot.min.css"),
        "uPlot.iife.min.js": _read("uPlot.iife.min.js"),
    }
    return re.sub("@@(.+?)@@", lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _state(job: KnownJob) -> dict[str, Any]:
    """Return how the job is or has ended, in words and as the page colours it."""
    status = status_of_ended(job)
    moods = {0: "good", **dict.fromkeys(STOP_CODES, "still")}
    is_running = status["state"] == "running"
    mood = "busy" if is_running else moods.get(status["code"], "bad")
    text = "running" if is_running else status["text"]
    if mood == "good":
        text = "finished"  # It says after how long, which is the last start's time.
    return {"text": text, "mood": mood}
