"""A user's jobs: those that run, which can be told something, and those that ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator
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
from elasticrun.errors import NO_JOB, REFUSED, CheckpointError, ElasticRunError
from elasticrun.launcher import environment
from elasticrun.launcher.control import sockets
from elasticrun.launcher.directory import find_locked_by
from elasticrun.replicas.wire import Channel, Message, WireError

_ANSWER_SECONDS = 5.0


class JobError(ElasticRunError):
    """A job is not there, not the only one, or does not do what was asked."""

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class NoSuchJobError(JobError):
    """No job is running that could be meant."""


class SilentJobError(JobError):
    """A launcher listens but says nothing, not even the job's name.

    What is known of it stands beside the lock that it holds.

    Attributes:
        pid: The launcher's process.
        title: What to call it.
        is_known: Whether its directory is; not if it runs in another container.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.title = f"the job ({pid})"
        self._name, self._places = "", list[str]()
        if sockets.is_of_this_container(pid):
            with contextlib.suppress(OSError):  # It has ended.
                self._places = [os.readlink(f"/proc/{pid}/cwd")]
                self.title += f" that was started in {self._places[0]}"
        directory = find_locked_by(pid) if self._places else None
        self.is_known = directory is not None
        if directory is not None:
            self._name = name_in(read_events(directory)) or directory.name
            self._places += [str(directory), str(directory.parent)]
            self.title = f"{self._name} ({pid}) in {directory}"
        super().__init__(
            f"{self.title} does not answer (suspended, or its output is blocked)",
            exit_code=REFUSED,
        )

    def is_called(self, name: str) -> bool:
        """Return whether it has this name, process number or directory."""
        meant = [str(local_directory(place)) for place in places_meant(name)]
        return name in (self._name, str(self.pid)) or (
            self.is_known and self._places[1] in map(os.path.realpath, meant)
        )

    @property
    def is_here(self) -> bool:
        """Whether it was started in this directory, or keeps its checkpoints here."""
        return os.getcwd() in self._places

    def stop(self, *, is_now: bool = False) -> Iterator[str]:
        """Send the launcher what it reads once it runs again; yield what happens."""
        if not sockets.is_of_this_container(self.pid):
            raise self
        # Different signals, since two alike may come as one.
        numbers = [signal.SIGTERM] + [signal.SIGINT] * is_now
        try:
            process = os.pidfd_open(self.pid)
            for number in (*numbers, signal.SIGCONT):
                signal.pidfd_send_signal(process, number)
        except ProcessLookupError as error:
            raise JobError("the launcher has ended", exit_code=REFUSED) from error
        does = "ends at once" if is_now else "saves and ends"
        yield (
            "it does not answer, so it was sent SIGTERM, and SIGCONT if it was "
            f"suspended: it {does} as soon as it runs. If it never does, `kill -9 "
            f"{self.pid}` ends it, without a save"
        )
        select.select([process], [], [])
        os.close(process)
        yield "ended"


