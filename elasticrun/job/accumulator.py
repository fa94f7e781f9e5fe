"""`Accumulator`: sums over all replicas, which restarts do not change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, BinaryIO, Generic, NoReturn, TypeVar

from elasticrun.checkpoint.states.expected import (
    FLAG,
    MAPPING,
    TEXT,
    WHOLE,
    Kind,
    check_values,
)
from elasticrun.checkpoint.states.state import BaseState, name_in_epoch
from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.errors import LoopOrderError
from elasticrun.job.current import current_job
from elasticrun.job.exact import ExactSum
from elasticrun.job.job import Job
from elasticrun.replicas.gathering import gather

SumKey = str | int
Totals = dict[SumKey, ExactSum]
Values = dict[Any, Any]

T = TypeVar("T")


class Accumulator(MutableMapping[SumKey, Any]):
    """Sums over all replicas, which stay right through any restart.

    Add to one sum in a loop with `+=` and `-=`, or to several with a dictionary
    (`total += {"loss": loss, "samples": n}`). After the loop, a `synchronized` block
    adds up all replicas. Inside of it the accumulator is a dictionary of the sums, in
    which a missing one is 0:

        for x, y in valid:
            total["loss"] += criterion(model(x), y).item() * valid.num_valid
            total["samples"] += valid.num_valid
        with total.synchronized():
            print(total["loss"] / total["samples"])
            total.clear()

    A batch may contain padding: count `num_valid` samples, or make the loader with
    `even_batches=False`.

    Sums are exact, and rounded once when they are read, so they do not depend on the
    number of replicas. Nothing can be read outside of a block, since that would be the
    sum of this replica since some restart.

    An accumulator without a name that is made in an epoch begins at 0 there, and ends
    with the epoch. Any other one lasts as long as the job.

    Collective: make it on every replica, and enter blocks on every replica in the same
    order. What a block changes must be the same on all.
    Replay: a block that had run before the restart, and runs again because the code in
    front of the position is replayed, sees what it saw then, and its changes are not
    made again. A block inside a loop's body is not replayed.

    Args:
        name: What it is called in checkpoints; one per name. Without one, accumulators
            are known by the order in which the program makes them, in the epoch or
            outside of epochs.

    Raises:
        LoopOrderError: It is made without a name inside a loop; or it is used after the
            epoch that it ended with.
        StateNameError: The name is taken.
        CheckpointError: The saved sums are damaged.
        TypeError: A key is neither text nor a whole number.
    """

    def __init__(self, *, name: str | None = None) -> None:
        job = current_job()
        self._view: Values | None = None
        self._epoch: int | None = None  # With which it ends.
        if name is not None:
            self._sums = _Sums(name)
            job.register(self._sums)
            return
        _check_place(job)
        if job.is_in_epoch:
            self._epoch = job.progress.finished_epochs
        self._sums = _next_unnamed(job)

    # In a loop.

    def __getitem__(self, key: SumKey) -> Any:
        if self._view is None:
            return _Addend(self._sums.name, key)
        return self._view.get(key, 0)

    def __setitem__(self, key: SumKey, value: Any) -> None:
        if self._view is not None:
            _check_key(key)
            self._view[key] = value
        elif isinstance(value, _Addend) and value.key == key:
            self._add(key, value.sum)
        else:
            raise self._unreadable(f"[{key!r}] = ...")

    def update(self, *args: Any, **sums: Any) -> None:
        """Add to several sums, as `collections.Counter.update` does."""
        for key, value in dict(*args, **sums).items():
            self[key] += value

    def subtract(self, *args: Any, **sums: Any) -> None:
        """Subtract from several sums, as `collections.Counter.subtract` does."""
        for key, value in dict(*args, **sums).items():
            self[key] -= value

    def __iadd__(self, sums: Any) -> Accumulator:
        """Add to several sums: `total += {"loss": loss, "samples": n}`."""
        self.update(sums)
        return self

    def __isub__(self, sums: Any) -> Accumulator:
        """Subtract from several sums."""
        self.subtract(sums)
        return self

    def _add(self, key: SumKey, change: ExactSum) -> None:
        _check_key(key)
        self._check_has_not_ended()
        name = self._sums.name
        if current_job().loader is None:
            raise LoopOrderError(
                f"{name}[{key!r}] was changed outside of a loop over an "
                "AdaptiveDataLoader, in code that runs again after a restart, so it "
                "would be counted twice. Change it in a loop's body, or within `with "
                f"{name}.synchronized():`."
            )
        self._sums.own.setdefault(key, ExactSum()).merge(change)
        if (rescue := current_job().rescue) is not None:
            rescue.record_part(name, key, change.encode())

    def _check_has_not_ended(self) -> None:
        """Refuse to be used after the epoch in which it was made."""
        job = current_job()
        if self._epoch is None or (
            job.is_in_epoch and job.progress.finished_epochs == self._epoch
        ):
            return
        raise LoopOrderError(
            f"an Accumulator that was made in epoch {self._epoch} is used after that "
            "epoch has ended. Checkpoints no longer hold its sums, and after a restart "
            "the program would not make it again. Read it in its epoch, or make it "
            "before the epoch loop."
        )

    # In a block.

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Add the replicas up, and be a dictionary within. Collective.

        Raises:
            LoopOrderError: A block of the same accumulator is open, or its epoch has
                ended.
        """
        sums = self._sums
        if self._view is not None:
            raise LoopOrderError(
                f"two synchronized blocks of {sums.name} are open at once. Leave the "
                "first one before the second begins."
            )
        self._check_has_not_ended()
        shown = sums.blocks_seen.again()
        is_replayed = shown is not None
        if shown is None:
            sums.sync()
            shown = {key: total.value for key, total in sums.totals.items()}
            sums.blocks_seen.add(dict(shown))
        self._view = dict(shown)
        try:
            yield self
        finally:
            view, self._view = self._view, None
            if not is_replayed:
                sums.totals = {
                    key: _sum_after_block(sums.totals.get(key), shown.get(key), value)
                    for key, value in view.items()
                }

    def __delitem__(self, key: SumKey) -> None:
        if self._view is None:
            raise self._unreadable(f"del [{key!r}]")
        del self._view[key]

    def __iter__(self) -> Iterator[SumKey]:
        return iter(self._view or ())

    def __len__(self) -> int:
        return len(self._view or ())

    def __contains__(self, key: object) -> bool:
        return key in (self._view or ())

    def __repr__(self) -> str:
        if self._view is None:
            name = self._sums.name
            return f"<Accumulator {name!r}; read it in a synchronized block>"
        return f"Accumulator({self._view!r})"

    def clear(self) -> None:
        """Begin anew, in a block."""
        if self._view is None:
            raise self._unreadable(".clear()")
        self._view.clear()

    def _unreadable(self, what: str) -> LoopOrderError:
        return _unreadable_error(self._sums.name, what)


