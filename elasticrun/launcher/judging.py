"""What follows from how a generation ended: another one, or the job's exit code."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

from elasticrun.launcher import directory
from elasticrun.launcher.console import Console
from elasticrun.launcher.crashes import CrashBook
from elasticrun.launcher.options import Options
from elasticrun.launcher.outcomes import CRASHED, FINISHED, LEFT, Outcome

EXIT_FAILED = 1
EXIT_STOPPED = 75
_BY_SIGNAL = {143: "SIGTERM", 130: "SIGINT"}


class Stop(enum.Enum):
    """Why the running generation was asked to save and exit."""

    NONE = 0
    SCALE = 1
    END = 2


@dataclass(frozen=True)
class Next:
    """What to do now.

    Attributes:
        exit_code: Of the launcher, or None to begin another generation.
        delay: Seconds to wait before that.
        problem: Why nothing was saved, if it was to be.
    """

    exit_code: int | None = None
    delay: float = 0.0
    problem: str = ""


class Judge:
    """Decides, and says what it has decided.

    Attributes:
        started_at: When the launcher started.
    """

    def __init__(self, options: Options, console: Console, crashes: CrashBook) -> None:
        self.started_at = time.time()
        self._options = options
        self._console = console
        self._crashes = crashes

    def judge(
        self, outcome: Outcome, *, number: int, stop: Stop, code: int, is_first: bool
    ) -> Next:
        """Decide what follows.

        Args:
            outcome: On all nodes together.
            number: Of the generation.
            stop: Why it was to end, if it was.
            code: The exit code if the job was to end.
            is_first: Whether this is the node that notes the end of the program.
        """
        self._crashes.note(outcome)
        if outcome.kind == FINISHED:
            return self._finish(outcome, is_first=is_first)
        if stop is Stop.END:
            return self._end_stopped(outcome, code)
        if outcome.kind == LEFT:
            return self._go_on_without(outcome, number)
        if stop is Stop.SCALE:
            return self._rescale(outcome, number)
        if outcome.kind == CRASHED:
            return self._restart(outcome, number)
        signalled = _BY_SIGNAL.get(outcome.code)
        cause = f"by {signalled} to a replica" if signalled else "by itself"
        self._console.event(
            f"stopped {cause} with exit code {outcome.code}; {_saved(outcome)}"
            f"{self._options.how_to_go_on}"
        )
        return Next(outcome.code)

    def note_idle_end(self, cause: str) -> None:
        """Say what is kept of a job that ends while no replica trains."""
        newest = max(
            self._crashes.budget.newest_at_crash,
            directory.newest_checkpoint(self._options.checkpoint_dir),
        )
        text = f"checkpoint {newest} is the newest{self._options.how_to_go_on}"
        if not self._crashes.has_trained:
            text = "nothing was trained since the start"
        elif not newest:
            text = "nothing was saved"
        self._console.event(f"{cause}: ending; {text}")

    def on_closed(self) -> Next:
        """Decide what follows when the job has ended on the other nodes."""
        if self._has_finished():
            return self._finish(is_first=False)
        self._console.event("the job was ended on the other nodes")
        return Next(EXIT_STOPPED)

    def fail(self, why: str, *, trace: str = "") -> Next:
        """Give up."""
        if trace:
            self._console.detail(trace)
        self._console.event(f"failed: {why}")
        return Next(EXIT_FAILED)

    def _finish(self, outcome: Outcome | None = None, *, is_first: bool) -> Next:
        lost = f"; {_saved(outcome)}" if outcome and outcome.is_unsaved else ""
        if is_first and not lost:
            directory.note_finished(self._options.checkpoint_dir, self._options.program)
        num_restarts = self._crashes.num_restarts
        self._console.event(
            f"finished after {time.time() - self.started_at:.0f} s"
            + (
                f" and {num_restarts} restart{'s' * (num_restarts > 1)}"
                if num_restarts
                else ""
            )
            + lost
        )
        return Next(0)

    def _has_finished(self) -> bool:
        where, program = self._options.checkpoint_dir, self._options.program
        return directory.finished_at(where, program) is not None

    def _end_stopped(self, outcome: Outcome, code: int) -> Next:
        if outcome.kind in (CRASHED, LEFT):
            problem = f"stopped without a new checkpoint: {outcome.text}"
            self._console.event(problem)
            return Next(code, problem=problem)
        saved = _saved(outcome)
        self._console.event(f"stopped; {saved}{self._options.how_to_go_on}")
        return Next(code, problem=saved if outcome.is_unsaved else "")

    def _go_on_without(self, outcome: Outcome, number: int) -> Next:
        """Restart because a node is gone, which counts as no crash."""
        if self._has_finished():
            return self._finish(is_first=False)
        self._console.event(
            f"generation {number} has lost a node: {outcome.text}; going on "
            f"{_start_from(outcome.newest)}"
        )
        return Next()

    def _rescale(self, outcome: Outcome, number: int) -> Next:
        """Restart with another size, which counts as no crash however it came to it."""
        if outcome.kind == CRASHED:
            self._console.event(
                f"generation {number} ended at {outcome.where} without saving: "
                f"{_first_line(outcome.text)}; rescaling {_start_from(outcome.newest)}"
            )
        elif outcome.is_unsaved:
            saved = _saved(outcome)
            self._console.event(
                f"generation {number} ended at {outcome.where}; {saved}"
            )
            return Next(problem=saved)
        return Next()

    def _restart(self, outcome: Outcome, number: int) -> Next:
        self._console.event(
            f"generation {number} crashed at {outcome.where}: {outcome.text}"
        )
        delay, text = self._crashes.decide(outcome, number)
        if delay is None:
            # On a terminal it stands above, as the replica has printed it.
            is_seen = outcome.is_here and self._console.is_terminal
            return self.fail(text, trace="" if is_seen else outcome.trace)
        self._console.event(text)
        return Next(delay=delay)


def _first_line(text: str) -> str:
    return text.partition("\n")[0]


def _saved(outcome: Outcome) -> str:
    newest = outcome.newest
    if outcome.is_unsaved:
        lost = f"what came after checkpoint {newest}" if newest else "everything"
        return f"the last save failed, as rank 0 says in its log: {lost} is lost"
    return f"checkpoint {newest} is saved" if newest else "nothing was saved"


def _start_from(newest: int) -> str:
    return f"from checkpoint {newest}" if newest else "from the beginning"
