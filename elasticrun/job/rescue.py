"""A rescue: a survivor writes the checkpoint of the last boundary, alone.

In data-parallel training every replica that has made a step has made it with the whole
global batch. So when one dies, each other replica has everything, except the dead one's
part of sums over replicas, and its random generators. All replicas of one machine
record these where the others can read them (job/journal.py).

    remember     each boundary: remember the states at it, record the parts   [training]
    attempt      the program has ended with a replica missing: offer the
                 boundaries that this one can put its states back to          [training]
                 all on this machine have offered, or are dead: the furthest
                 boundary for which every part is known is chosen, and the
                 lowest rank that offers it                                   [training]
                 that one puts its states back, adds all parts, and saves     [training]
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.states.generators import Generators
from elasticrun.checkpoint.states.remembered import Change, RememberedValues
from elasticrun.checkpoint.states.state import BaseState, CannotRescueError
from elasticrun.checkpoint.states.stateful import StatefulState
from elasticrun.errors import text_of
from elasticrun.job.gpu_work import GpuWork, Mark
from elasticrun.job.journal import Journal, Told, encode_offer
from elasticrun.logger import Logger
from elasticrun.replicas.records import Records, RecordTooLargeError
from elasticrun.saving.saver import Saver

logger = Logger(__name__)

_MOST_WAITED = 10.0  # For what other survivors offer.
_LOSS_SECONDS = 0.5  # Until it is known that another replica has died.
_LOOK_SECONDS = 0.005
_MOST_SECONDS = 0.005  # To remember a boundary, if that is also more
_MOST_OF_A_STEP = 0.05  # of the time since the last one.
_NUM_DEAR = 8  # As many in a row are not a machine's that is busy for a moment.
_NUM_TIMED = 1000  # Boundaries, until it is said what they take of the time.
_GRADIENTS_WAIT = str(CannotRescueError("gradients wait for a step"))


class KnownBoundary(NamedTuple):
    """A boundary that this replica can put its states back to.

    Attributes:
        number: As the gate counts it.
        put_back: For each state.
        mark: Where the GPU has done all that is before it; None without one.
        entry: What this replica records of it.
    """

    number: int
    position: Position
    put_back: list[tuple[BaseState, Callable[[], None]]]
    mark: Mark | None
    entry: tuple[str, int]


class Rescue:
    """Remembers each boundary, and saves the last one if another replica dies.

    Everything here is for the training thread.

    Args:
        has_lost: Whether another replica is known to have died.
        gpu: Where the states are; None on the CPU.
        grace: Seconds that all of it may take.
        may_cost: Whether to go on where it costs too much to wait for a GPU.

    Attributes:
        num_steps: How often an optimizer has stepped, or what else changes in a step.
        outcome: What this replica has saved, for people; empty if it has not.
        why_not: Why a death costs what was trained since the last checkpoint, and what
            to do, for people; empty if it does not. Any thread.
        is_off: Whether steps are too short to wait for a GPU in them; any thread.
    """

    def __init__(
        self,
        states: Registry,
        saver: Saver,
        records: Records,
        generators: Generators,
        *,
        world_size: int,
        grace: float,
        may_cost: bool,
        has_lost: Callable[[], bool],
        gpu: GpuWork | None = None,
    ) -> None:
        self._states = states
        self._saver = saver
        self._records = records
        self._generators = generators
        self._journal = Journal(records, generators)
        self._world_size = world_size
        self._grace = grace
        self._may_cost = may_cost
        self._has_lost = has_lost
        self._gpu = gpu
        self.num_steps = 0
        self._num_reduced = 0
        self._is_reduced_unseen = False
        self._steps_at = -1  # As of the boundaries that are kept.
        # The first one since the last step, and the last.
        self._boundaries: list[KnownBoundary] = []
        self._why_none = ""  # Why none is kept, if so.
        self.is_off = False
        self._has_explained = False
        self._last_at = 0.0
        self._num_dear = 0  # Boundaries in a row that took too long to remember.
        self._num_timed, self._timed_since, self._seconds = 0, 0.0, 0.0
        self.outcome = self.why_not = ""

    @property
    def is_on(self) -> bool:
        """Whether there was a boundary, and it may cost what it does; any thread."""
        return self._steps_at >= 0 and not self.is_off

    # At each boundary.

    def remember(self, number: int, position: Position, is_whole: bool) -> None:
        """Remember the boundary that the program is at, before anything is saved.

        Args:
            is_whole: Whether the states are all there is: no gradients wait for a step.
        """
        if self.is_off:
            return
        begun = time.perf_counter()
        if self.num_steps != self._steps_at:
            self._boundaries, self._steps_at = [], self.num_steps
            self._why_none = _GRADIENTS_WAIT
        del self._boundaries[1:]
        try:
            if is_whole:
                self._boundaries.append(self._remember_all(number, position))
                self._write()
                self.why_not = ""  # As where a list is short again.
        except (CannotRescueError, RecordTooLargeError) as error:
            self._forget(str(error))
        self._num_reduced = 0
        if self._gpu is None:
            if is_whole and not self._may_cost:
                self._check_cost(begun)
        elif self._gpu.pass_boundary() and not self._may_cost:
            self._turn_off(
                "steps are too short (set ELASTICRUN_RESCUE=always)",
                "a GPU that is waited for may then have no work for "
                f"{self._gpu.idle * 1e6:.0f} microseconds, which is more than 1 % of a "
                "step",
            )

    def _check_cost(self, begun: float) -> None:
        """Turn the rescue off where it takes too long, as on GPUs `GpuWork` does.

        As of a replay buffer, whose `state_dict` copies it.
        """
        now = time.perf_counter()
        took, between, self._last_at = now - begun, now - self._last_at, now
        self._time(took, now)
        is_dear = took > max(_MOST_SECONDS, _MOST_OF_A_STEP * between)
        self._num_dear = self._num_dear + 1 if is_dear else 0
        if self._num_dear < _NUM_DEAR:
            return
        seconds = {}
        for state in self._states:
            begun = time.perf_counter()
            with suppress(CannotRescueError):
                remember(state)
            seconds[state.name] = time.perf_counter() - begun
        why = (
            f"{max(seconds, key=seconds.__getitem__)!r} takes too long to read at each "
            "boundary: keep what is large in tensors of a registered module, or leave "
            "rescues out with init(rescue=False)"
        )
        self._turn_off(why, f"{why} ({took * 1e3:.0f} of {between * 1e3:.0f} ms)")

    def _time(self, took: float, now: float) -> None:
        """Say what to do, once, if many boundaries have taken much of the time."""
        self._num_timed += 1
        if self._num_timed == 1:  # Which takes longer, as all comes for the first time.
            self._timed_since = now
            return
        self._seconds += took
        if self._num_timed != _NUM_TIMED or self._records.rank != 0:
            return
        total = now - self._timed_since
        if self._seconds > _MOST_OF_A_STEP * total:
            each = 1e3 / (_NUM_TIMED - 1)  # In milliseconds.
            logger.info(
                "to be ready for the death of another replica takes %.0f %% of the "
                "time (%.2g of %.2g ms a boundary): init(rescue=False) leaves it out",
                100 * self._seconds / total,
                self._seconds * each,
                total * each,
            )

    def prepare_step(self) -> None:
        """Forget all boundaries: an optimizer is about to step."""
        self.wait_for_gpu()
        if self._is_reduced_unseen:  # Noise on gradients, as one adds for privacy.
            self._is_reduced_unseen = False
            self._look()
        self.num_steps += 1

    def record_part(self, name: str, key: str | int | None, change: Any) -> None:
        """Record what this replica adds to its part of a sum; None gives that up."""
        if not self.is_off:
            self._journal.add_part(name, key, change)

    def count_reduction(self) -> None:
        """Note that gradients of all replicas have been averaged, or soon will be."""
        self.wait_for_gpu()
        self._num_reduced += 1
        self._is_reduced_unseen = True
        self._look()  # What a forward pass draws is known from here.

    def wait_for_gpu(self) -> None:
        """Wait for what all replicas do together on GPUs; elsewhere that is done."""
        # Where no boundary is kept, as with sharded modules, there is no rescue.
        if self._gpu is not None and self._boundaries and not self.is_off:
            self._gpu.wait()

    def _look(self) -> None:
        if not self.is_off:
            self._journal.look()

    def _remember_all(self, number: int, position: Position) -> KnownBoundary:
        states = list(self._states)
        put_back = [(state, remember(state)) for state in states]
        mark = None if self._gpu is None else self._gpu.mark()
        entry = self._journal.entry(states, is_complete=self._num_reduced > 0)
        return KnownBoundary(number, position, put_back, mark, entry)

    def _write(self) -> None:
        self._journal.write({each.number: each.entry for each in self._boundaries})

    def _forget(self, why: str) -> None:
        """Keep no boundary, and say why: once, at the first one."""
        self._boundaries, self._why_none, self.why_not = [], why, why
        self._write()
        if not self._has_explained:
            self._has_explained = True
            if self._records.rank == 0:
                logger.info(
                    "when a replica dies, the job goes back to the last checkpoint: %s",
                    why,
                )

    def _turn_off(self, why_not: str, why: str) -> None:
        self._forget(why)
        self.why_not = why_not
        self.is_off = True

    # After a death.

    def attempt(self, *, is_in_loop: bool) -> None:
        """Save the furthest boundary that is known, if another replica has died.

        Args:
            is_in_loop: Whether the program has ended in the middle of a loop, so that a
                death may be about to be noticed.
        """
        if not self.is_on:  # There is nothing to save, or no connection to break off.
            return
        if not self._is_somebody_dead(is_in_loop=is_in_loop):
            return
        try:
            if self._gpu is not None:
                self._gpu.end([each.mark for each in self._boundaries if each.mark])
            self._records.break_off()
            self._offer()
            told = self._hear()
            chosen = self._choose(told)
            if chosen is not None:
                self._save(chosen, told)
        except Exception as error:
            # The death is what the program has ended with; this must not hide it.
            logger.warning(
                "what was trained since the last checkpoint could not be saved: %s",
                text_of(error),
                exc_info=not isinstance(error, CannotRescueError),
            )

    def _is_somebody_dead(self, *, is_in_loop: bool) -> bool:
        if not is_in_loop:  # Others may have come to their end before this one.
            return self._has_lost()
        deadline = time.monotonic() + _LOSS_SECONDS
        ranks = self._records.ranks
        while not (self._has_lost() or not all(map(self._records.is_alive, ranks))):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOOK_SECONDS)
        return True

    def _offer(self) -> None:
        """Tell the others which boundaries this replica can put its states back to.

        With its random generators, which the one that saves writes for all.
        """
        offer = {}
        self._look()  # Before that is put back: it may have had its part in a step.
        if self.num_steps != self._steps_at:
            why = CannotRescueError("it has made a part of a step since")
            self._boundaries, self._why_none = [], str(why)
        for boundary in self._boundaries:
            try:
                if boundary.mark is not None and not boundary.mark.was_passed:
                    raise CannotRescueError("the GPU had not come there")
                for _, put_back in boundary.put_back:
                    put_back()
                offer[boundary.number] = self._generators.capture_for_record()
            except CannotRescueError as error:
                self._why_none = str(error)
        if not offer:
            logger.warning("no rescue by this replica: %s", self._why_none)
            self.why_not = self._why_none
        self._records.offer(encode_offer(offer))

    def _choose(self, told: Mapping[int, Told]) -> KnownBoundary | None:
        """Return the boundary that this replica is to save; None if it is not to."""
        numbers = {number for each in told.values() for number in each.offer}
        lacking: list[int] = []
        for number in sorted(numbers, reverse=True):
            by = [rank for rank, each in told.items() if number in each.offer]
            lacking = self._lacking(number, told, [told[rank] for rank in by])
            if lacking:
                continue
            if by[0] != self._records.rank or not self._records.claim():
                return None
            return next(each for each in self._boundaries if each.number == number)
        if lacking:
            self.why_not = (
                f"rank {', '.join(map(str, lacking))} has not come to the boundary, "
                "and what it would have added to sums or drawn there, or trained, is "
                "unknown: add and draw in front of optimizer.step(), or save more often"
            )
            logger.warning("no rescue: %s", self.why_not)
        return None

    def _hear(self) -> dict[int, Told]:
        """Return what each replica of this machine has recorded; survivors with offers.

        Who lives and has none by the end of some seconds is as good as dead.
        """
        deadline = time.monotonic() + min(_MOST_WAITED, self._grace / 2)
        while True:
            told = {rank: Told(self._records, rank) for rank in self._records.ranks}
            waits = any(
                each.entries and not each.has_offered and self._records.is_alive(rank)
                for rank, each in told.items()
            )
            if not waits or time.monotonic() >= deadline:
                return told
            time.sleep(_LOOK_SECONDS)

    def _lacking(
        self, number: int, told: Mapping[int, Told], offering: list[Told]
    ) -> list[int]:
        """Return the ranks of which something is not known at a boundary on offer."""
        entries = [each.entries[number] for each in offering]
        is_complete = any(entry.is_complete for entry in entries)
        of_first = {
            state.name for state in self._states if state.has_parts_on_first_rank_only
        }

        def is_known(rank: int) -> bool:
            # On another machine: nothing of its record can be read here. What it gave
            # to a complete step is in the gradients; a part of a sum is lost.
            if rank not in told:
                but = of_first if rank else set()
                return is_complete and not _is_summing(number, told.values(), but=but)

            # It came to the boundary, and recorded what it had there.
            if number in told[rank].entries:
                return told[rank].entries[number].cell >= 0

            # It died in front of it. What it gave to a complete step is in the
            # gradients of all; and if it has drawn and added up just what the others
            # had there, it would have done nothing more on its way.
            own = told[rank].next
            return (
                own is not None
                and own.cell >= 0
                and is_complete
                and all(own.is_like(entry) for entry in entries)
                and not (rank == 0 and of_first)
            )

        return [rank for rank in range(self._world_size) if not is_known(rank)]

    def _save(self, boundary: KnownBoundary, told: Mapping[int, Told]) -> None:
        dead = [rank for rank, each in told.items() if not each.has_offered]
        whose = ", ".join(map(str, dead)) or "on another machine"
        parts = [e.parts for each in told.values() if (e := each.at(boundary.number))]
        self._states.restrict_to(state for state, _ in boundary.put_back)
        for state, put_back in boundary.put_back:
            put_back()
            if own := [each[state.name] for each in parts if state.name in each]:
                state.add_parts(own)
        whose_generators = {rank: rank for rank in told}
        if self._generators.are_alike:  # The dead one's may be those of its last share.
            whose_generators = dict.fromkeys(told, self._records.rank)
        generators = {
            rank: told[known].generators_at(boundary.number)
            for rank, known in whose_generators.items()
        }
        why = f"by rank {self._records.rank} after the death of rank {whose}"
        checkpoint = self._saver.save_alone(
            boundary.position.encode(),
            {self._generators.name: generators},
            why=why,
            is_owner=0 in told and self._records.is_alive(0),
            timeout=self._grace,
        )
        if checkpoint.manifest.rescue == why:
            self.outcome = f"rank {self._records.rank} saved {boundary.position}"
            logger.info("saved %s at %s %s", checkpoint.path, boundary.position, why)

    def close(self) -> None:
        """Give the records back."""
        self._boundaries = []
        self._records.close()


def remember(state: BaseState) -> Callable[[], None]:
    """Remember a state as it is; return what puts it back."""
    put_back = state.remember()
    if put_back is not None:
        return put_back
    _check_can_be_alone(state)
    values = state.current()
    if values is None:
        raise CannotRescueError(f"{state.name!r} cannot be known as it was")
    remembered = RememberedValues(values, is_short=True)
    for path, kind in remembered.unknown():
        _refuse(state.name, path, kind)

    def put_back_values() -> None:
        now = state.current()
        change = remembered.compare(now)
        if change is Change.MORE:
            raise CannotRescueError(
                f"more of {state.name!r} has changed since than is copied",
                "keep large tensors in buffers of a registered module",
            )
        if change is Change.REMEMBERED:
            state.put_back(remembered.put_back(now))

    return put_back_values


def _refuse(name: str, path: str, kind: type[Any] | None) -> NoReturn:
    where = f" ({path!r})" if path else ""
    if kind is None:
        raise CannotRescueError(
            f"{name!r} has more values than are copied at each boundary{where}",
            "keep them in tensors of a registered module, or leave rescues out with "
            "init(rescue=False)",
        )
    raise CannotRescueError(
        f"{name!r} has a {kind.__name__}{where}, which cannot be copied at each "
        "boundary",
        "keep numbers, text, small tensors and arrays in it, in Python's containers "
        "and dataclasses, and make the rest anew from them",
    )


def _check_can_be_alone(state: BaseState) -> None:
    """Refuse a state of which each replica has its own, or that all save together."""
    is_own = state.is_per_replica and not isinstance(state, Generators)
    syncs = type(state).sync not in (BaseState.sync, StatefulState.sync)
    if is_own or syncs:
        raise CannotRescueError(f"each replica has a part of {state.name!r}")


def _is_summing(number: int, told: Iterable[Told], *, but: set[str]) -> bool:
    """Return whether a replica of another machine may have a part of a sum."""
    return any(
        not each.entries
        or any(e.parts.keys() - but for n, e in each.entries.items() if n <= number)
        for each in told
    )
