"""Writes the launcher's events to the job's file, and runs the user's command."""

from __future__ import annotations

import json
import queue
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from elasticrun.checkpoint.events import Event, EventLog
from elasticrun.launcher.options import Options
from elasticrun.launcher.terminal.console import Console

_LAST_SECONDS = 10.0  # For the commands that still run when the job has ended.


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
        while (event := self._untold.get()) is not None:
            subprocess.run(
                command,
                shell=True,
                input=json.dumps(event).encode(),
                stdout=subprocess.DEVNULL,
                check=False,
            )
