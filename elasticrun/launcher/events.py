"""Writes the launcher's events to the job's file, and runs the user's command."""

from __future__ import annotations

import io
import json
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

from elasticrun.checkpoint.events import Event, EventLog
from elasticrun.launcher import processes
from elasticrun.launcher.options import Options
from elasticrun.launcher.terminal.console import Console

_MOST_SECONDS = 60.0  # For one command and what it starts.
_LAST_SECONDS = 10.0  # For the commands that still run when the job has ended.
_MOST_ERROR = 500  # Bytes of what a failed command has said.
# The command is killed by its group. It has no session of its own: what is left in
# other sessions the launcher takes for a replica's.
_OWN_GROUP: Any = {"process_group": 0}
if sys.version_info < (3, 11):
    _OWN_GROUP = {"preexec_fn": os.setpgrp}


class EventKeeper:
    """Writes each event of the console to the job's file, and tells a command of it.

    Args:
        is_told: Whether this node's launcher is the one that tells of what happens to
            all of them; each tells of its own start.
    """

    def __init__(
        self, options: Options, console: Console, is_told: Callable[[], bool]
    ) -> None:
        self._log = EventLog(options.local_dir)
        self._name = options.name
        self._console = console
        self._is_told = is_told
        self._untold: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._teller: threading.Thread | None = None
        if options.on_event is not None:
            self._teller = threading.Thread(
                target=self._tell,
                args=(options.on_event,),
                name="elasticrun-on-event",
                daemon=True,
            )
            self._teller.start()
        console.on_event.append(self._take)

    def close(self) -> None:
        """Wait a while until the command has been told of everything."""
        if self._teller is not None:
            self._untold.put(None)
            self._teller.join(_LAST_SECONDS)

    def _take(self, kind: str, text: str, values: dict[str, Any]) -> None:
        if kind == "start" or self._is_told():
            event = self._log.write(kind, job=self._name, text=text, **values)
            if self._teller is not None:
                self._untold.put(event)

    def _tell(self, command: str) -> None:
        """Run the command for one event after another; in a thread of its own."""
        said = ""
        while (event := self._untold.get()) is not None:
            why = _run(command, json.dumps(event).encode())
            if why not in ("", said):
                said = why
                # No event: the end's text is that of the last one.
                self._console.detail(f"elasticrun: --on-event {command}: {why}")


def _run(command: str, given: bytes) -> str:
    """Run a command; return why it failed, or nothing.

    It reads and writes files: what it has left running may hold a pipe open for ever.
    """
    try:
        with _file_in_memory("given") as stdin, _file_in_memory("error") as stderr:
            stdin.write(given)
            stdin.seek(0)
            process = subprocess.Popen(
                command,
                shell=True,
                stdin=stdin,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                **_OWN_GROUP,
            )
            try:
                code = process.wait(_MOST_SECONDS)
            except subprocess.TimeoutExpired:
                processes.kill_groups([process.pid])
                process.wait()
                return f"ended after {_MOST_SECONDS:.0f} seconds"
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MOST_ERROR))
            error = stderr.read().decode(errors="replace")
    except OSError as refused:  # No processes or open files are left.
        return str(refused)
    return "" if code == 0 else f"exit code {code}: {error}".strip(": \n")


def _file_in_memory(name: str) -> io.FileIO:
    """Return a file in memory, for the command may be told that the disk is full."""
    return io.FileIO(os.memfd_create(name), "r+b")