class JobConnection:
    """A connection to a job's launcher."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self._channel = Channel(connection)
        self.status: dict[str, Any] = self._ask({"type": "status"})

    def __enter__(self) -> JobConnection:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        self._channel.close()

    @property
    def title(self) -> str:
        return f"{self.status['job']} ({self.pid}) in {self.status['checkpoint_dir']}"

    def is_called(self, name: str) -> bool:
        if name in (self.status["job"], str(self.pid)):
            return True
        checkpoints = os.path.realpath(self.status["checkpoint_dir"])
        return checkpoints in map(os.path.realpath, places_meant(name))

    @property
    def is_here(self) -> bool:
        checkpoints = os.path.realpath(self.status["checkpoint_dir"])
        places = self.status["started_in"], checkpoints, os.path.dirname(checkpoints)
        return os.getcwd() in places

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has hung up, as it does when it ends."""
        self._channel.drain()
        return not self._channel.is_open

    def scale(self, size: int, *, is_forced: bool = False) -> Iterator[str]:
        """Change the number of replicas; yield what happens, until they train.

        Args:
            is_forced: Even if there are too few samples, GPUs or cores for them.
        """
        request = {"type": "scale", "replicas": size, "is_forced": is_forced}
        answer = self._ask(request)
        yield answer["text"]
        self._channel.connection.settimeout(None)
        while not answer.get("is_done"):
            answer = self._take("the job ended before it was rescaled")
            yield answer["text"]

    def stop(self, *, is_now: bool = False) -> Iterator[str]:
        """Save and end; yield what happens, until the launcher has ended.

        Args:
            is_now: Do not save.
        """
        return self._end("stop", is_now=is_now)

    def leave(self) -> Iterator[str]:
        """Save and end on this node, as `stop` does on all."""
        return self._end("leave")

    def _end(self, request: str, *, is_now: bool = False) -> Iterator[str]:
        yield self._ask({"type": request, "is_now": is_now})["text"]
        self._channel.connection.settimeout(None)
        problem = ""
        while (message := self._channel.receive_one()) is not None:
            problem = str(message.get("error", ""))
        if problem and not is_now:
            raise JobError(problem, exit_code=REFUSED)
        yield "ended"

    def _ask(self, request: Message) -> Message:
        self._channel.send(request)
        readable, _, _ = select.select([self._channel], [], [], _ANSWER_SECONDS)
        if not readable:
            raise SilentJobError(self.pid)
        return self._take("the job ended before its launcher answered")

    def _take(self, or_else: str) -> Message:
        try:
            answer = self._channel.receive_one()
        except WireError as error:
            raise JobError(str(error), exit_code=REFUSED) from error
        if answer is None:
            raise JobError(or_else, exit_code=REFUSED)
        if "error" in answer:
            raise JobError(str(answer["error"]), exit_code=REFUSED)
        return answer


def find_jobs() -> tuple[list[JobConnection], list[SilentJobError]]:
    """Return every running job of this user, and those that do not answer."""
    found: list[JobConnection] = []
    silent: list[SilentJobError] = []
    try:
        for pid, connection in sockets.connections():
            if connection is None:
                silent.append(SilentJobError(pid))
                continue
            try:
                found.append(JobConnection(pid, connection))
            except JobError as error:
                connection.close()
                if isinstance(error, SilentJobError):  # Else it ended just now.
                    silent.append(error)
    except sockets.SocketDirectoryError as error:
        raise JobError(str(error), exit_code=REFUSED) from error
    return found, silent


def find_job(name: str | None) -> JobConnection:
    """Return the job of this name, process number or directory.

    Without any it is that of the working directory: a name that is left out must not
    act on a job somewhere else.
    """
    jobs, silent = find_jobs()
    all_: list[JobConnection | SilentJobError] = [*jobs, *silent]
    found = [job for job in all_ if (job.is_called(name) if name else job.is_here)]
    for job in jobs:
        if found != [job]:
            job.close()
    if len(found) == 1:
        if isinstance(found[0], SilentJobError):
            raise found[0]
        return found[0]
    if found or (all_ and name is None):
        what = "no job of this directory is running, but"
        if found:
            what = "more than one such job is running:"
        listed = "; ".join(job.title for job in found or all_)
        raise JobError(
            f"{what} {listed}. Give the name, the process number or the directory of "
            "the one that is meant.",
            exit_code=NO_JOB,
        )
    what = "job" if name is None else f"job {name!r}"
    unknown = [each for each in silent if not each.is_known]
    text = "".join(f"; {each}: name it by {each.pid}" for each in unknown)
    raise NoSuchJobError(f"no {what} of this user is running{text}", exit_code=NO_JOB)


def places_meant(word: str) -> list[Place]:
    """Return the directories or URLs that a word for a job may mean."""
    texts = word, f"{word.removesuffix('.py')}-checkpoints"
    with contextlib.suppress(ValueError):
        return [parse_place(text) for text in texts]
    return []


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
    """Return the job that a name, number, directory or URL means, or the one of here.

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
