"""The job's events: one file of JSON lines, beside its checkpoints.

Launchers and replicas append to it, each line by one write. A reader skips lines that
are incomplete: after a kill, on a full disk, or when two machines wrote at once.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import read_end
from elasticrun.checkpoint.storage.place import Place
from elasticrun.logger import Logger

logger = Logger(__name__)

Event = dict[str, Any]

FILE_NAME = "events.jsonl"
OLD_NAME = "events.old.jsonl"
MOST_BYTES = 8 << 20  # Of each of the two files.
_MOST_TEXT = 2000  # Characters of a text in an event: the first lines of an error.


def local_directory(place: Place) -> Path:
    """Return where events, logs and the launcher's lock are: there, unless it is a URL.

    An object store can be locked by no process, and nothing can be appended there.
    """
    if isinstance(place, Path):
        return place
    digest = hashlib.sha256(str(place).encode()).hexdigest()[:8]
    return Path(os.path.abspath(f"{place.name}-launcher-{digest}"))


class EventLog:
    """Appends events, and does without where that fails: training matters more."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / FILE_NAME
        self._has_failed = False

    def write(self, kind: str, *, may_rotate: bool = False, **values: Any) -> Event:
        """Append an event with the time; return it.

        Args:
            may_rotate: Whether to begin a new file when this one is large, in the place
                of the one before. One process at a time may, or one would move what
                another has just begun.
        """
        event = {"time": round(time.time(), 3), "event": kind}
        event |= {
            key: value[:_MOST_TEXT] if isinstance(value, str) else value
            for key, value in values.items()
        }
        line = json.dumps(event).encode() + b"\n"
        try:
            if may_rotate and (durable.find_size(self._path) or 0) > MOST_BYTES:
                durable.move_over(self._path, self._path.with_name(OLD_NAME))
            durable.append_line(self._path, line)
        except (OSError, ValueError) as error:
            if not self._has_failed:
                self._has_failed = True
                logger.info("%s does not get all events: %s", self._path, error)
        return event


def read_events(directory: Path) -> list[Event]:
    """Return the events of a job in the order of their times; none without a file."""
    found = [
        event
        for name in (OLD_NAME, FILE_NAME)
        for event in _events_in(directory / name)
    ]
    return sorted(found, key=lambda event: event["time"])


def name_in(events: list[Event]) -> str | None:
    """Return what the job was called last, None if none of them says it."""
    return next((event["job"] for event in events[::-1] if "job" in event), None)


def _events_in(path: Path) -> Iterator[Event]:
    try:
        lines = read_end(path, 2 * MOST_BYTES).split(b"\n")
    except (OSError, ValueError):
        return
    for line in lines:
        if len(line) <= _MOST_LINE and (event := _checked(line)) is not None:
            yield event


def _checked(line: bytes) -> Event | None:
    """Return an event with the fields that are known; None for what is none."""
    try:
        found = json.loads(line)
        event = {key: found[key] for key in found.keys() & _FIELDS.keys()}
        kind = event["event"]
        if isinstance(event.get("values"), dict):  # What diverges has others.
            event["values"] = {
                key: value
                for key, value in event["values"].items()
                if _is_number(value)
            }
        is_event = all(_FIELDS[key](value) for key, value in event.items())
        if not is_event or not event.keys() >= {"time", *_NEEDED.get(kind, ())}:
            return None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    return {
        # Half a surrogate pair can be neither printed nor written.
        key: value.encode("utf-8", "replace").decode()
        if isinstance(value, str)
        else value
        for key, value in event.items()
    }


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and "\0" not in value


def _is_number(value: Any) -> bool:
    is_one = isinstance(value, int | float) and not isinstance(value, bool)
    return is_one and abs(value) <= _LARGEST  # So no NaN either.


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and _is_number(value)


_MOST_LINE = 1 << 20
_LARGEST = 1e18
_LATEST = 1e11  # In the year 5138.
_CHECKS: dict[Callable[[Any], bool], str] = {
    lambda value: _is_number(value) and 0 <= value <= _LATEST: "time",
    _is_text: "event text job position unit error cause program host log_dir trace "
    "checkpoint_dir rescue",
    _is_count: "generation world_size samples epoch rank pid replicas bytes target",
    lambda value: value is None or _is_count(value): "checkpoint code num_epochs",
    _is_number: "paused seconds delay",
    lambda value: isinstance(value, dict): "values",
}
_FIELDS = {name: check for check, names in _CHECKS.items() for name in names.split()}
_NEEDED = {
    "begin": ("generation", "world_size", "checkpoint", "position"),
    "checkpoint": ("checkpoint", "samples", "values", "paused", "seconds"),
    "crash": ("text", "error"),
    "rescaling": ("text",),
    "leave": ("code",),
    "end": ("text", "code"),
}