class _Addend:
    """What `accumulator[key]` is in a loop: only to be added to."""

    def __init__(self, name: str, key: SumKey) -> None:
        self._name = name
        self.key = key
        self.sum = ExactSum()

    def __add__(self, number: Any) -> _Addend:
        self.sum.add(number)
        return self

    def __sub__(self, number: Any) -> _Addend:
        self.sum.add(number, sign=-1)
        return self

    def __repr__(self) -> str:
        return f"<{self._name}[{self.key!r}]; read it in a synchronized block>"

    def __format__(self, spec: str) -> str:
        return self._refuse() if spec else repr(self)

    def _refuse(self, *_: object) -> NoReturn:
        raise _unreadable_error(self._name, f"[{self.key!r}] is read")

    __float__ = __int__ = __bool__ = __round__ = __neg__ = __abs__ = _refuse
    __lt__ = __le__ = __gt__ = __ge__ = _refuse
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __radd__ = __rsub__ = _refuse


def _unreadable_error(name: str, what: str) -> LoopOrderError:
    return LoopOrderError(
        f"{name}{what} outside of a synchronized block, where no sum over the replicas "
        "is known. In a loop use `+=` and `-=`; read and assign within "
        f"`with {name}.synchronized():`."
    )


class _InOrder(Generic[T]):
    """Things that a program makes one after another, and again when it is replayed.

    They are known by their order: those outside of epochs, and those in the epoch that
    is running. One in a loop's body is not: that is not replayed.
    """

    def __init__(self) -> None:
        self._outside: list[T] = []
        self._in_epoch: list[T] = []
        self._epoch = -1  # In which those above were made.
        self._num_begun = -1  # Epochs the program had begun when one was last made.
        # How many this process has made in the epoch (True), and outside (False).
        self._num_made = {True: 0, False: 0}

    def again(self) -> T | None:
        """Return what is made again now, or None if it is made for the first time."""
        things, is_in_epoch = self._of_place()
        number = self._num_made[is_in_epoch]
        if things is None or number >= len(things):
            return None
        self._num_made[is_in_epoch] += 1
        return things[number]

    def add(self, thing: T) -> None:
        """Remember what is made for the first time, unless it cannot be replayed."""
        things, is_in_epoch = self._of_place()
        if things is not None:
            things.append(thing)
            self._num_made[is_in_epoch] += 1

    def num_made(self) -> int:
        """Return how many were made in the running epoch, or outside of epochs."""
        return self._num_made[self._of_place()[1]]

    def _of_place(self) -> tuple[list[T] | None, bool]:
        job = current_job()
        if job.loader is not None:
            return None, job.is_in_epoch
        if not job.is_in_epoch:
            return self._outside, False
        if self._epoch != job.progress.finished_epochs:
            self._epoch = job.progress.finished_epochs
            self._in_epoch = []
        if self._num_begun != job.progress.num_begun_epochs:
            self._num_begun = job.progress.num_begun_epochs
            self._num_made[True] = 0  # Also when an exception had left the epoch.
        return self._in_epoch, True

    def encode(self) -> dict[str, Any]:
        return {
            "outside": self._outside,
            "in_epoch": self._in_epoch,
            "epoch": self._epoch,
        }

    def copy(self) -> _InOrder[T]:
        """Return one that holds the same things."""
        return self.decode(self.encode())

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> _InOrder[T]:
        made = cls()
        made._outside = list(values["outside"])
        made._in_epoch = list(values["in_epoch"])
        made._epoch = values["epoch"]
        return made


