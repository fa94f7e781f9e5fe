"""Saving: what a boundary asks for is captured, written now or later, and concluded."""

from __future__ import annotations

import logging
import sys
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

from elasticrun.capturing import Capture, Capturer
from elasticrun.channel import Channel
from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.control.store import JobStore
from elasticrun.errors import AgreementError, CheckpointError, CheckpointWarning
from elasticrun.flight import Flight, Outcome
from elasticrun.joining import Membership
from elasticrun.opening import Start
from elasticrun.registry import Registry
from elasticrun.renaming import hint_of_renaming
from elasticrun.writing import Contributor, Owner, Writer

logger = logging.getLogger(__name__)

_HEARING_SECONDS = 30.0  # Of those that live, only one that hangs takes as long.
_GIVING_UP_SECONDS = 1.0  # Until a thread that waits for other ranks looks up.


class Saver:
    """One replica's part in saving.

    At most one save is in flight: what a thread of its own writes while training goes
    on. Everything here but `note_gone` is for the training thread.

    Args:
        is_async: Whether saves may be in flight; costs memory for all that is saved.

    Attributes:
        on_end: Called in another thread when a save in flight has ended, and is to be
            settled.
        newest: The newest committed checkpoint. It changes when a flight ends; whoever
            loads from it waits for that first.
        num_failed: Saves that came to nothing.
        has_failed: Whether the last one that has ended did.
        seconds: How long the last save took, until it was committed.
    """

    def __init__(
        self,
        directory: CheckpointStore,
        registry: Registry,
        membership: Membership,
        start: Start,
        *,
        is_async: bool = True,
    ) -> None:
        self._registry = registry
        self._rank = membership.rank
        self._store = membership.store
        # A client that waits blocks its other users, so what is in flight has its own.
        self._store_in_flight: JobStore | None = None
        if is_async and self._store is not None:
            self._store_in_flight = JobStore(self._store.address, None)
        self._owner: Owner | None = None
        self._capturer = Capturer(
            registry,
            self._rank,
            membership.world_size,
            best=directory.keeping.best,
            is_async=is_async,
        )
        self._warnings: list[str] = []
        self._writer: Writer
        if self._rank == 0:
            self._owner = self._writer = Owner(
                directory,
                world_size=membership.world_size,
                generation=start.generation,
                warn=self._warnings.append,
            )
        else:
            self._writer = Contributor(directory, self._rank)
        self.on_end: Callable[[], object] = lambda: None
        self._number = start.number
        self._start = start
        self._has_hinted = False
        self._is_saving = False
        self._flight: Flight | None = None
        self._given_up: Flight | None = None
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
        self, position: dict[str, Any], *, timeout: float, is_awaited: bool = True
    ) -> Checkpoint | None:
        """Save. Collective, at the same point everywhere.

        Waits for the save in flight first.

        Args:
            position: The job's position, encoded.
            timeout: Seconds to wait for the other ranks.
            is_awaited: Whether to return only when it is committed, not once everything
                is captured.

        Returns:
            The checkpoint; None if it is in flight, or could not be written (a warning
            says why; the one before is untouched).

        Raises:
            Exception: What a state's `save` raised, other than OSError.
            CheckpointError: A state of another rank could not be saved; or a state has
                asked for a save while it was saved itself.
            AgreementError: Rank 0 never came to the same point, or is gone; or the save
                in flight did not end.
        """
        if self._is_saving:
            raise CheckpointError(
                "a state's sync, save or after_save asked for a save, within which it "
                "is itself called. Ask for it after a batch, or with "
                "request_checkpoint()."
            )
        self._is_saving = True
        try:
            return self._save(position, timeout=timeout, is_awaited=is_awaited)
        finally:
            self._is_saving = False

    def _save(
        self, position: dict[str, Any], *, timeout: float, is_awaited: bool
    ) -> Checkpoint | None:
        self.finish(timeout=timeout)
        number = self._number
        if number == self._start.number:
            self._hint_of_renaming()
        self._number += 1
        begun = time.perf_counter()
        try:
            for state in self._registry:
                state.sync()
            outcome = self._save_synced(
                number, position, timeout=timeout, is_awaited=is_awaited, begun=begun
            )
        finally:
            for state in self._registry:
                state.after_save()
        return None if outcome is None else self._conclude(number, outcome)

    def _save_synced(
        self,
        number: int,
        position: dict[str, Any],
        *,
        timeout: float,
        is_awaited: bool,
        begun: float,
    ) -> Outcome | None:
        """Capture and write; return what became of it, None while it is in flight."""
        try:
            capture = self._capturer.capture(number, position, self.newest)
        except Exception as error:
            self._writer.tell_mistake(number, error, Channel(self._store, timeout))
            raise
        if (
            not is_awaited
            and capture.is_in_memory
            and self._take_off(capture, timeout=timeout, begun=begun)
        ):
            return None
        try:
            return self._write(capture, Channel(self._store, timeout), begun=begun)
        except Exception as error:
            return error

    def settle(self) -> None:
        """Take note of a flight that has ended: warn of its failure, or raise it."""
        flight = self._flight
        if flight is None or flight.outcome is None:
            return
        flight.wait()  # What is left of its thread.
        self._flight = None
        self._conclude(flight.number, flight.outcome)

    def finish(self, *, timeout: float) -> None:
        """Wait until no save is in flight, and settle it.

        Raises:
            AgreementError: It did not end within `timeout` seconds.
            Exception: What the flight came to.
        """
        flight = self._flight
        if flight is None:
            return
        if not flight.wait(timeout):
            flight.give_up()
            self._flight, self._given_up = None, flight
            self.has_failed = True
            raise AgreementError(
                f"the save of checkpoint {flight.number}, which had begun before, did "
                f"not end within {timeout:g} s. The disk may hang, or another replica; "
                "look at their logs. The checkpoint before it is untouched."
            )
        self.settle()

    def close(self, *, timeout: float) -> None:
        """Finish what is in flight, for `timeout` seconds at most; end its thread.

        Raises:
            Exception: What the flight came to.
        """
        try:
            self.finish(timeout=timeout)
            # Not after an exception: the program did not come to register everything.
            if sys.exc_info()[0] is None and not hasattr(sys, "last_type"):
                self._hint_of_renaming()
        finally:
            if self._given_up is not None:
                self._given_up.wait(_GIVING_UP_SECONDS)
            self._capturer.forget()
            if self._owner is not None and self._store is not None:
                self._owner.wait_until_heard(self._store, timeout=_HEARING_SECONDS)

    def note_gone(self, rank: int, fate: str) -> None:
        """Do not wait for a rank any more: for rank 0's watcher, in its own thread."""
        assert self._owner is not None
        assert self._store is not None
        self._owner.note_gone(rank, fate, self._store)

    def _hint_of_renaming(self) -> None:
        """Warn once if a state of the checkpoint seems to have another name now."""
        if self._owner is None or self._has_hinted or self._start.newest is None:
            return
        text = hint_of_renaming(
            self._start.newest,
            not_found=self._registry.not_found,
            unclaimed=self._registry.carried_over(self._start.newest),
        )
        if text is not None:
            self._has_hinted = True
            warnings.warn(text, CheckpointWarning, stacklevel=4)

    def _take_off(self, capture: Capture, *, timeout: float, begun: float) -> bool:
        """Begin to write in a thread; return whether there could be one."""

        def write(given_up: threading.Event) -> Checkpoint | str:
            channel = Channel(self._store_in_flight, timeout, given_up)
            return self._write(capture, channel, begun=begun)

        flight = Flight(capture.number, write, on_end=self.on_end)
        self._flight = flight if flight.start() else None
        return self._flight is not None

    def _write(
        self, capture: Capture, channel: Channel, *, begun: float
    ) -> Checkpoint | str:
        outcome = self._writer.write(capture, self.newest, channel)
        self.seconds = time.perf_counter() - begun
        if isinstance(outcome, Checkpoint):
            self.newest = outcome
            if self._owner is not None:
                logger.info("saved %s in %.2f s", outcome.path, self.seconds)
                self._owner.prune()
        return outcome

    def _conclude(self, number: int, outcome: Outcome) -> Checkpoint | None:
        """Tell what became of a save, where that can be raised."""
        self.has_failed = not isinstance(outcome, Checkpoint)
        self.num_failed += self.has_failed
        if isinstance(outcome, BaseException):
            raise outcome
        told, self._warnings[:] = list(self._warnings), []
        for text in told:
            warnings.warn(text, CheckpointWarning, stacklevel=3)
        if isinstance(outcome, Checkpoint):
            return outcome
        warnings.warn(
            f"checkpoint {number} was not saved: {outcome.rstrip('.')}. "
            + (
                f"The newest checkpoint is {self.newest.path}."
                if self.newest
                else "There is no checkpoint yet."
            ),
            CheckpointWarning,
            stacklevel=3,
        )
        return None
