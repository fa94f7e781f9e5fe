"""A save, from its boundary to the committed checkpoint, in `save` and `_write`.

job/boundary.py says how all replicas come to one boundary. From there they go in step;
in brackets, the thread.

    finish     the save before ends, if it is in flight                [training]
    sync       each state asks the other replicas for what it needs    [training]
    capture    each copies its states into memory, but not if awaited   [training]
    begin      rank 0 makes a draft, a directory without a manifest    [writer]
    write      each writes its files there, and reports them to rank 0 [writer]
    commit     rank 0 has all reports, and writes the manifest: with
               that the draft is a checkpoint; it tells all            [writer]
    prune      rank 0 removes checkpoints that are too old             [writer]
    conclude   states are told of the commit; a failure is a warning,
               or raised                                               [training]

A save is *in flight* while the writer's thread writes it and training goes on; a
boundary after its end *settles* it, that is, concludes it. An *awaited* save is written
in the training thread, without a copy, and so is one that does not fit into memory. One
that is *left* to successors on this machine is committed without being forced to the
disk, unless it is the first. They read it from the memory that the system has it in,
and once they train, their rank 0 forces it, as a save in flight. So is one that a
replica makes alone, if the launcher will start others here.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.registry import Registry, hint_of_renaming
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import (
    AgreementError,
    CheckpointError,
    CheckpointWarning,
    warn_at_program,
)
from elasticrun.logger import Logger
from elasticrun.replicas.exchange import (
    SAVE_BEGUN,
    SAVE_ENDED,
    SAVE_WRITTEN,
    Exchange,
    RankZeroError,
)
from elasticrun.replicas.membership import Membership
from elasticrun.replicas.store import JobStore
from elasticrun.saving.opening import Start
from elasticrun.saving.writing import (
    Capture,
    Capturer,
    CheckpointWriter,
    SaveFailed,
    WriteReport,
)

logger = Logger(__name__)

_PATIENCE = 1800.0  # Seconds for other ranks at a checkpoint that nobody hurries.
_HEARING_SECONDS = 30.0  # Of those that live, only one that hangs takes as long.
_GIVING_UP_SECONDS = 1.0  # Until a thread that waits for other ranks looks up.
SaveOutcome = Checkpoint | str | BaseException


class SaveInFlight(threading.Thread):
    """A thread that writes one save, and ends with it.

    Not a thread for all saves: the interpreter waits at its end for threads that run,
    and dies if one that it does not wait for is in C++.

    Args:
        write: Writes the checkpoint, and returns it, or why it could not be written.
        on_end: Called in the thread when there is an outcome, unless it was given up.
        is_saving: Whether it writes; else it forces to the disk what was left.

    Attributes:
        outcome: What `write` returned or raised, once it has.
        given_up: Set when it is to wait for other ranks no more.
    """

    def __init__(
        self,
        number: int,
        states: Sequence[BaseState],
        write: Callable[[], Checkpoint | str],
        *,
        on_end: Callable[[], object],
        is_saving: bool,
    ) -> None:
        super().__init__(name="elasticrun-writer", daemon=True)
        self.number = number
        self.states = states
        self.is_saving = is_saving
        self.outcome: SaveOutcome | None = None
        self._write = write
        self._on_end = on_end
        self.given_up = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for the end; return whether it came in time."""
        self.join(timeout)
        return not self.is_alive()

    def run(self) -> None:
        """Write; called by `start`, in this thread."""
        try:
            self.outcome = self._write()
        except BaseException as error:
            self.outcome = error
        if not self.given_up.is_set():
            self._on_end()


