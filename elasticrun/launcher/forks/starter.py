"""The launcher's side of the forkserver: it asks for replicas, which then wait."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from elasticrun.launcher import environment, interpreter
from elasticrun.launcher.event_loop import EventLoop, Timer
from elasticrun.launcher.forks.forkserver import MAX_MESSAGE, MOST_AT_ONCE
from elasticrun.launcher.forks.parked import Batch, Parked
from elasticrun.replicas.wire import Channel, Message

_MAX_ATTEMPTS = 3
_MODULES_AT_ONCE = 200
_BACKLOG = 1024
_TIMES_AT_START = 5.0
_FORK_SECONDS = 10.0  # A fork takes milliseconds, unless an import comes before it.
_SHARE_OF_QUIET = 0.25  # Of the patience, before a word is said.


class Starter:
    """Keeps a forkserver, and a new one when it ends.

    Args:
        imports: Modules that the script imports, for the forkserver to have.
        is_exec: Start a new interpreter for each replica instead of a fork.
        say: Called with what the user should know.
        on_failure: Called when no replica can be started; `park` tries again.
        patience: Seconds for the forkserver to fork after an import, and some times as
            many for its imports at the start, which may come from a slow disk. Then
            another one is started.

    Attributes:
        outward: The address at which other nodes are to reach rank 0, or nothing.
    """

    def __init__(
        self,
        loop: EventLoop,
        *,
        imports: Sequence[str],
        is_exec: bool,
        say: Callable[[str], None],
        on_failure: Callable[[str], None],
        patience: float = 60.0,
    ) -> None:
        self._loop = loop
        self._imports = list(imports)
        self.is_exec = is_exec
        self.outward = ""
        self._say = say
        self._on_failure = on_failure
        self._patience = patience
        self._timer: Timer | None = None
        self._batches: deque[Batch] = deque()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._is_ready = False
        self._may_import = True  # Before it forks the next replicas.
        self._is_taught = False  # Since it was asked for replicas.
        self._num_attempts = 0  # Of a forkserver, since one has last forked a replica.
        self._has_forked = False
        self._groups: list[int] = []
        self._learned: list[str] = []
        self._variables: dict[str, str | None] = {}
        self._may_learn = True
        self._asked: list[Parked] = []

    @property
    def pid(self) -> int:
        """The forkserver's process number, 0 without one."""
        return self._process.pid if self._process is not None else 0

    @property
    def is_forking(self) -> bool:
        """Whether there may be a replica that this process has not heard of yet."""
        return bool(self._asked)

    def start(self) -> None:
        """Start the forkserver, which takes the time that importing torch takes."""
        self._num_attempts += 1
        if self._num_attempts > _MAX_ATTEMPTS:
            self._do_without()
            return
        try:
            self._process, own = interpreter.start_beside(
                "launcher.forks.forkserver",
                environment.of_forkserver(is_bare=self.is_exec),
                kind=socket.SOCK_SEQPACKET,
            )
        except OSError as error:
            self._give_up(f"no replica can be started: {error}.")
            return
        self._connection = own
        self._is_ready, self._may_import = False, True
        order = {"is_bare": self.is_exec, "imports": self._imports}
        own.setblocking(False)
        with contextlib.suppress(OSError):
            own.send(json.dumps(order).encode())
        self._loop.watch(own, self._on_readable)
        self._expect(_TIMES_AT_START * self._patience)

    def park(self, size: int, on_forked: Callable[[Parked], None]) -> None:
        """Ask for waiting replicas; call back with each, in the order of their ranks.

        Nobody calls back for the rest if `on_failure` has been called.
        """
        self._batches.append(Batch(size, on_forked))
        if self._process is None:  # It was given up.
            self.start()
        self._ask()

    def note_running(self, groups: Sequence[int]) -> None:
        """Tell the forkserver whom to kill when it is left alone."""
        self._groups = list(groups)
        self._tell_groups()

    def learn(
        self, modules: Sequence[str], variables: Mapping[str, str | None]
    ) -> None:
        """Have the forkserver import more, so that the next replicas need not.

        Args:
            variables: What the program has changed. The forkserver learns nothing if
                the imports do not change the same: then the program itself did.
        """
        if self._may_learn and not self.is_exec:
            self._learned += modules
            self._variables.update(variables)
            self._teach(modules)

    def fork_no_more(self) -> bool:
        """Start an interpreter for each replica from now on, and say so.

        Returns:
            Whether replicas were forked so far.
        """
        if self.is_exec:
            return False
        self._start_interpreters("a forked replica could not use GPUs")
        return True

    def close(self) -> None:
        self._abandon()
        self._batches.clear()

    def _on_readable(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(MAX_MESSAGE)
        except OSError:
            data = b""
        if not data:
            self._on_end()
            return
        self._expect(None)
        answer = json.loads(data)
        if answer["type"] == "ready":
            self._on_server_ready(answer["problem"], answer["num_sound"])
        elif answer["type"] == "unsound":
            self._may_learn, self._learned, self._variables = False, [], {}
            self._replace()
        else:
            self._on_forked(answer["pids"])

    def _on_server_ready(self, problem: str, num_sound: int) -> None:
        if problem:
            self._replace_unsound(problem, num_sound)
            return
        self._is_ready, self._may_import = True, False
        self._tell_groups()
        self._ask()
        self._teach(self._learned)

    def _replace_unsound(self, problem: str, num_sound: int) -> None:
        """Import only what stands before the cause, or fork no more."""
        if self._imports:
            self._imports = self._imports[:num_sound]
        else:
            self._say(
                f"torch was imported for forking, but {problem}; each replica starts "
                "an interpreter of its own instead (--start exec)"
            )
            self.is_exec = True
        self._replace()

    def _start_interpreters(self, why: str) -> None:
        self._say(
            f"{why}; from now on each replica starts an interpreter of its own instead "
            "(--start exec)"
        )
        self.is_exec = True
        self._replace()

    def _replace(self) -> None:
        """Start another forkserver for a reason that is no failure of this one."""
        self._num_attempts = 0
        self._abandon()
        self.start()

    def _do_without(self) -> None:
        """Go on without forking if that has worked before; else give up for now."""
        self._num_attempts = 0
        why = f"the forkserver ended {_MAX_ATTEMPTS} times before it forked a replica"
        if self._has_forked and not self.is_exec:
            self._start_interpreters(why)
            return
        hint = "" if self.is_exec else " Try --start exec."
        self._give_up(f"{why}; its messages are above.{hint}")

    def _give_up(self, why: str) -> None:
        """Start no more replicas until somebody asks for them anew."""
        self._abandon()
        self._batches.clear()
        self._on_failure(why)

    def _on_end(self) -> None:
        was_ready = self._is_ready
        self._abandon()
        if was_ready:
            self._say("the forkserver has ended; starting another one")
        self.start()

    def _expect(self, seconds: float | None) -> None:
        """Start another forkserver unless this one says something within that time."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            quiet = seconds * _SHARE_OF_QUIET
            self._timer = self._loop.call_later(
                quiet, lambda: self._on_quiet(quiet, seconds)
            )

    def _on_quiet(self, quiet: float, seconds: float) -> None:
        self._say(
            f"the forkserver has not answered for {quiet:g} s; after {seconds:g} s "
            "another one is started"
        )
        self._timer = self._loop.call_later(
            seconds - quiet, lambda: self._on_silent(seconds)
        )

    def _on_silent(self, seconds: float) -> None:
        """Start another one, without the imports that may be what holds it up."""
        self._say(
            f"the forkserver has not answered for {seconds:g} s (stopped, or an "
            "import that does not end); starting another one"
        )
        if self._may_import:
            self._imports = []
            self._may_learn, self._learned, self._variables = False, [], {}
        self._abandon()
        self.start()

    def _abandon(self) -> None:
        """Forget this forkserver, and the replicas that it was asked for."""
        self._expect(None)
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
        for parked in self._asked:
            parked.discard()
        self._asked = []

    def _ask(self) -> None:
        """Ask for the next replicas, unless some are on their way."""
        if not self._is_ready or self._asked or not self._batches:
            return
        try:
            self._asked = self._request(self._batches[0])
        except OSError as error:
            self._give_up(f"no replica can be started: {error}.")
        else:
            self._is_taught = False
            limit = math.inf if self._may_import else _FORK_SECONDS
            self._expect(min(self._patience, limit))

    def _request(self, batch: Batch) -> list[Parked]:
        """Send an order to fork replicas, with their ends of what connects them.

        Raises:
            OSError: There are too many open files, or no ports.
        """
        assert self._connection is not None
        size = min(batch.size - batch.num_forked, MOST_AT_ONCE)
        with contextlib.ExitStack() as kept, contextlib.ExitStack() as passed:
            listeners = [] if batch.num_forked else self._listen()
            for listener in listeners:
                passed.enter_context(listener)
            asked: list[Parked] = []
            ends: list[int] = []
            ports = tuple(each.getsockname()[1] for each in listeners)
            for rank in range(batch.num_forked, batch.num_forked + size):
                channel, outputs = _connect(kept, passed, ends)
                asked.append(Parked(rank, 0, channel, outputs, () if rank else ports))
            ends += [listener.fileno() for listener in listeners]
            order = json.dumps({"type": "fork", "size": size}).encode()
            with contextlib.suppress(OSError):  # It has ended: `_on_end` comes.
                socket.send_fds(self._connection, [order], ends)
            kept.pop_all()
            return asked

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

    def _on_forked(self, pids: Sequence[int]) -> None:
        asked, self._asked = self._asked, []
        self._num_attempts, self._has_forked = 0, True
        self._may_import = self._is_taught
        batch = self._batches[0]
        batch.num_forked += len(pids)
        if batch.num_forked == batch.size:
            self._batches.popleft()
        self._ask()
        for parked, pid in zip(asked, pids, strict=True):
            parked.pid = pid
            batch.on_forked(parked)

    def _tell_groups(self) -> None:
        self._tell({"type": "groups", "groups": self._groups})

    def _teach(self, modules: Sequence[str]) -> None:
        for start in range(0, len(modules), _MODULES_AT_ONCE):
            names = list(modules[start : start + _MODULES_AT_ONCE])
            is_last = start + _MODULES_AT_ONCE >= len(modules)
            variables = self._variables if is_last else {}
            self._may_import = self._is_taught = True
            self._tell({"type": "import", "names": names, "variables": variables})

    def _tell(self, order: Message) -> None:
        if self._connection is not None and self._is_ready:
            with contextlib.suppress(OSError):
                self._connection.send(json.dumps(order).encode())


def _connect(
    kept: contextlib.ExitStack, passed: contextlib.ExitStack, ends: list[int]
) -> tuple[Channel, tuple[int, int]]:
    """Return the launcher's ends of a replica's channel, stdout and stderr.

    Args:
        ends: Gets those of the replica.
    """
    own, other = socket.socketpair()
    kept.callback(own.close)
    passed.callback(other.close)
    own.settimeout(10.0)  # For sending to a replica that does not read.
    ends.append(other.fileno())
    outputs = []
    for _ in ("stdout", "stderr"):
        reader, writer = os.pipe()
        kept.callback(os.close, reader)
        passed.callback(os.close, writer)
        outputs.append(reader)
        ends.append(writer)
    return Channel(own), (outputs[0], outputs[1])
