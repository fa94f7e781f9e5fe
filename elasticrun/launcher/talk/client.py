"""The commands' side: a connection to a running job of the same user."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from typing import Any

from elasticrun.errors import NO_JOB, REFUSED, ElasticRunError
from elasticrun.launcher.talk import sockets
from elasticrun.replicas.wire import Channel, Message, WireError

_ANSWER_SECONDS = 5.0


class JobError(ElasticRunError):
    """A job is not there, not the only one, or does not do what was asked."""

    def __init__(self, text: str, *, exit_code: int) -> None:
        super().__init__(text)
        self.exit_code = exit_code


class SilentJobError(JobError):
    """A launcher listens but says nothing."""

    def __init__(self, pid: int) -> None:
        super().__init__(
            f"job {pid} does not answer (suspended, or its output is blocked)",
            exit_code=REFUSED,
        )
        self.pid = pid


class JobConnection:
    """A connection to a job's launcher.

    Attributes:
        pid: The launcher's process.
        status: What it said when it was asked.
    """

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

    def is_called(self, name: str) -> bool:
        """Return whether it has this name or process number."""
        return name in (str(self.status["job"]), str(self.pid))

    @property
    def has_ended(self) -> bool:
        """Whether the launcher has hung up, as it does when it ends."""
        self._channel.drain()
        return not self._channel.is_open

    def scale(self, size: int) -> Iterator[str]:
        """Change the number of replicas; yield what happens, until they train."""
        answer = self._ask({"type": "scale", "replicas": size})
        yield answer["text"]
        self._channel.connection.settimeout(None)
        while not answer.get("is_done"):
            answer = self._take("the job ended before it was rescaled")
            yield answer["text"]

    def stop(self, *, is_now: bool = False) -> Iterator[str]:
        """Save and end; yield what happens, until the launcher has ended.

        Args:
            is_now: Do not save.

        Raises:
            JobError: It ended without saving what was trained, and was to.
        """
        return self._end("stop", is_now=is_now)

    def wait(self) -> None:
        """Wait until the launcher hangs up, as it does when it ends."""
        self._channel.connection.settimeout(None)
        while self._channel.receive_one() is not None:
            continue

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
        return self._take("the launcher hung up")

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
    """Return every running job of this user, and those that do not answer.

    Raises:
        JobError: Others could enter where the sockets are.
    """
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
    """Return the job of this name or process number, or the only one.

    Raises:
        JobError: There is none, or more than one, or it does not answer.
    """
    jobs, silent = find_jobs()
    found = [job for job in jobs if name is None or job.is_called(name)]
    chosen = found[0] if len(found) == 1 and not (name is None and silent) else None
    for job in jobs:
        if job is not chosen:
            job.close()
    if chosen is not None:
        return chosen
    what = "job" if name is None else f"job {name!r}"
    if not found:
        # One that does not answer does not say its name either.
        for error in silent:
            if name is None or name == str(error.pid) or not name.isdecimal():
                raise error
        raise JobError(f"no {what} of this user is running", exit_code=NO_JOB)
    listed = [f"{job.status['job']} ({job.pid})" for job in found]
    listed += [f"one that does not answer ({error.pid})" for error in silent]
    raise JobError(
        f"more than one {what} is running: {', '.join(listed)}. Give one of these "
        "process numbers.",
        exit_code=NO_JOB,
    )