class Saver:
    """One replica's part in saving.

    At most one save is in flight: what a thread of its own writes while training goes
    on. Everything here but `_write` and `gone` is for the training thread.

    Args:
        is_async: Whether saves may be in flight; costs memory for all that is saved.

    Attributes:
        gone: The ranks that take part no more, and what became of them; rank 0's
            watcher adds to it, in its own thread.
        on_end: Called in another thread when a save in flight has ended, and is to be
            settled.
        on_captured: Called with the position when all that is saved of it has been
            captured; in the training thread.
        on_committed: Called on the rank that has committed a checkpoint, with that, for
            how many seconds training has waited, and after how many it was committed;
            in the thread that has written it.
        newest: The newest committed checkpoint. It changes when a flight ends; whoever
            loads from it waits for that first.
        has_failed: Whether the last save that has ended came to nothing.
        seconds: How long the last save took, until it was committed.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        registry: Registry,
        membership: Membership,
        start: Start,
        *,
        is_async: bool = True,
    ) -> None:
        self._registry = registry
        self._rank = membership.rank
        self._checkpoints = checkpoints
        self._capture_as = partial(Capturer, registry, world_size=membership.world_size)
        self._capturer = self._capture_as(rank=self._rank, is_async=is_async)
        self._writer = CheckpointWriter(
            checkpoints, membership, generation=start.generation
        )
        self.gone: dict[int, str] = {}
        self._exchange = membership.exchange_over(membership.store, gone=self.gone)
        # The writer's thread waits for other ranks, so it has a client of its own.
        self._exchange_in_flight = self._exchange
        if is_async and membership.store is not None:
            store = JobStore(membership.store.address, None)
            self._exchange_in_flight = membership.exchange_over(store, gone=self.gone)
        # What the others must have heard before rank 0 leaves, which serves the store.
        self._asked: str | None = None
        self.on_end: Callable[[], object] = lambda: None
        self.on_captured: Callable[[dict[str, Any]], object] = lambda _: None
        self.on_committed: Callable[[Checkpoint, float, float], object] = lambda *_: (
            None
        )
        self._number = start.number
        self._start = start
        self._has_hinted = False
        self._is_saving = False
        self._to_force = start.newest if start.is_unforced else None
        self._is_followed_here = membership.environment.is_followed_here
        self._asked_at = 0.0
        self._paused: float | None = None  # Of a save in flight.
        self._flight: SaveInFlight | None = None
        # Its thread may still wait for other ranks.
        self._given_up: SaveInFlight | None = None
        self.newest = start.newest
        self.num_failed = 0
        self.has_failed = False
        self.seconds = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a save is in flight; from any thread."""
        flight = self._flight
        return flight is not None and flight.outcome is None

    def save(
        self,
        position: dict[str, Any],
        *,
        timeout: float | None = None,
        is_awaited: bool = True,
        is_left: bool = False,
    ) -> Checkpoint | None:
        """Save, in the steps at the top. Collective, at the same point everywhere.

        Args:
            timeout: Seconds to wait for the other ranks; None for half an hour.
            is_awaited: Whether to return only when it is committed, not once everything
                is captured.
            is_left: Whether successors on this machine force it to the disk; as rank 0
                has it.

        Returns:
            The checkpoint; None if it is in flight, or could not be written (a warning
            says why; the one before is untouched).
        """
        timeout = _PATIENCE if timeout is None else timeout
        with self._not_within_itself():
            # One save at a time: the one before ends, and is concluded.
            self._asked_at, self._paused = time.perf_counter(), None
            self._force_what_was_left()
            self.finish(timeout=timeout)
            if is_left:
                self._capturer.forget()  # The last one: the files may have its pages.
            number, begun = self._take_number(), time.perf_counter()
            states = list(self._registry)
            try:
                # Collective, so it comes before a rank may fail alone.
                for state in states:
                    state.sync()
                capture = self._capture(number, position, is_awaited=is_awaited)

                # Training goes on meanwhile if nothing that is written can change.
                write = partial(
                    self._write,
                    capture,
                    timeout=timeout,
                    begun=begun,
                    is_forced=not is_left,
                )
                may_fly = not is_awaited and capture.is_in_memory
                if may_fly and self._start_flight(number, states, write):
                    return None
                outcome: SaveOutcome
                try:
                    outcome = write(self._exchange)
                except Exception as error:
                    outcome = error
            finally:
                for state in states:
                    state.after_save()
            return self._conclude(number, outcome, states)

    def _start_flight(
        self,
        number: int,
        states: Sequence[BaseState],
        write: Callable[[Exchange], Checkpoint | str],
        *,
        is_saving: bool = True,
    ) -> bool:
        """Begin to write in a thread; return whether there could be one."""
        exchange = self._exchange_in_flight
        flight = SaveInFlight(
            number,
            states,
            partial(write, exchange),
            on_end=self.on_end,
            is_saving=is_saving,
        )
        exchange.given_up = flight.given_up
        self._paused = time.perf_counter() - self._asked_at
        try:
            flight.start()
        except RuntimeError:  # So many threads already, or the interpreter ends.
            self._paused = None
            return False
        self._flight = flight
        return True

    def _force_what_was_left(self) -> None:
        """Begin to force to the disk what the generation before has left to this one.

        On rank 0, once: when training goes on, or else before the next save, or the
        end.
        """
        left, self._to_force = self._to_force, None
        if left is None:
            return
        if not self._start_flight(
            left.number, (), lambda _: self._writer.force(left), is_saving=False
        ):
            self._writer.force(left)

    def _write(
        self,
        capture: Capture,
        exchange: Exchange,
        *,
        timeout: float,
        begun: float,
        is_forced: bool,
    ) -> Checkpoint | str:
        """Write and commit, all ranks together; return why not if that has failed.

        In the writer's thread if the save is in flight, else in the training thread.
        """
        number, newest, writer = capture.number, self.newest, self._writer
        num_keys = exchange.num_keys
        try:
            # Rank 0 makes the directory; the others wait for it.
            is_forced = exchange.decide_on_rank_0(
                SAVE_BEGUN.format(number),
                # The first one is: nothing else would be left after a power cut.
                partial(writer.begin, capture, is_forced=is_forced or newest is None),
                timeout=2 * timeout,
            )
            # Each rank writes its own files, and tells rank 0 of them.
            own = writer.write_files(capture, newest, is_forced=is_forced)
            if self._rank != 0:
                exchange.remove_keys(num_keys)  # Rank 0 is past the saves before.
                self._report(own, number, exchange)
            # Rank 0 commits when all have written theirs; the others wait for that.
            told = exchange.decide_on_rank_0(
                SAVE_ENDED.format(number),
                lambda: writer.commit(own, exchange, timeout=timeout),
                timeout=2 * timeout,
                is_heard=True,
            )
        except Exception as error:
            writer.abandon()
            return _why_not_saved(error, patience=2 * timeout)
        finally:
            self._asked = exchange.asked
        self.seconds = time.perf_counter() - begun
        checkpoint = self.newest = writer.committed(number, told)
        if self._rank == 0:
            # All have reported: they are past the saves before, too.
            exchange.remove_keys(num_keys)
            logger.info("saved %s in %.2f s", checkpoint.path, self.seconds)
            paused = self._paused
            paused = time.perf_counter() - self._asked_at if paused is None else paused
            self.on_committed(checkpoint, paused, self.seconds)
            if is_forced:
                writer.prune()
        return checkpoint

    @contextmanager
    def _not_within_itself(self) -> Iterator[None]:
        """Refuse a save that a state asks for while it is saved."""
        if self._is_saving:
            raise CheckpointError(
                "a state's sync, save or after_save asked for a save while it runs in "
                "one. Ask for it after a batch, or call request_checkpoint()."
            )
        self._is_saving = True
        try:
            yield
        finally:
            self._is_saving = False

    def prepare(self) -> None:
        """Do in the background what the first save waits for; training goes on."""
        self._capturer.prepare()
        self._force_what_was_left()

    def _take_number(self) -> int:
        number = self._number
        if number == self._start.number:
            self._warn_of_renaming()
        self._number += 1
        return number

    def _capture(
        self, number: int, position: dict[str, Any], *, is_awaited: bool
    ) -> Capture:
        """Copy what this rank saves into memory, or note what will write it."""
        try:
            capture = self._capturer.capture(
                number, position, self.newest, is_awaited=is_awaited
            )
        except Exception as error:
            if self._rank == 0:
                self._exchange.announce_failure(SAVE_BEGUN.format(number), error)
                self._asked = self._exchange.asked
            else:
                report = WriteReport(Capture(number, position), error=error)
                self._exchange.report(SAVE_WRITTEN.format(number), report.encode())
            raise
        self.on_captured(position)
        return capture

    def _report(self, own: WriteReport, number: int, exchange: Exchange) -> None:
        """Report to rank 0 what this rank wrote; raise a mistake in its states."""
        topic = SAVE_WRITTEN.format(number)
        exchange.report(topic, own.encode(), parts=own.encode_gathered())
        if own.error is not None and own.is_mistake:
            raise own.error

    def settle(self) -> None:
        """Conclude a save in flight that has ended: warn of a failure, or raise it."""
        flight = self._flight
        if flight is None or flight.outcome is None:
            return
        flight.wait()  # What is left of its thread.
        self._flight = None
        self._conclude(flight.number, flight.outcome, flight.states)

    def finish(self, *, timeout: float = 2 * _PATIENCE) -> None:
        """Wait until no save is in flight, and settle it."""
        flight = self._flight
        if flight is None:
            return
        if not flight.wait(timeout):
            flight.given_up.set()
            self._flight, self._given_up = None, flight
            self.has_failed = True
            if flight.is_saving:
                raise AgreementError(
                    f"the save of checkpoint {flight.number}, which had begun before, "
                    f"did not end within {timeout:g} s. The disk may hang, or another "
                    "replica; look at their logs. The checkpoint before it is "
                    "untouched."
                )
            raise AgreementError(
                f"checkpoint {flight.number}, from which this generation has resumed, "
                f"could not be forced to the disk within {timeout:g} s. The disk may "
                "hang. The checkpoint is whole, but a power cut may cost it."
            )
        self.settle()

    def save_alone(
        self,
        position: dict[str, Any],
        gathered: Mapping[str, Mapping[int, bytes]],
        *,
        why: str,
        is_owner: bool,
        timeout: float,
    ) -> Checkpoint:
        """Save on this replica alone, which is not collective; see job/rescue.py.

        Args:
            gathered: The small states of the ranks that live, by name and rank.
            is_owner: Whether this machine's rank 0 has the directory, and lives.
            timeout: Seconds to wait for a save in flight.

        Returns:
            The checkpoint; the newest one if that is not behind the position.
        """
        try:
            self.finish(timeout=timeout)
        except Exception as error:  # It has lost a replica, too.
            logger.info("the save in flight has ended: %s", error)
        newest = self.newest
        if newest is not None and not _is_behind(newest, position):
            return newest
        if not is_owner:
            self._checkpoints.acquire()
        self._capturer.forget()
        capturer = self._capture_as(rank=0, is_async=False)
        begun = time.perf_counter()
        capture = capturer.capture(self._take_number(), position, newest)
        self.on_captured(position)
        is_forced = newest is None or not self._is_followed_here
        self.newest = self._writer.write_alone(
            capture, newest, gathered, why=why, is_forced=is_forced
        )
        seconds = time.perf_counter() - begun
        self.on_committed(self.newest, seconds, seconds)
        return self.newest

    def close(self, *, timeout: float) -> None:
        """Finish what is in flight, for `timeout` seconds at most; end its thread."""
        try:
            self._force_what_was_left()
            self.finish(timeout=timeout)
            # Not after an exception: the program did not come to register everything.
            if sys.exc_info()[0] is None and not hasattr(sys, "last_type"):
                self._warn_of_renaming()
        finally:
            if self._given_up is not None:
                self._given_up.wait(_GIVING_UP_SECONDS)
            self._capturer.forget()
            if self._rank == 0 and self._asked is not None:
                self._exchange.wait_until_heard(self._asked, timeout=_HEARING_SECONDS)

    def _warn_of_renaming(self) -> None:
        """Warn once if a state of the checkpoint seems to have another name now."""
        if self._rank != 0 or self._has_hinted or self._start.newest is None:
            return
        text = hint_of_renaming(
            self._start.newest,
            not_found=self._registry.not_found,
            unclaimed=self._registry.carried_over(self._start.newest),
        )
        if text is not None:
            self._has_hinted = True
            warn_at_program(text, CheckpointWarning)

    def _conclude(
        self, number: int, outcome: SaveOutcome, states: Sequence[BaseState]
    ) -> Checkpoint | None:
        """Return or raise what became of a save; in the training thread.

        A failure that leaves the training intact is a warning. Of a commit the states
        that were captured are told.
        """
        self.has_failed = not isinstance(outcome, Checkpoint)
        self.num_failed += self.has_failed
        if isinstance(outcome, BaseException):
            raise outcome
        for state in states if isinstance(outcome, Checkpoint) else ():
            state.committed()
        told, self._writer.warnings[:] = list(self._writer.warnings), []
        for text in told:
            warn_at_program(text, CheckpointWarning)
        if isinstance(outcome, Checkpoint):
            return outcome
        warn_at_program(
            f"checkpoint {number} was not saved: {outcome.rstrip('.')}. "
            + (
                f"The newest checkpoint is {self.newest.path}."
                if self.newest
                else "There is no checkpoint yet."
            ),
            CheckpointWarning,
        )
        return None


def _is_behind(checkpoint: Checkpoint, position: dict[str, Any]) -> bool:
    own, other = map(Position.decode, (dict(checkpoint.manifest.position), position))
    return (own.place, own.index) < (other.place, other.index)


def _why_not_saved(error: Exception, *, patience: float) -> str:
    """Return why a save failed if training can go on."""
    if isinstance(error, SaveFailed):
        return str(error)
    if isinstance(error, RankZeroError):
        if error.kind == SaveFailed.__name__:
            return str(error)
        raise CheckpointError(f"rank 0: {error}") from error
    if isinstance(error, TimeoutError):
        raise AgreementError(
            "rank 0 did not come to the boundary where all agreed to save within "
            f"{patience:g} s. Look at its log: it may hang, or run other code than the "
            "others."
        ) from error
    if isinstance(error, ConnectionError):
        raise AgreementError(
            f"rank 0 was gone before the checkpoint was committed ({error}). Look "
            "at its log; start the job again, it resumes at the last checkpoint."
        ) from error
    raise error
