"""The boundary: the moment between two batches at which the job saves or stops.

The road of a save, and of a stop, from the request to the committed manifest; in
brackets, the thread.

    request   a signal, which also starts the grace; the time since the
              last save; request_checkpoint(), request_stop(); the
              launcher                                                [watcher]
    agree     rank 0 asks all; each answers with the boundary that it
              has passed, and promises to wait at the next one
              (`Gate.promise`); the largest + 1 is decided            [watchers]
    reach     whoever has not come so far runs on to it. What batches
              or epochs make due is due on all, and not agreed on     [training]
    put off   gradients wait for a step: a later boundary acts        [training]
    save      saving/saver.py: sync and capture, then write; for a
              stop training waits for that                   [training, writer]
    commit    rank 0 writes the manifest, which makes the directory
              a checkpoint; a stop has come to its checkpoint         [writer]
    settle    a boundary after that raises or warns of a failure      [training]
    stop      JobStopped is raised, and the program unwinds           [training]
    close     the writer ends; the watcher, rank 0's last; the process
              group; the process exits with the code of the stop      [training]

`save_all_states()` is called on all replicas at once, and begins at "save".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.storage.place import Place
from elasticrun.errors import STOPPED, AgreementError, JobStopped
from elasticrun.job.progress import Progress
from elasticrun.logger import Logger
from elasticrun.replicas.agreement import CHECKPOINT, STOP, Decision, Gate
from elasticrun.replicas.watcher import Watcher
from elasticrun.saving.saver import Saver
from elasticrun.saving.schedule import Schedule

logger = Logger(__name__)

_MOST_PUT_OFF = 64  # Boundaries: most programs accumulate over fewer batches.
_MANY_STEPS = 500  # More than a program does by hand before its first loop.


class Boundary:
    """Counts boundaries, and saves or stops at those where that is due.

    Everything but the requests is for the training thread.

    Args:
        gate: Holds what the replicas have agreed to do, and at which boundary.
        watcher: Brings requests to the other replicas, in a thread of its own.
        saver: None without a checkpoint directory: nothing is saved then.
        schedule: Knows when to save without a request.
        progress: Knows where the program is.
        rank: Rank 0 says in the log what happens.
        grace: Seconds that the last checkpoint may take.
        is_launched: Whether elasticrun's launcher says that the job has stopped.

    Attributes:
        decides: Whether anything may be decided by the time that steps take.
        exit_code: The exit code with which the job has stopped, or None.
        is_followed: Whether successors on this machine wait for the job to stop. Set on
            the replica that is asked, in another thread, before that.
        remember: Called at each boundary, before anything is saved there, with its
            number, the position, and whether the states are all there is; None where
            no death of another replica could be survived.
    """

    decides = True

    def __init__(
        self,
        *,
        gate: Gate,
        watcher: Watcher,
        saver: Saver | None,
        schedule: Schedule,
        progress: Progress,
        rank: int,
        grace: float,
        is_launched: bool = False,
    ) -> None:
        self._gate = gate
        self._watcher = watcher
        self._saver = saver
        self._schedule = schedule
        self._progress = progress
        self._rank = rank
        self._grace = grace
        self._is_launched = is_launched
        self._last_save: tuple[int, Position] | None = None
        self._has_flight_ended = False  # Set in the thread that wrote the save.
        self._reasons: list[Callable[[], bool]] = []
        self._decider: Callable[[], bool] | None = None
        self._num_put_off = 0
        self._put_off: Decision | None = None  # Agreed on, and to be done later.
        self._num_steps_outside = 0
        self._stepped_outside_at = -1  # After which boundary.
        self._has_warned = False
        self.exit_code: int | None = None
        self.is_followed = False
        self.remember: Callable[[int, Position, bool], None] | None = None
        if saver is not None:
            saver.on_end = self._note_flight_ended

    # Requests, from any thread.

    def request_checkpoint(self) -> None:
        """Ask for a checkpoint at the next boundary that all replicas can meet at."""
        self._watcher.request(CHECKPOINT, cause="request_checkpoint()")

    def request_stop(self, *, cause: str = "request_stop()") -> None:
        """Ask all replicas to save and exit with code 75 at a common boundary."""
        self._watcher.request(STOP, cause=cause, exit_code=STOPPED)

    # Programs without boundaries.

    def count_step_outside(self) -> None:
        """Note that an optimizer steps while no loop runs; say it once of many steps.

        Without a word, a loop over `itertools.cycle(loader)` or over batches that come
        from elsewhere would train for days, and neither save nor stop.
        """
        if self._stepped_outside_at != self._gate.number:
            self._stepped_outside_at, self._num_steps_outside = self._gate.number, 0
        self._num_steps_outside += 1
        is_many = self._num_steps_outside >= _MANY_STEPS
        if is_many and not self._has_warned and self._rank == 0:
            logger.warning(
                "%s. The job saves and stops only between two batches of such a loop "
                "and at the end of an epoch. Until then nothing is saved, and a stop "
                "ends the program without a checkpoint. Loop over the "
                "AdaptiveDataLoader itself, or its `batches(n)`, not over "
                "itertools.cycle or batches taken from it before. If the program draws "
                "its own batches, loop with `for step in remaining_steps_until(n):`.",
                self.why_no_boundary,
            )
        self._has_warned |= is_many

    @property
    def why_no_boundary(self) -> str | None:
        """Why no boundary comes, if optimizers have stepped since the last one."""
        if self._stepped_outside_at != self._gate.number:
            return None
        return (
            f"an optimizer has stepped {self._num_steps_outside} times since the last "
            "boundary, outside of any loop over an AdaptiveDataLoader"
        )

    # Boundaries.

    def reach(self, *, ends_epoch: bool = False) -> None:
        """Count the boundary that the program is at, and do what is due there.

        Most of the time that is nothing, and costs a few comparisons: no lock, no
        system call, no message.

        Args:
            ends_epoch: Whether it is that of an epoch, not of a batch.
        """
        if self.exit_code is not None:
            self.check_not_stopped()
        if self.remember is not None:  # First: the gate may say that a replica is gone.
            number, position = self._gate.number + 1, self._progress.position
            self.remember(number, position, not self.is_waiting)
        decision = self._gate.arrive()
        if self._gate.number == 1 and self._saver is not None:
            self._saver.prepare()  # Now that an optimizer has its state.
        if self._has_flight_ended:
            self._settle()
        if ends_epoch:
            self._schedule.note_epoch(self._gate.number)
        is_due = self._gate.number >= self._schedule.due_at
        if decision is not None or is_due or self._put_off is not None:
            self._act(decision)

    def save_at_next(self) -> None:
        """Let the next boundary save, also if that is not due. Collective."""
        if self._saver is not None:
            self._schedule.due_at = 0

    def finish_epochs(self) -> None:
        """Save the end of an epoch loop, unless its last boundary has just done so."""
        if self._last_save == (self._gate.number, self._progress.position):
            assert self._saver is not None  # Or there would be no last save.
            self._saver.finish()
            if not self._saver.has_failed:
                return
        self.save()

    def defer_while(self, reason: Callable[[], bool]) -> None:
        """Put saves and stops off to a later boundary while `reason()` holds.

        It must hold on all replicas or on none, or these would act at different ones.
        """
        self._reasons.append(reason)

    @property
    def is_waiting(self) -> bool:
        """Whether there is a reason now to put saves and stops off."""
        return any(reason() for reason in self._reasons)

    def decide_by(self, decider: Callable[[], bool]) -> None:
        """Call a function before saves that are due; it may decide what they hold.

        All replicas call it, and it returns whether it has decided anything: such a
        save is awaited, so that all learn at the same boundary what became of it.
        """
        self._decider = decider

    @property
    def has_decider(self) -> bool:
        """Whether `decide_by` was called."""
        return self._decider is not None

    def decide(self) -> bool:
        """Let it be decided what the save here is to hold; return if anything was."""
        if self._saver is None or self._decider is None or not self.decides:
            return False
        self._saver.finish()  # So that the save comes right after the decision.
        return self._decider()

    def _act(self, decision: Decision | None) -> None:
        """Do what is agreed on, or the save that is due, or put it off once more."""
        # A stop goes before a save that was put off.
        if self._put_off is not None and (decision is None or decision.kind != STOP):
            decision = self._put_off
        if self.is_waiting and self._may_put_off():
            self._put_off = decision
            return
        self._num_put_off, self._put_off = 0, None
        if decision is not None and decision.kind == STOP:
            self._stop(decision)
        self.save(is_awaited=self.decide())

    def _may_put_off(self) -> bool:
        """Count one more boundary; a reason that does not pass counts for nothing."""
        if self._num_put_off < _MOST_PUT_OFF:
            self._num_put_off += 1
            return True
        logger.warning(
            "for %d boundaries gradients were computed, but no optimizer has stepped. "
            "Gradients are in no checkpoint, so a restart would lose them. To "
            "accumulate them, use a larger batch_size and max_local_batch_size.",
            self._num_put_off,
        )
        return False

    # Saves.

    def save(
        self,
        *,
        timeout: float | None = None,
        is_awaited: bool = True,
        is_left: bool = False,
    ) -> Place | None:
        """Save here. Collective.

        Args:
            timeout: Seconds to wait for other ranks; None for half an hour.
            is_awaited: Whether to return only when the checkpoint is committed, not
                once all states are captured.
            is_left: Whether successors force it to the disk.

        Returns:
            Its directory; None if it is not awaited, could not be written, or there is
            no checkpoint directory.
        """
        if self._saver is None:
            return None
        position = self._progress.position
        with self._schedule.saving():
            checkpoint = self._saver.save(
                position.encode(),
                timeout=timeout,
                is_awaited=is_awaited,
                is_left=is_left,
            )
        self._schedule.note_saved(self._gate.number, seconds=self._saver.seconds)
        self._watcher.note_saved(self._schedule.interval)
        self._last_save = (self._gate.number, position)
        return None if checkpoint is None else checkpoint.path

    def close(self) -> None:
        """Wait for what is in flight, as long as a stop may take."""
        if self._saver is not None:
            self._saver.close(timeout=self._grace)

    def _note_flight_ended(self) -> None:
        """Let the next boundary settle the save: called in the thread that wrote it."""
        assert self._saver is not None  # It calls this.
        self._has_flight_ended = True
        self._schedule.note_flight_ended(self._saver.seconds)
        # What is due by time has waited for this.
        self._watcher.save_after(self._schedule.interval)

    def _settle(self) -> None:
        """Warn of a save in flight that has failed, or raise what it came to."""
        self._has_flight_ended = False
        assert self._saver is not None
        self._saver.settle()

    # Stops.

    def _stop(self, decision: Decision) -> NoReturn:
        """Save, and stop. Collective."""
        self._watcher.on_stopping()  # The boundary came in time: its clock stops.
        try:
            path = self.save(timeout=self._grace, is_left=self.is_followed)
        except AgreementError as error:
            logger.error("stopping without a new checkpoint: %s", error)
            path = None
        if self._rank == 0:
            ending = f"saved {path}" if path else "nothing was saved"
            if not self._is_launched:
                resumes = ", and the same command resumes" if path else ""
                ending += f". The exit code is {decision.exit_code}{resumes}"
            logger.log(
                logging.INFO if path and self._is_launched else logging.WARNING,
                "stopping at %s because of %s; %s",
                self._progress.position,
                decision.cause,
                ending,
            )
        self.exit_code = decision.exit_code
        raise JobStopped(decision.exit_code)

    def check_not_stopped(self) -> None:
        """Stop a program once more that has caught its stop and goes on.

        It would count the loop that it has left as finished, and lose what remained of
        it.
        """
        if self.exit_code is None:
            return
        logger.warning(
            "the job stopped at %s, but the program caught JobStopped and went on; "
            "stopping again. Around a loop, write `except Exception:` in place of "
            "`except:` or `except BaseException:`, or raise it again.",
            self._progress.position,
        )
        raise JobStopped(self.exit_code)


class DeferredError:
    """Keeps what is raised where an exception would be lost, to raise it later.

    After a `break`, the end of the epoch is saved while Python closes the generator of
    the loop, and swallows what is raised there. The next use of the job raises it, or
    the process ends with it.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __bool__(self) -> bool:
        return self.error is not None

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what is raised within."""
        try:
            yield
        except BaseException as error:
            self.error = self.error or error

    def raise_once(self) -> None:
        """Raise what was kept, if anything was."""
        error, self.error = self.error, None
        if error is not None:
            raise error
