"""What is heard of a running generation, and who is told."""

from __future__ import annotations

from collections.abc import Callable

from elasticrun.launcher.supervisor.crashes import CrashBook
from elasticrun.launcher.supervisor.generation import Generation, Member
from elasticrun.launcher.supervisor.stragglers import Stragglers
from elasticrun.launcher.terminal.console import Console
from elasticrun.launcher.terminal.output import Repeats, marked


class News:
    """Tells the user, and the rest of the launcher, what replicas report.

    Args:
        crashes: To whom it matters whether a batch was trained.

    Attributes:
        has_had_job: Whether a replica of any generation has made its job.
        on_started: Called when a generation has started.
        on_ready: Called when all replicas of a generation have made their job.
        on_not_rescaled: Called with the reason when a generation goes on that was to be
            rescaled.
        on_delayed: Called with the reason when replicas are waited for.
        on_reported: Called with each replica that said where it is.
    """

    def __init__(self, console: Console, crashes: CrashBook) -> None:
        self.has_had_job = False
        self.on_started: list[Callable[[], None]] = []
        self.on_ready: list[Callable[[], None]] = []
        self.on_not_rescaled: list[Callable[[str], None]] = []
        self.on_delayed: list[Callable[[str], None]] = []
        self.on_reported: list[Callable[[Member], None]] = []
        self._console = console
        self._crashes = crashes
        self._stragglers = Stragglers()
        self._repeats: dict[int, Repeats] = {}
        self._generation: Generation | None = None
        self._is_known_ready = False

    def begin(self, generation: Generation) -> None:
        """Take a generation that has started."""
        self._generation, self._is_known_ready = generation, False
        self._repeats.clear()
        for call in self.on_started:
            call()

    def note_not_rescaled(self, why: str) -> None:
        """Tell that the generation goes on as it is."""
        for call in self.on_not_rescaled:
            call(why)

    def note_delay(self, why: str) -> None:
        """Tell that replicas are waited for."""
        for call in self.on_delayed:
            call(why)

    def note_output(self, rank: int, line: bytes, *, is_error: bool) -> None:
        """Show a line that a replica printed."""
        if is_error:
            line = self._repeats.setdefault(rank, Repeats()).filtered(line)
        if line:
            self._console.output(marked(rank, line), is_error=is_error)

    def note_log_failure(self, rank: int, error: OSError) -> None:
        """Say that what replicas print is not kept."""
        self._console.event(
            f"what rank {rank} prints is not kept, and perhaps that of others: "
            f"{error}; going on without"
        )

    def note_report(self, member: Member) -> None:
        """Take where a replica is."""
        generation = self._generation
        assert generation is not None
        self.has_had_job = True
        if not self._is_known_ready and generation.has_job:
            self._is_known_ready = True
            resumed_at = member.report["resumed_at"]
            if resumed_at is not None:
                self._console.event(
                    f"generation {generation.number}: resumed at {resumed_at}"
                )
            for call in self.on_ready:
                call()
        for report_to in self.on_reported:
            report_to(member)
        if member.report["has_trained"]:
            self._crashes.has_trained = True
        slow = self._stragglers.note([each.report for each in generation.members])
        if slow:
            self._console.event(slow)
