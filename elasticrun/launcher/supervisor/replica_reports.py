"""Passes the replicas' reports on, to the user and to the rest of the launcher."""

from __future__ import annotations

import time
from collections.abc import Callable

from elasticrun.launcher.supervisor.generation import Generation, Member
from elasticrun.launcher.supervisor.restart_policy import CrashHistory
from elasticrun.launcher.terminal.console import Console
from elasticrun.launcher.terminal.output import Repeats, marked

_LONGEST = 500  # Characters of the last line that is kept.


class ReplicaReports:
    """Passes on what replicas report, by callbacks and to the user.

    Attributes:
        on_ready: Called with the generation when all its replicas here have made
            their job.
        on_trained: Called with it when all of them have trained a batch.
        on_message: Called with a text for callers that wait for a rescaling, and
            whether there will be none.
        on_reported: Called with each replica that has sent a report.
        last_output: The last line that one of them has printed, with its rank.
        last_output_at: When that was, in seconds since 1970.
    """

    def __init__(
        self, console: Console, crashes: CrashHistory, *, is_quiet: bool = False
    ) -> None:
        self.on_ready: list[Callable[[Generation], None]] = []
        self.on_trained: list[Callable[[Generation], None]] = []
        self.on_message: list[Callable[[str, bool], None]] = []
        self.on_reported: list[Callable[[Member], None]] = []
        self.last_output = ""
        self.last_output_at = 0.0
        self._console = console
        self._crashes = crashes
        self._is_quiet = is_quiet
        self._repeats: dict[int, Repeats] = {}
        self._generation: Generation | None = None
        self._unsaid = ""
        self._is_known_ready = False
        self._is_known_trained = False

    def begin(self, generation: Generation, started: str) -> None:
        """Take a generation that has started.

        Args:
            started: What to say of that. After another generation it is said with the
                place where that has resumed, so that a restart is one line.
        """
        self._unsaid = started
        if self._generation is None:
            self._console.event(started)
            self._unsaid = ""
        self._generation = generation
        self._is_known_ready = self._is_known_trained = False
        self._repeats.clear()

    def tell(self, why: str, *, is_over: bool = False) -> None:
        """Tell the user, and callers that wait for a rescaling."""
        self._console.event(why)
        for call in self.on_message:
            call(why, is_over)

    def on_output(self, rank: int, line: bytes, *, is_error: bool) -> None:
        if is_error:
            line = self._repeats.setdefault(rank, Repeats()).filtered(line)
        if line:
            text = marked(rank, line)
            if not self._is_quiet:
                self._console.output(text, is_error=is_error)
            if line.strip():
                self.last_output, self.last_output_at = text[:_LONGEST], time.time()

    def on_log_failure(self, rank: int, error: OSError) -> None:
        self._console.event(
            f"the log of rank {rank} cannot be written, and perhaps no other: {error}; "
            "training goes on without"
        )

    def on_report(self, member: Member) -> None:
        generation = self._generation
        assert generation is not None
        if not self._is_known_ready and generation.has_job:
            self._is_known_ready = True
            text = self._unsaid
            if resumed_at := member.report["resumed_at"]:
                begun = f"{text}," if text else f"generation {generation.number}:"
                text = f"{begun} resumed at {resumed_at}"
            if text:
                self._console.event(text)
            for call in self.on_ready:
                call(generation)
        for report_to in self.on_reported:
            report_to(member)
        if member.report["has_trained"]:
            self._crashes.has_trained = True
        if not self._is_known_trained and generation.has_trained:
            self._is_known_trained = True
            for call in self.on_trained:
                call(generation)
