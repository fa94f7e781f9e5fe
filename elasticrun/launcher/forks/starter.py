"""The launcher's side of the forkserver: asks it to fork replicas, which then wait."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from elasticrun.launcher import environment, interpreter
from elasticrun.launcher.event_loop import EventLoop, Timer
from elasticrun.launcher.forks.waiting import MAX_MESSAGE, ForkedReplica, discard_all
from elasticrun.replicas.wire import Channel

_MAX_ATTEMPTS = 3
_BACKLOG = 1024
_START_SECONDS = 300.0  # Its imports may come from a slow disk.
_FORK_SECONDS = 10.0  # A fork takes milliseconds.


@dataclass
class _Request:
    """Replicas that were asked for together, as far as they are forked by now."""

    size: int
    on_forked: Callable[[list[ForkedReplica]], None]
    forked: list[ForkedReplica] = field(default_factory=list)


class ForkserverClient:
    """Keeps a forkserver, and a new one when it ends or does not answer.

    Args:
        imports: Modules that the forkserver is to have besides torch.
        is_exec: Start a new interpreter for each replica instead of a fork.
        say: Called with what the user should know.
        on_failure: Called when no replica can be started; `fork` tries again.

    Attributes:
        outward: The address at which other nodes are to reach rank 0, or nothing.
    """

    def __init__(
        self,
        loop: EventLoop,
        *,
        is_exec: bool,
        say: Callable[[str], None],
        on_failure: Callable[[str], None],
        imports: Sequence[str] = (),
    ) -> None:
        self._loop = loop
        self._imports = list(imports)
        self.is_exec = is_exec
        self.outward = ""
        self._say = say
        self._on_failure = on_failure
        self._timer: Timer | None = None
        self._requests: deque[_Request] = deque()
        self._asked: ForkedReplica | None = None  # The one that is being forked.
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_ready = False
        self._num_attempts = 0  # Of a forkserver, since one has last forked a replica.
        self._groups: list[int] = []

    @property
    def pids(self) -> set[int]:
        """The forkserver, and the replicas that nobody has been given yet."""
        forked = {each.pid for request in self._requests for each in request.forked}
        return forked if self._process is None else {self._process.pid, *forked}

    @property
    def is_forking(self) -> bool:
        """Whether there may be a replica that this process has not heard of yet."""
        return self._asked is not None

    def start(self) -> None:
        """Start the forkserver, which takes the time that importing torch takes."""
        self._num_attempts += 1
        if self._num_attempts > _MAX_ATTEMPTS:
            self._num_attempts = 0
            hint = "" if self.is_exec else " Try --start exec."
            self._give_up(
                f"the forkserver ended {_MAX_ATTEMPTS} times before it forked a "
                f"replica; its messages are above.{hint}"
            )
            return
        try:
            self._process, own = interpreter.start_helper(
                "launcher.forks.forkserver",
                environment.of_forkserver(is_bare=self.is_exec),
                kind=socket.SOCK_SEQPACKET,
            )
        except OSError as error:
            self._give_up(f"no replica can be started: {error}.")
            return
        self._connection = own
        order = {"is_bare": self.is_exec, "imports": self._imports}
        own.setblocking(False)
        with contextlib.suppress(OSError):
            own.send(json.dumps(order).encode())
        self._loop.watch(own, self._on_readable)
        self._expect_answer(_START_SECONDS)

    def fork(self, size: int, on_forked: Callable[[list[ForkedReplica]], None]) -> None:
        """Ask for waiting replicas; call back with all of them, by rank.

        Nobody calls back if `on_failure` has been called.
        """
        self._requests.append(_Request(size, on_forked))
        if self._process is None:  # It was given up.
            self.start()
        self._ask()

    def tell_groups(self, groups: Sequence[int]) -> None:
        """Tell the forkserver whom to kill when it is left alone."""
        self._groups = list(groups)
        self._tell_groups()

    def close(self) -> None:
        self._abandon()
        while self._requests:
            discard_all(self._requests.popleft().forked)

    def _on_readable(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(MAX_MESSAGE)
        except OSError:
            data = b""
        if not data:
            self._on_end()
            return
        self._expect_answer(None)
        answer = json.loads(data)
        if answer["type"] == "forked":
            self._on_forked(answer["pid"])
        elif answer["problem"]:
            self._replace_unsound(answer["problem"])
        else:
            self._is_ready = True
            self._tell_groups()
            self._ask()

    def _replace_unsound(self, problem: str) -> None:
        """Import torch alone, or fork no more."""
        if self._imports:
            self._imports = []
        else:
            self._say(
                f"replicas cannot be forked, since {problem}; each starts its own "
                "interpreter instead (--start exec)"
            )
            self.is_exec = True
        self._num_attempts = 0  # It has not failed.
        self._abandon()
        self.start()

    def _give_up(self, why: str) -> None:
        """Start no more replicas until somebody asks for them anew."""
        self.close()
        self._on_failure(why)

    def _on_end(self) -> None:
        if self._is_ready:
            self._say("the forkserver has ended; starting another one")
        self._abandon()
        self.start()

    def _expect_answer(self, seconds: float | None) -> None:
        """Start another forkserver unless this one says something within that time."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._timer = self._loop.call_later(
                seconds, lambda: self._on_silent(seconds)
            )

    def _on_silent(self, seconds: float) -> None:
        """Start another one."""
        self._say(
            f"the forkserver has not answered for {seconds:g} s (stopped, or an "
            "import that does not end); starting another one"
        )
        self._abandon()
        self.start()

    def _abandon(self) -> None:
        """Forget this forkserver, and the replica that it was asked for."""
        self._expect_answer(None)
        if self._connection is not None:
            self._loop.forget(self._connection)
            self._connection.close()
            self._connection = None
        if self._process is not None:
            # Its own session: it has nothing else but replicas, which have theirs.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None
        self._is_ready = False
        if self._asked is not None:
            self._asked.discard()
            self._asked = None

    def _ask(self) -> None:
        """Ask for the next replica, unless one is on its way."""
        if not self._is_ready or self._asked is not None or not self._requests:
            return
        try:
            self._asked = self._order_fork(rank=len(self._requests[0].forked))
        except OSError as error:
            self._give_up(f"no replica can be started: {error}.")
        else:
            self._expect_answer(_FORK_SECONDS)

    def _order_fork(self, *, rank: int) -> ForkedReplica:
        """Send an order to fork a replica, with its ends of what connects it."""
        assert self._connection is not None
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:
            own, other = socket.socketpair()
            kept.callback(own.close)
            passed.callback(other.close)
            own.settimeout(10.0)  # For sending to a replica that does not read.
            (out, its_out), (err, its_err) = (
                _open_pipe(kept, passed) for _ in ("stdout", "stderr")
            )
            listeners = [] if rank else self._listen()
            for listener in listeners:
                passed.enter_context(listener)
            ports = tuple(each.getsockname()[1] for each in listeners)
            ends = [other.fileno(), its_out, its_err]
            ends += [listener.fileno() for listener in listeners]
            order = json.dumps({"type": "fork"}).encode()
            with contextlib.suppress(OSError):  # It has ended: `_on_end` comes.
                socket.send_fds(self._connection, [order], ends)
            kept.pop_all()
            return ForkedReplica(rank, 0, Channel(own), (out, err), ports)

    def _listen(self) -> list[socket.socket]:
        """Take the ports at which rank 0 could serve the store of its generation."""
        listeners = [socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)]
        if self.outward not in ("", "127.0.0.1"):
            family = socket.AF_INET6 if ":" in self.outward else socket.AF_INET
            # An address that has vanished is lost to the rendezvous as well.
            with contextlib.suppress(OSError):
                listeners.append(
                    socket.create_server(
                        (self.outward, 0), family=family, backlog=_BACKLOG
                    )
                )
        return listeners

    def _on_forked(self, pid: int) -> None:
        assert self._asked is not None
        replica, self._asked = self._asked, None
        replica.pid = pid
        self._groups.append(pid)
        self._num_attempts = 0
        request = self._requests[0]
        request.forked.append(replica)
        if len(request.forked) == request.size:
            self._requests.popleft()
            request.on_forked(request.forked)
        self._ask()

    def _tell_groups(self) -> None:
        if self._connection is not None and self._is_ready:
            order = {"type": "groups", "groups": self._groups}
            with contextlib.suppress(OSError):
                self._connection.send(json.dumps(order).encode())


def _open_pipe(
    kept: contextlib.ExitStack, passed: contextlib.ExitStack
) -> tuple[int, int]:
    reader, writer = os.pipe()
    kept.callback(os.close, reader)
    passed.callback(os.close, writer)
    return reader, writer
