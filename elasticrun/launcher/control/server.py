"""The launcher's answers to `elasticrun status`, `scale`, `stop` and `leave`."""

from __future__ import annotations

import time

from elasticrun.errors import STOPPED, counted
from elasticrun.launcher.control import sockets
from elasticrun.launcher.options import OptionError
from elasticrun.launcher.stop_signals import StopSignals
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.supervisor.status import JobStatus
from elasticrun.launcher.supervisor.supervisor import Supervisor
from elasticrun.replicas.wire import Channel, Message, WireError

_MAX_REQUEST = 1 << 14
_MAX_CALLERS = 32
_READING_SECONDS = 2.0


class Server:
    """Serves the control socket in the launcher's loop.

    A caller that asked for a change stays connected until it is done, or the job ends.
    """

    def __init__(
        self,
        control: sockets.ControlSocket,
        supervisor: Supervisor,
        status: JobStatus,
        stops: StopSignals,
    ) -> None:
        self._control = control
        self._supervisor = supervisor
        self._job_status = status
        self._stops = stops
        self._callers: list[Channel] = []
        self._waiting: list[tuple[Channel, int]] = []
        self._stopping: list[Channel] = []
        supervisor.loop.watch(control.listener, self._on_caller)
        supervisor.reports.on_ready.append(self._answer_waiting)
        supervisor.reports.on_message.append(self._on_message)

    def close(self) -> None:
        """Answer the callers of `stop` and `leave`: whether the job was saved."""
        problem = self._supervisor.problem
        for channel in self._stopping:
            channel.send({"error": problem} if problem else {"text": "ended"})

    def _on_caller(self) -> None:
        connection = sockets.accept(self._control.listener)
        if connection is None:
            return
        if len(self._callers) >= _MAX_CALLERS:
            connection.close()
            return
        connection.settimeout(_READING_SECONDS)  # For sending to who does not read.
        channel = Channel(connection, limit=_MAX_REQUEST)
        self._callers.append(channel)
        self._supervisor.loop.watch(channel, lambda: self._on_request(channel))

    def _on_request(self, channel: Channel) -> None:
        try:
            for request in channel.receive():
                channel.send(self._answer(request, channel))
        except WireError as error:
            channel.send({"error": f"refused: {error}"})
            channel.is_open = False
        if not channel.is_open:
            self._hang_up(channel)

    def _hang_up(self, channel: Channel) -> None:
        self._supervisor.loop.forget(channel)
        self._callers.remove(channel)
        self._waiting = [w for w in self._waiting if w[0] is not channel]
        self._stopping = [each for each in self._stopping if each is not channel]
        channel.close()

    def _answer(self, request: Message, channel: Channel) -> Message:
        kind = request.get("type")
        if kind == "status":
            return self._job_status.status()
        if kind == "stop":
            return self._stop(channel, is_now=request.get("is_now") is True)
        if kind == "leave":
            return self._leave(channel)
        if kind == "scale":
            is_forced = request.get("is_forced") is True
            return self._scale(request.get("replicas"), channel, is_forced=is_forced)
        return {
            "error": f"{kind!r} is no request; known are status, scale, stop and leave"
        }

    def _stop(self, channel: Channel, *, is_now: bool) -> Message:
        self._stopping.append(channel)
        for _ in range(1 + is_now):  # The second time it ends at once.
            if self._supervisor.exit_code is None:
                self._supervisor.stop("the stop command", STOPPED, is_for_all=True)
        return {"text": "ending at once" if is_now else "saving and ending"}

    def _leave(self, channel: Channel) -> Message:
        if self._supervisor.nodes.is_needed and self._supervisor.options.nodes:
            return {
                "error": "all nodes meet at this one (--rdzv-endpoint), so the others "
                "cannot go on without it. `elasticrun stop` ends the job on "
                "all nodes. A job that is started without --rdzv-endpoint can "
                "go on without any of its nodes"
            }
        now = time.monotonic()
        # Whoever calls it may signal after that, which hurries nobody.
        self._stops.announce("the leave command", STOPPED, now=now)
        self._stopping.append(channel)
        return {"text": "saving and leaving"}

    def _scale(self, size: object, channel: Channel, *, is_forced: bool) -> Message:
        if not isinstance(size, int) or isinstance(size, bool):
            return {"error": f"{size!r} is no number of replicas"}
        try:
            text = self._supervisor.scale(size, is_forced=is_forced)
        except OptionError as error:
            return {"error": str(error)}
        self._dismiss_overruled()
        generation = self._supervisor.generation
        has_size = generation is not None and generation.size == size
        is_done = has_size and self._supervisor.is_settled
        if not is_done:
            self._waiting.append((channel, size))
        return {"text": text, "is_done": is_done}

    def _dismiss_overruled(self) -> None:
        """Answer callers whose `scale` was overruled by another one."""
        size = self._supervisor.successors.size
        for channel, asked in self._waiting:
            if asked != size:
                error = (
                    f"the job goes on with {counted(size, 'replica')}, not {asked}: "
                    "somebody has rescaled it again"
                )
                channel.send({"error": error, "is_done": True})
        self._waiting = [each for each in self._waiting if each[1] == size]

    def _on_message(self, why: str, is_over: bool) -> None:
        for channel, _ in self._waiting:
            channel.send({"error" if is_over else "text": why})
        if is_over:
            self._waiting.clear()

    def _answer_waiting(self, generation: Generation) -> None:
        if not self._supervisor.is_settled:
            return  # They wait for the one after it.
        size = counted(generation.size, "replica")
        text = f"generation {generation.number} trains with {size}"
        if self._supervisor.problem:
            text += f"; before, {self._supervisor.problem}"
        for channel, _ in self._waiting:
            channel.send({"text": text, "is_done": True})
        self._waiting.clear()
