"""`Accumulator`: sums over replicas that restarts do not change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from elasticrun.checkpoint.state import BaseState
from elasticrun.checkpoint.tensors import load_values, save_values
from elasticrun.control.gathering import gather
from elasticrun.current import current_job
from elasticrun.errors import LoopOrderError
from elasticrun.exact import ExactSum

Key = str | int
Totals = dict[Key, ExactSum]
Values = dict[Any, Any]


class Accumulator(MutableMapping[Key, Any]):
    """Sums over all replicas, right after any restarts; what AdaptDL's of that name is.

    In a loop, add to it. After the loop, a `synchronized` block adds the replicas up;
    within, it is a dictionary of the sums, in which a missing one is 0:

        for x, y in valid:
            total["loss"] += criterion(model(x), y).item() * valid.num_valid
            total["samples"] += valid.num_valid
        with total.synchronized():
            print(total["loss"] / total["samples"])
            total.clear()

    Padding is among the samples of a batch: count `num_valid` of them, or make the
    loader with `even_batches=False`.

    Sums are exact and rounded once, when they are read, so they do not depend on the
    number of replicas. Outside of a block nothing can be read: a sum would be that of
    this replica since some restart.

    Collective: make it on every replica, and enter blocks on every replica in the same
    order. What a block changes must be the same on all.
    Replay: a block that had run before the restart, and runs again because the code in
    front of the position is replayed, sees what it saw then, and its changes are not
    made again. A block inside a loop's body is not replayed.

    Args:
        name: What it is called in checkpoints; one per name.

    Raises:
        StateNameError: The name is taken.
        CheckpointError: The saved sums are damaged.
        TypeError: A key is neither text nor a whole number.
    """

    def __init__(self, *, name: str = "accumulator") -> None:
        self._totals: Totals = {}  # Of all replicas, as of the last gathering.
        self._own: Totals = {}  # What this replica has added since.
        self._view: Values | None = None
        self._replay = _BlocksSeen()
        self._name = name
        current_job().register(_AccumulatorState(name, self))

    # In a loop.

    def __getitem__(self, key: Key) -> Any:
        if self._view is None:
            return _Change(self._name, key)
        return self._view.get(key, 0)

    def __setitem__(self, key: Key, value: Any) -> None:
        if self._view is not None:
            _check_key(key)
            self._view[key] = value
        elif isinstance(value, _Change) and value.key == key:
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

    def _add(self, key: Key, change: ExactSum) -> None:
        _check_key(key)
        if current_job().loader is None:
            raise LoopOrderError(
                f"{self._name}[{key!r}] was changed outside of a loop over an "
                "AdaptiveDataLoader, in code that runs again after a restart, which "
                "would count it twice. Change it in a loop's body, or within "
                f"`with {self._name}.synchronized():`."
            )
        self._own.setdefault(key, ExactSum()).merge(change)

    # In a block.

    @contextmanager
    def synchronized(self) -> Iterator[Accumulator]:
        """Add the replicas up, and be a dictionary within. Collective.

        Raises:
            LoopOrderError: A block of the same accumulator is open.
        """
        if self._view is not None:
            raise LoopOrderError(
                f"two synchronized blocks of {self._name} are open at once. Leave the "
                "first one before the second begins."
            )
        shown = self._replay.next_shown()
        is_replayed = shown is not None
        if shown is None:
            self.gather()
            shown = {key: total.value for key, total in self._totals.items()}
            self._replay.note(shown)
        self._view = dict(shown)
        try:
            yield self
        finally:
            view, self._view = self._view, None
            if not is_replayed:
                self._totals = {
                    key: _kept(self._totals.get(key), shown.get(key), value)
                    for key, value in view.items()
                }

    def __delitem__(self, key: Key) -> None:
        if self._view is None:
            raise self._unreadable(f"del [{key!r}]")
        del self._view[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._view or ())

    def __len__(self) -> int:
        return len(self._view or ())

    def __contains__(self, key: object) -> bool:
        return key in (self._view or ())

    def __repr__(self) -> str:
        if self._view is None:
            return f"<Accumulator {self._name!r}; read it in a synchronized block>"
        return f"Accumulator({self._view!r})"

    def clear(self) -> None:
        """Begin anew, in a block."""
        if self._view is None:
            raise self._unreadable(".clear()")
        self._view.clear()

    def _unreadable(self, what: str) -> LoopOrderError:
        return LoopOrderError(
            f"{self._name}{what} outside of a synchronized block, where no sum over "
            "the replicas is known. In a loop use `+=` and `-=`; read and assign "
            f"within `with {self._name}.synchronized():`."
        )

    # Checkpoints.

    def gather(self) -> None:
        """Add what every replica has added to the common sums. Collective."""
        own = [(key, change.encode()) for key, change in self._own.items()]
        self._own = {}
        for changes in gather(own):  # As JSON, in which keys of a dict become text.
            for key, change in changes:
                self._totals.setdefault(key, ExactSum()).merge(ExactSum.decode(change))

    def encode(self) -> Values:
        """Return what a checkpoint keeps."""
        totals = {key: total.encode() for key, total in self._totals.items()}
        return {"totals": totals, **self._replay.encode()}

    def decode(self, values: Mapping[str, Any]) -> None:
        """Take what `encode` returned."""
        self._totals = {
            key: ExactSum.decode(total) for key, total in values["totals"].items()
        }
        self._own = {}
        self._replay = _BlocksSeen.decode(values)


class _Change:
    """What `accumulator[key]` is in a loop: only to be added to."""

    def __init__(self, name: str, key: Key) -> None:
        self._name = name
        self.key = key
        self.sum = ExactSum()

    def __add__(self, number: Any) -> _Change:
        self.sum.add(number)
        return self

    def __sub__(self, number: Any) -> _Change:
        self.sum.add(number, sign=-1)
        return self

    def __repr__(self) -> str:
        return f"<{self._name}[{self.key!r}]; read it in a synchronized block>"


class _BlocksSeen:
    """What the blocks that a replay runs again have seen.

    Those are the ones outside of epochs, and those of the epoch that is running.
    """

    def __init__(self) -> None:
        self._outside: list[Values] = []
        self._in_epoch: list[Values] = []
        self._epoch = -1
        self._num_begun = -1  # Epochs the program had begun when a block last ran.
        self._num_replayed = {True: 0, False: 0}

    def next_shown(self) -> Values | None:
        """Return what the block that begins saw, or None if it runs first now."""
        seen, is_in_epoch = self._of_place()
        number = self._num_replayed[is_in_epoch]
        if seen is None or number >= len(seen):
            return None
        self._num_replayed[is_in_epoch] += 1
        return seen[number]

    def note(self, shown: Values) -> None:
        """Remember what the block that begins sees, if it can be replayed."""
        seen, is_in_epoch = self._of_place()
        if seen is not None:
            seen.append(dict(shown))
            self._num_replayed[is_in_epoch] += 1

    def _of_place(self) -> tuple[list[Values] | None, bool]:
        job = current_job()
        if job.loader is not None:  # A loop's body is not replayed.
            return None, job.is_in_epoch
        if not job.is_in_epoch:
            return self._outside, False
        if self._epoch != job.progress.finished_epochs:
            self._epoch = job.progress.finished_epochs
            self._in_epoch = []
        if self._num_begun != job.progress.num_begun_epochs:
            self._num_begun = job.progress.num_begun_epochs
            self._num_replayed[True] = 0  # Also when an exception had left the epoch.
        return self._in_epoch, True

    def encode(self) -> Values:
        return {
            "outside": self._outside,
            "in_epoch": self._in_epoch,
            "epoch": self._epoch,
        }

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> _BlocksSeen:
        seen = cls()
        seen._outside = list(values["outside"])
        seen._in_epoch = list(values["in_epoch"])
        seen._epoch = values["epoch"]
        return seen


class _AccumulatorState(BaseState):
    def __init__(self, name: str, accumulator: Accumulator) -> None:
        super().__init__(name)
        self._accumulator = accumulator

    def sync(self) -> None:
        self._accumulator.gather()

    def save(self, fileobj: BinaryIO) -> None:
        save_values(self._accumulator.encode(), fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        self._accumulator.decode(load_values(fileobj))


def _check_key(key: object) -> None:
    if type(key) not in (str, int):
        raise TypeError(
            f"the key {key!r} of an Accumulator is a {type(key).__name__}. Keys travel "
            "between replicas and stand in checkpoints: use text, or whole numbers "
            "such as int(label)."
        )


def _kept(total: ExactSum | None, shown: Any, value: Any) -> ExactSum:
    """Return the exact sum if the block left it alone, else what it assigned."""
    return total if total is not None and value is shown else ExactSum.of(value)
