"""Decides after a generation: start another one, or end with an exit code."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

from elasticrun.checkpoint.storage.place import Place
from elasticrun.errors import BY_SIGNAL, FAILED, STOP_CODES, STOPPED, counted
from elasticrun.launcher import directory
from elasticrun.launcher.options import Options
from elasticrun.launcher.supervisor.causes import describe, first_cause
from elasticrun.launcher.supervisor.crashes import CrashHistory, start_from
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.terminal.console import Console
from elasticrun.launcher.verdict import EndKind, Verdict

_SIGNAL_OF = {code: number.name for number, code in BY_SIGNAL.items()}
_MAX_TRACE = 20_000
_MAX_KEPT = 2_000  # Of a trace, in the job's events.


class Stop(enum.Enum):
    """Why the running generation was asked to save and exit."""

    NONE = 0
    SCALE = 1
    END = 2


@dataclass(frozen=True)
class NextAction:
    """What to do now.

    Attributes:
        exit_code: Of the launcher, or None to begin another generation.
        delay: Seconds to wait before that.
        problem: Why nothing was saved, if it was to be.
    """

    exit_code: int | None = None
    delay: float = 0.0
    problem: str = ""


def verdict_of(generation: Generation, *, reason: str, place: Place) -> Verdict:
    """Return how the replicas of this node ended.

    Args:
        reason: Why the launcher killed them, if it did.
        place: Where its checkpoints are.
    """
    cause = None if generation.is_discarded else first_cause(generation.endings)
    first = generation.members[0].report
    newest = directory.newest_checkpoint(place)
    where = str(first.get("position", "the start of the script"))
    if cause is None:
        codes = [ending.code for ending in generation.endings]
        stops = [code for code in codes if code in STOP_CODES]
        kind = EndKind.STOPPED if stops or generation.is_discarded else EndKind.FINISHED
        code = max(stops, default=0)
        is_unsaved = any(member.has_failed_save for member in generation.members)
        return Verdict(
            kind, where=where, code=code, newest=newest, is_unsaved=is_unsaved
        )
    hint = generation.explain_kill(cause)
    return Verdict(
        EndKind.CRASHED,
        text=reason or describe(cause, hint=hint),
        trace=cause.failure.trace[-_MAX_TRACE:] if cause.failure else "",
        where=where,
        code=cause.code,
        rank=cause.rank,
        num_passed=first.get("num_passed", 0),
        newest=newest,
        rescued=generation.rescued,
        no_rescue=generation.no_rescue,
        is_own_fault=bool(reason) or cause.is_own_fault,
        is_by_launcher=cause.is_by_launcher and not reason,
        is_from_outside=cause.is_from_outside and not reason,
        is_out_of_memory=bool(hint),
        time=time.time() - (time.monotonic() - cause.time),
    )


class Judge:
    """Decides what follows from a verdict, and tells the user.

    Attributes:
        is_plain: Whether the last generation here did not use elasticrun.
    """

    def __init__(
        self, options: Options, console: Console, crashes: CrashHistory
    ) -> None:
        self.started_at = time.time()
        self.is_plain = False
        self._options = options
        self._console = console
        self._crashes = crashes

    def judge(
        self, verdict: Verdict, *, number: int, stop: Stop, code: int, is_first: bool
    ) -> NextAction:
        """Decide what follows.

        Args:
            stop: Why it was to end, if it was.
            is_first: Whether this is the node that notes the end of the program.
        """
        self._crashes.note(verdict)
        if verdict.kind == EndKind.FINISHED:
            return self._finish(verdict, is_first=is_first)
        if stop is Stop.END:
            return self._end_stopped(verdict, code, number)
        if verdict.kind == EndKind.LEFT:
            return self._go_on_without(verdict, number)
        if stop is Stop.SCALE:
            return self._rescale(verdict, number)
        if verdict.kind == EndKind.CRASHED:
            return self._restart(verdict, number)
        signalled = _SIGNAL_OF.get(verdict.code)
        cause = f"by {signalled} to a replica" if signalled else "by itself"
        self._console.event(
            f"stopped {cause} with exit code {verdict.code}; {_saved(verdict)}"
            f"{self._options.how_to_go_on}"
        )
        return NextAction(verdict.code)

    def note_idle_end(self, cause: str) -> None:
        """Say what is kept of a job that ends while no replica trains."""
        newest = max(
            self._crashes.newest_at_crash,
            directory.newest_checkpoint(self._options.checkpoint_dir),
        )
        text = f"checkpoint {newest} is the newest{self._options.how_to_go_on}"
        if not self._crashes.has_trained:
            text = "nothing was trained since the start"
        elif not newest:
            text = "nothing was saved"
        self._console.event(f"{cause}: ending; {text}")

    def on_closed(self) -> NextAction:
        """Decide what follows when the job has ended on the other nodes."""
        if self._has_finished():
            return self._finish(is_first=False)
        self._console.event("the job was ended on the other nodes")
        return NextAction(STOPPED)

    def _say_crash(self, text: str, verdict: Verdict, number: int) -> None:
        """Say what has ended a generation, and show where; what followed is in logs."""
        self._console.event(
            text,
            "crash",
            generation=number,
            rank=verdict.rank,
            code=verdict.code,
            error=verdict.text,
            trace=verdict.trace[-_MAX_KEPT:],
            position=verdict.where,
            samples=verdict.num_passed,
            checkpoint=verdict.newest,
        )
        if verdict.trace:
            self._console.detail(verdict.trace)
        if verdict.rescued:
            self._console.note("rescue", verdict.rescued, generation=number)

    def fail(self, why: str) -> NextAction:
        """Say why the job fails, and end it."""
        self._console.event(f"failed: {why}")
        return NextAction(FAILED)

    def _finish(self, verdict: Verdict | None = None, *, is_first: bool) -> NextAction:
        lost = f"; {_saved(verdict)}" if verdict and verdict.is_unsaved else ""
        if is_first and not lost:
            directory.note_finished(self._options.checkpoint_dir, self._options.program)
        number = self._crashes.num_restarts
        restarts = f" and {counted(number, 'restart')}" if number else ""
        seconds = time.time() - self.started_at
        self._console.event(f"finished after {seconds:.0f} s{restarts}{lost}")
        if self.is_plain:
            self._console.event(
                "warning: the program did not use elasticrun: every replica trained by "
                "itself on all data, and nothing was saved"
            )
        return NextAction(0)

    def _has_finished(self) -> bool:
        where, program = self._options.checkpoint_dir, self._options.program
        return directory.finished_at(where, program) is not None

    def _end_stopped(self, verdict: Verdict, code: int, number: int) -> NextAction:
        if verdict.kind in (EndKind.CRASHED, EndKind.LEFT):
            problem = f"stopped without a new checkpoint: {verdict.text}"
            self._say_crash(problem, verdict, number)
            return NextAction(code, problem=problem)
        saved = _saved(verdict)
        self._console.event(f"stopped; {saved}{self._options.how_to_go_on}")
        return NextAction(code, problem=saved if verdict.is_unsaved else "")

    def _go_on_without(self, verdict: Verdict, number: int) -> NextAction:
        """Restart because a node is gone, which counts as no crash."""
        if self._has_finished():
            return self._finish(is_first=False)
        self._console.event(
            f"generation {number} has lost a node: {verdict.text}; "
            + (f"{verdict.rescued}; " if verdict.rescued else "")
            + f"restarting {start_from(verdict.newest)}",
            "restart",
            cause="a node is gone",
        )
        return NextAction()

    def _rescale(self, verdict: Verdict, number: int) -> NextAction:
        """Restart with another size, which counts as no crash however it came to it."""
        if verdict.kind == EndKind.CRASHED:
            why = verdict.text.partition("\n")[0]
            self._say_crash(
                f"generation {number} ended at {verdict.where} without saving: "
                f"{why}; rescaling {start_from(verdict.newest)}",
                verdict,
                number,
            )
        elif verdict.is_unsaved:
            saved = _saved(verdict)
            self._console.event(
                f"generation {number} ended at {verdict.where}; {saved}"
            )
            return NextAction(problem=saved)
        return NextAction()

    def _restart(self, verdict: Verdict, number: int) -> NextAction:
        delay, text = self._crashes.decide(verdict, number)
        first, newline, rest = verdict.text.partition("\n")
        self._say_crash(
            f"generation {number} crashed at {verdict.where}: {first}"
            + _rescued(verdict)
            + ("" if delay is None else f"; {text}")
            + newline
            + rest,
            verdict,
            number,
        )
        if delay is None:
            return self.fail(text)
        self._console.note("restart", text, cause="a crash", delay=delay)
        return NextAction(delay=delay)


def _rescued(verdict: Verdict) -> str:
    """Return what was rescued after a replica was killed, or why it was not."""
    if verdict.rescued:
        return f"; {verdict.rescued}"
    if verdict.no_rescue and verdict.code < 0:
        return f"; no rescue: {verdict.no_rescue}"
    return ""


def _saved(verdict: Verdict) -> str:
    newest = verdict.newest
    if verdict.is_unsaved:
        lost = f"training after checkpoint {newest}" if newest else "everything"
        return f"the last save failed (rank 0's log says why): {lost} is lost"
    return f"checkpoint {newest} is saved" if newest else "nothing was saved"
