"""Finds jobs by name or directory; those that have ended by their directory."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from elasticrun.checkpoint.events import (
    FILE_NAME,
    Event,
    local_directory,
    name_in,
    read_events,
)
from elasticrun.checkpoint.inspection.listing import (
    InspectionError,
    choose_storage,
    owner_of,
)
from elasticrun.checkpoint.storage.place import Place, RemotePath, parse_place
from elasticrun.errors import NO_JOB, CheckpointError
from elasticrun.launcher import environment
from elasticrun.launcher.talk.client import (
    JobError,
    NoSuchJobError,
    SilentJobError,
    find_job,
    places_meant,
)


@dataclass(frozen=True)
class KnownJob:
    """A job of which there is a directory.

    Attributes:
        status: What its launcher says of it, if that runs here.
    """

    directory: Place
    status: dict[str, Any] | None = None

    @cached_property
    def events(self) -> list[Event]:
        """Its events; a script with a directory of its own has some in either."""
        folders = [local_directory(self.directory)]
        if self.status is not None:
            folders.append(Path(self.status["local_dir"]))
        found = [
            event for each in dict.fromkeys(folders) for event in read_events(each)
        ]
        return sorted(found, key=lambda event: event["time"])

    @property
    def name(self) -> str:
        if self.status is not None:
            return str(self.status["job"])
        return name_in(self.events) or self.directory.name

    @property
    def is_running(self) -> bool:
        """Whether it is known to run, on this machine or on another one."""
        if self.status is not None:
            return True
        try:
            return (
                owner_of(choose_storage(str(self.directory), configured=None))
                is not None
            )
        except (InspectionError, CheckpointError, OSError):
            return False


def status_of_ended(job: KnownJob) -> dict[str, Any]:
    """Return how a job has ended, as plain values; or that it runs elsewhere."""
    events = job.events
    if not events:
        raise JobError(
            f"{job.directory} has no {FILE_NAME}: no job has begun there with this "
            "elasticrun",
            exit_code=NO_JOB,
        )
    newest = {event["event"]: event for event in events}
    last, start = events[-1], newest.get("start", {})
    is_running = last["event"] != "end" and job.is_running
    text, code = "ended unexpectedly: it was killed, or its machine is gone", None
    if is_running:
        text = "running, without a launcher on this machine"
    elif last["event"] == "end":
        text, code = last["text"], last["code"]
    elif last["event"] == "leave" and not start:
        text, code = "ended", last["code"] or 0
    placed = [event["position"] for event in events if "position" in event]
    return {
        "job": job.name,
        "state": "running" if is_running else "ended",
        "text": text,
        "code": code,
        "time": last["time"],
        "position": placed[-1] if placed else "not in training",
        "checkpoint": newest.get("checkpoint", {}).get("checkpoint"),
        "causes": [each["text"] for each in events if each["event"] == "crash"][-10:],
        "checkpoint_dir": str(job.directory),
        "log_dir": start.get("log_dir"),
    }


def find_known_job(word: str | None) -> KnownJob:
    """Return the job of this name, number, directory or URL; without, that of here.

    One that has ended is found by its directory, or where a script of that name has its
    checkpoints by default.
    """
    try:
        with find_job(word) as job:
            return KnownJob(parse_place(job.status["checkpoint_dir"]), job.status)
    except JobError as error:
        is_elsewhere = word is None and not isinstance(error, SilentJobError)
        if not (isinstance(error, NoSuchJobError) or is_elsewhere):
            raise
        found = error
    place = _place(word)
    if place is not None:
        return KnownJob(place)
    if word is not None:
        raise JobError(
            f"no job {word!r} of this user is running, and no directory is called so. "
            "Give the checkpoint directory of a job that has ended.",
            exit_code=NO_JOB,
        )
    configured = environment.variables().get("ELASTICRUN_CHECKPOINT_DIR")
    try:
        return KnownJob(choose_storage(None, configured=configured).place)
    except (InspectionError, CheckpointError, ValueError) as error:
        if isinstance(found, NoSuchJobError):
            found = JobError(str(error), exit_code=NO_JOB)
        raise found from error


def _place(word: str | None) -> Place | None:
    """Return the directory or URL that a word means, None if it is none."""
    if word is None:
        return None
    for place in places_meant(word):
        if isinstance(place, RemotePath) or os.path.isdir(place):
            return place
    return None