_KEY = Kind("text or a whole number", lambda key: type(key) in (str, int))
_EXPECTED = {
    "totals": MAPPING,
    "outside": [MAPPING],
    "in_epoch": [MAPPING],
    "epoch": WHOLE,
}


class _Sums(BaseState):
    """The sums themselves, which checkpoints hold.

    Attributes:
        totals: Of all replicas, as of the last gathering.
        own: What this replica has added since.
        is_uneven: Whether some replicas have added to it while others have not.
        blocks_seen: What the `synchronized` blocks have seen, which see it again.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.totals: Totals = {}
        self.own: Totals = {}
        self.is_uneven = False
        self.blocks_seen: _InOrder[Values] = _InOrder()

    def sync(self) -> None:
        """Add what every replica has added to the common sums. Collective."""
        own, self.own = self._encode_own(), {}
        if (rescue := current_job().rescue) is not None:
            rescue.record_part(self.name, None, None)
        parts = gather(own, before_reading=current_job().wait_for_gpu)
        self.is_uneven |= any(parts) and not all(parts)
        self.add_parts(parts)

    def _encode_own(self) -> list[Any]:
        # As JSON, in which keys of a dictionary would become text.
        return [(key, change.encode()) for key, change in self.own.items()]

    def own_part(self) -> Any:
        # If replicas add alike, one that has nothing knows that the others have none.
        return self._encode_own() or ([] if self.is_uneven else None)

    def add_parts(self, parts: Iterable[Any]) -> None:
        for changes in parts:
            for key, change in changes:
                total = ExactSum.decode(change)
                total.merge(self.totals.get(key, ExactSum()))
                self.totals[key] = total  # Another one: see `remember`.

    def remember(self) -> Callable[[], None]:
        totals, blocks = dict(self.totals), self.blocks_seen.copy()

        def put_back() -> None:
            self.totals = dict(totals)
            self.own, self.blocks_seen = {}, blocks

        return put_back

    def save(self, fileobj: BinaryIO) -> None:
        totals = {key: total.encode() for key, total in self.totals.items()}
        save_values({"totals": totals, **self.blocks_seen.encode()}, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        values = load_values(fileobj)
        check_values(values, _EXPECTED, name=self.name)
        for pair in values["totals"].items():
            check_values(pair, (_KEY, (TEXT, FLAG, TEXT)), name=self.name)
        self.totals = {
            key: ExactSum.decode(total) for key, total in values["totals"].items()
        }
        self.own = {}
        self.blocks_seen = _InOrder.decode(values)


class _Unnamed(_InOrder[_Sums]):
    """The sums of a job's accumulators without a name."""


def _next_unnamed(job: Job) -> _Sums:
    """Return the sums of the next accumulator without a name.

    One in an epoch that is entered again goes on with what it had: an exception had
    left the epoch then, and what its finished loops have added stays.
    """
    unnamed = job.get_or_make(_Unnamed)
    sums = unnamed.again()
    if sums is None:
        number = unnamed.num_made()
        name = f"accumulator-{number}" if number else "accumulator"
        if job.is_in_epoch:
            name = name_in_epoch(name, job.progress.finished_epochs)
        sums = _Sums(name)
        job.register(sums)
        unnamed.add(sums)
    return sums


def _check_place(job: Job) -> None:
    """Refuse an accumulator without a name in a loop's body."""
    if job.loader is not None:
        raise LoopOrderError(
            "an Accumulator without a name is being made inside the loop over "
            f"`{job.loader.name}` ({job.loader.where}). After a restart that loop "
            "continues in the middle, so one made earlier in it would be missing. Make "
            "it before the loop. For an evaluation in the loop's body, too: make it "
            "once, and clear() it at the end of each synchronized block."
        )


def _check_key(key: object) -> None:
    if type(key) not in (str, int):
        raise TypeError(
            f"the key {key!r} of an Accumulator is a {type(key).__name__}. Keys are "
            "sent between replicas and saved: use text, or whole numbers such as "
            "int(label)."
        )


def _sum_after_block(total: ExactSum | None, shown: Any, value: Any) -> ExactSum:
    """Return the exact sum if the block left it alone, else what it assigned.

    What the block is shown is rounded; put back, it would round the sum.
    """
    return total if total is not None and value is shown else ExactSum.of(value)
