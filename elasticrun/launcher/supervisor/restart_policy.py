"""Decides after a generation: start another one, or end with an exit code."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass

from elasticrun.checkpoint.storage.lock import ENDS_JOB
from elasticrun.checkpoint.storage.place import Place
from elasticrun.errors import BY_SIGNAL, FAILED, STOP_CODES, STOPPED, counted
from elasticrun.launcher import directory
from elasticrun.launcher.endings import EndKind, Outcome, describe, first_cause
from elasticrun.launcher.nodes.nodes import RoundPlan
from elasticrun.launcher.options import Options
from elasticrun.launcher.supervisor.generation import Generation
from elasticrun.launcher.terminal.console import Console

_CAUSES_KEPT = 10
_FREE = 3  # Restarts without a pause, after what is no failure of the program.
_LONGEST_DELAY = 60.0
_SIGNAL_OF = {code: number.name for number, code in BY_SIGNAL.items()}
_LOST = "another job may use its checkpoints now, so it is not started again"
_MAX_TRACE = 20_000
_MAX_KEPT = 2_000  # Of a trace, in the job's events.


class CrashHistory:
    """Remembers the crashes of a job, and decides whether it may restart.

    A checkpoint between two crashes lets it have all its restarts again.

    Args:
        newest_at_start: The number of the newest checkpoint when the launcher started.

    Attributes:
        num_restarts: Restarts after crashes so far.
        num_used: Restarts since the last newer checkpoint, which the budget limits.
        newest_at_crash: The newest checkpoint at the last crash.
        causes: What they were, the last ones.
        has_trained: Whether a batch was trained on this node.
    """

    def __init__(self, max_restarts: int, *, newest_at_start: int) -> None:
        self.num_restarts = self.num_used = self.newest_at_crash = 0
        self.causes: list[str] = []
        self.has_trained = False
        self.newest_at_start = newest_at_start
        self._max_restarts = max_restarts
        self._has_job_trained = False

    def adopt(self, round_: RoundPlan) -> None:
        """Take over what the other nodes know, so that all nodes decide the same."""
        self._has_job_trained = self._has_job_trained or round_.has_trained
        self.newest_at_crash = round_.newest_at_crash
        self.num_used = round_.num_used

    def learn(self, outcome: Outcome) -> None:
        """Learn from how a generation ended."""
        self._has_job_trained = self._has_job_trained or outcome.has_trained

    def decide(self, outcome: Outcome, generation: int) -> tuple[float | None, str]:
        """Count a crash, and decide whether a restart follows.

        A node whose own replica fails before it has trained anything is at fault
        itself, and so is a program that nowhere has; but not for a signal that somebody
        else has sent.

        Returns:
            Seconds to wait before the restart, or None if there is to be none; and
            what to say about that.
        """
        text = f"generation {generation}: {outcome.text}".partition("\n")[0]
        self.causes = [*self.causes, text][-_CAUSES_KEPT:]
        newest = outcome.newest
        has_trained = self.has_trained if outcome.is_here else self._has_job_trained
        is_bug = not (has_trained or outcome.is_from_outside)
        if is_bug and newest <= self.newest_at_start:
            return None, "this was before the first batch, so it is not tried again"
        most = self._max_restarts
        if newest > self.newest_at_crash:
            self.num_used = 0
        self.newest_at_crash = newest
        if self.num_used >= most:
            return None, _describe_spent(most)
        self.num_used += 1
        self.num_restarts += 1
        is_free = outcome.is_from_outside and not outcome.is_out_of_memory
        delay = self.delay(num_free=_FREE if is_free else 1)
        return delay, (
            f"restart {self.num_used} of {most}"
            + (f" in {delay:.0f} s " if delay else " ")
            + start_from(newest)
        )

    def delay(self, *, num_free: int) -> float:
        """Return the seconds to wait: none at first, then each time twice as many."""
        if self.num_used <= num_free:
            return 0.0
        return min(_LONGEST_DELAY, 2.0 ** (self.num_used - num_free - 1))


def start_from(newest: int) -> str:
    """Return where a restart begins, for people."""
    return f"from checkpoint {newest}" if newest else "from the beginning"


def _describe_spent(most: int) -> str:
    if most == 0:
        return "no restarts are allowed (--max-restarts 0)"
    return (
        "no restarts are left (--max-restarts): the last new checkpoint is "
        f"{counted(most, 'restart')} ago"
    )


class Stop(enum.Enum):
    """Why the running generation was asked to save and exit."""

    NONE = 0
    SCALE = 1
    END = 2


@dataclass(frozen=True)
class NextAction:
    """What follows from the end of a generation.

    Attributes:
        exit_code: The launcher's, or None to begin another generation.
        delay: Seconds to wait before that.
        problem: Why nothing was saved, if it was to be.
    """

    exit_code: int | None = None
    delay: float = 0.0
    problem: str = ""


def outcome_of(generation: Generation, *, reason: str, place: Place) -> Outcome:
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
        return Outcome(
            kind, where=where, code=code, newest=newest, is_unsaved=is_unsaved
        )
    hint = generation.explain_kill(cause)
    return Outcome(
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


class RestartPolicy:
    """Decides what follows from an outcome, and tells the user.

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

    def decide(
        self,
        outcome: Outcome,
        *,
        number: int,
        stop: Stop,
        code: int,
        is_first: bool,
        lost: str = "",
    ) -> NextAction:
        """Decide what follows.

        Args:
            stop: Why it was to end, if it was.
            is_first: Whether this is the node that notes the end of the program.
            lost: How the job's directory was lost, if it was.
        """
        self._crashes.learn(outcome)
        if outcome.kind == EndKind.FINISHED:
            return self._finish(outcome, is_first=is_first and not lost)
        if stop is Stop.END:
            return self._end_stopped(outcome, code, number)
        is_lost = lost or ENDS_JOB in outcome.text
        if outcome.kind == EndKind.CRASHED and is_lost:
            text = f"generation {number} crashed at {outcome.where}: {outcome.text}"
            self._say_crash(text, outcome, number)
            return self.fail(lost or _LOST)
        if outcome.kind == EndKind.LEFT:
            return self._go_on_without(outcome, number)
        if stop is Stop.SCALE:
            return self._rescale(outcome, number)
        if outcome.kind == EndKind.CRASHED:
            return self._restart(outcome, number)
        signalled = _SIGNAL_OF.get(outcome.code)
        cause = f"by {signalled} to a replica" if signalled else "by itself"
        self._console.event(
            f"stopped {cause} with exit code {outcome.code}; {_saved(outcome)}"
            f"{self._options.how_to_go_on}"
        )
        return NextAction(outcome.code)

    def say_idle_end(self, cause: str) -> None:
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

    def _say_crash(self, text: str, outcome: Outcome, number: int) -> None:
        """Say what has ended a generation, and show where; what followed is in logs."""
        self._console.event(
            text,
            "crash",
            generation=number,
            rank=outcome.rank,
            code=outcome.code,
            error=outcome.text,
            trace=outcome.trace[-_MAX_KEPT:],
            position=outcome.where,
            samples=outcome.num_passed,
            checkpoint=outcome.newest,
        )
        if outcome.trace:
            self._console.detail(outcome.trace)
        if outcome.rescued:
            self._console.record("rescue", outcome.rescued, generation=number)

    def fail(self, why: str) -> NextAction:
        """Say why the job fails, and end it."""
        self._console.event(f"failed: {why}")
        return NextAction(FAILED)

    def _finish(self, outcome: Outcome | None = None, *, is_first: bool) -> NextAction:
        lost = f"; {_saved(outcome)}" if outcome and outcome.is_unsaved else ""
        if is_first and not lost:
            directory.write_finished(
                self._options.checkpoint_dir, self._options.program
            )
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

    def _end_stopped(self, outcome: Outcome, code: int, number: int) -> NextAction:
        if outcome.kind in (EndKind.CRASHED, EndKind.LEFT):
            problem = f"stopped without a new checkpoint: {outcome.text}"
            self._say_crash(problem, outcome, number)
            return NextAction(code, problem=problem)
        saved = _saved(outcome)
        self._console.event(f"stopped; {saved}{self._options.how_to_go_on}")
        return NextAction(code, problem=saved if outcome.is_unsaved else "")

    def _go_on_without(self, outcome: Outcome, number: int) -> NextAction:
        """Restart because a node is gone, which counts as no crash."""
        if self._has_finished():
            return self._finish(is_first=False)
        self._console.event(
            f"generation {number} has lost a node: {outcome.text}; "
            + (f"{outcome.rescued}; " if outcome.rescued else "")
            + f"restarting {start_from(outcome.newest)}",
            "restart",
            cause="a node is gone",
        )
        return NextAction()

    def _rescale(self, outcome: Outcome, number: int) -> NextAction:
        """Restart with another size, which counts as no crash however it came to it."""
        if outcome.kind == EndKind.CRASHED:
            why = outcome.text.partition("\n")[0]
            self._say_crash(
                f"generation {number} ended at {outcome.where} without saving: "
                f"{why}; rescaling {start_from(outcome.newest)}",
                outcome,
                number,
            )
        elif outcome.is_unsaved:
            saved = _saved(outcome)
            self._console.event(
                f"generation {number} ended at {outcome.where}; {saved}"
            )
            return NextAction(problem=saved)
        return NextAction()

    def _restart(self, outcome: Outcome, number: int) -> NextAction:
        delay, text = self._crashes.decide(outcome, number)
        first, newline, rest = outcome.text.partition("\n")
        self._say_crash(
            f"generation {number} crashed at {outcome.where}: {first}"
            + _rescued(outcome)
            + ("" if delay is None else f"; {text}")
            + newline
            + rest,
            outcome,
            number,
        )
        if delay is None:
            return self.fail(text)
        self._console.record("restart", text, cause="a crash", delay=delay)
        return NextAction(delay=delay)


def _rescued(outcome: Outcome) -> str:
    """Return what was rescued after a replica was killed, or why it was not."""
    if outcome.rescued:
        return f"; {outcome.rescued}"
    if outcome.no_rescue and outcome.code < 0:
        return f"; no rescue: {outcome.no_rescue}"
    return ""


def _saved(outcome: Outcome) -> str:
    newest = outcome.newest
    if outcome.is_unsaved:
        lost = f"training after checkpoint {newest}" if newest else "everything"
        return f"the last save failed (rank 0's log says why): {lost} is lost"
    return f"checkpoint {newest} is saved" if newest else "nothing was saved"
