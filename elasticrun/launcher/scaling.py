"""`--scale-by`: chooses the number of replicas by their measured speed.

After each new checkpoint another process reads the table of `elasticrun status
--scaling`, so that the launcher need not import NumPy.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from elasticrun.errors import counted
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.options import OptionError, Replicas
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.supervisor.supervisor import Supervisor
from elasticrun.launcher.terminal.console import Console

_EFFICIENCY = "efficiency:"
_LOOK_SECONDS = 1.0
# Changes are at least so many times as far apart as one of them takes.
_TIMES_COST = 20


class ScaleBy:
    """Rescales the job when another number of replicas is better.

    Never while it stops, starts, recovers or is being rescaled, and never sooner after
    a generation's first batch than 20 times what its start has cost.

    Args:
        rule: "efficiency:SHARE", or a command for the shell, which gets the tables as
            JSON and prints a number.

    Raises:
        OptionError: The share is no number above 0 and up to 1.
    """

    def __init__(
        self, rule: str, supervisor: Supervisor, console: Console, loop: EventLoop
    ) -> None:
        self._rule = rule
        self._share = parse_share(rule)
        self._supervisor = supervisor
        self._console = console
        self._loop = loop
        self._number = -1  # Of the generation that trains.
        self._not_before = 0.0
        self._asked_at: float | None = None
        self._checkpoint: int | None = None  # The newest one that was looked at.
        self._process: subprocess.Popen[bytes] | None = None
        self._has_complained = False
        self._look()

    def close(self) -> None:
        """Look no more."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()

    def _look(self) -> None:
        self._loop.call_later(_LOOK_SECONDS, self._look)
        generation = self._settled()
        if generation is None or self._process is not None:
            return
        now = time.monotonic()
        if generation.number != self._number:
            cost = now - (self._asked_at or generation.started_at)
            self._number, self._asked_at = generation.number, None
            self._not_before = now + _TIMES_COST * cost
        report = generation.members[0].report
        if now < self._not_before or report["checkpoint"] in (None, self._checkpoint):
            return
        self._checkpoint = report["checkpoint"]
        words = ["checkpoints", report["checkpoint_dir"], "scaling", "--json"]
        command = [sys.executable, "-m", "elasticrun", *words]
        self._start(command, self._on_tables)

    def _settled(self) -> Generation | None:
        """Return the generation that trains, if nothing is to become of it."""
        supervisor, generation = self._supervisor, self._supervisor.generation
        if generation is None or not (
            supervisor.is_settled
            and supervisor.state == "training"
            and generation.has_trained
        ):
            return None
        return generation

    def _start(
        self, command: Any, on_end: Callable[[str], None], given: bytes = b""
    ) -> None:
        """Start a process; `on_end` gets what it has printed, if it ends well."""
        process = self._process = subprocess.Popen(
            command,
            shell=isinstance(command, str),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(given)  # Less than a pipe holds.
            process.stdin.close()
        except BrokenPipeError:
            pass  # It does not read, which it need not.
        printed: list[bytes] = []
        output = process.stdout

        def on_output() -> None:
            printed.append(os.read(output.fileno(), 1 << 16))
            if printed[-1]:
                return
            self._loop.forget(output)
            process.stdin = None
            errors = process.communicate()[1].decode(errors="replace").strip()
            self._process = None
            if process.returncode == 0:
                on_end(b"".join(printed).decode(errors="replace"))
            else:
                self._complain(errors or f"exit code {process.returncode}")

        self._loop.watch(output, on_output)

    def _on_tables(self, text: str) -> None:
        if self._share is None:
            self._start(self._rule, self._on_number, text.encode())
            return
        generation = self._settled()
        tables = json.loads(text)
        if len(tables) > 1:
            self._complain(
                f"{', '.join(tables)} all have tables: give a COMMAND that chooses"
            )
        elif generation is not None and generation.number == self._number:
            (table,) = tables.values()
            bounds = self._supervisor.options.replicas
            self._scale(best_number(table, self._share, generation.size, bounds))

    def _on_number(self, text: str) -> None:
        if text.strip().isdecimal():
            self._scale(int(text))
        else:
            self._complain(f"the command printed no number, but {text[:100]!r}")

    def _scale(self, number: int) -> None:
        generation = self._settled()
        if generation is None or generation.number != self._number:
            return  # Something has happened meanwhile.
        if number == generation.size:
            return
        asked = counted(number, "replica")
        self._console.event(f"--scale-by {self._rule}: {asked} from now on")
        self._asked_at = time.monotonic()
        try:
            self._supervisor.scale(number)
        except OptionError as error:
            self._asked_at = None
            self._complain(str(error))

    def _complain(self, why: str) -> None:
        """Say once why nothing is decided; a checkpoint may come that tells more."""
        if not self._has_complained:
            self._has_complained = True
            self._console.event(f"--scale-by {self._rule}: nothing is changed: {why}")


def parse_share(rule: str) -> float | None:
    """Return what each replica is to be worth; None if a command decides.

    Raises:
        OptionError: It is no number above 0 and up to 1.
    """
    if not rule.startswith(_EFFICIENCY):
        return None
    try:
        share = float(rule.removeprefix(_EFFICIENCY))
    except ValueError:
        share = math.nan
    if not 0 < share <= 1:
        raise OptionError(
            f"--scale-by {rule}: give a number above 0 and up to 1, such as "
            f"{_EFFICIENCY}0.7, or a command that prints a number of replicas."
        )
    return share


def best_number(
    table: Sequence[Mapping[str, Any]], share: float, now: int, bounds: Replicas
) -> int:
    """Return the most replicas whose speedup, over their number, is at least a share.

    More than now only if what is gained until the next change is more than one costs;
    the fewest that are allowed if none are worth it; as now where that is not known.

    Args:
        table: Rows of `elasticrun status --scaling --json`.
        now: How many there are.
    """
    speedups = {
        row["replicas"]: row["speedup"]
        for row in table
        if row["speedup"] is not None
        and (bounds.least <= row["replicas"] <= bounds.most or row["replicas"] == now)
    }
    if now not in speedups:
        return now
    worth_it = [n for n, speedup in speedups.items() if speedup >= share * n]
    best = max((n for n in worth_it if n <= bounds.most), default=bounds.least)
    is_too_little = speedups.get(best, 0) <= (1 + 1 / _TIMES_COST) * speedups[now]
    return now if best > now and is_too_little else best
