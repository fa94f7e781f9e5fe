"""The interface of a state: one named thing that every checkpoint holds."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from typing import Any, BinaryIO, Protocol

from elasticrun.checkpoint.storage.place import MANIFEST_NAME
from elasticrun.errors import ElasticRunError, StateNameError

_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,99}")
_REPLICA_SUFFIX = re.compile(r"(?P<name>.+)\.rank(?P<has_many>s?)-\d+")
RANKS_A_FILE = 64  # Fewer files than there are nodes, each soon read.
_EPOCH_SUFFIX = re.compile(r"accumulator(-\d+)?\.epoch-(?P<epoch>\d+)")


def check_state_name(name: str) -> None:
    """Refuse what cannot name a state."""
    is_manifest = name.lower().startswith(MANIFEST_NAME)
    is_plain = _PLAIN_NAME.fullmatch(name) and not _REPLICA_SUFFIX.fullmatch(name)
    if is_manifest or not is_plain:
        raise StateNameError(
            f"{name!r} cannot name a state: it becomes a file name in each checkpoint. "
            "Use at most 100 letters, digits, '_', '-' and '.', and do not begin with "
            f"a dot or {MANIFEST_NAME!r}, nor end in '.rank-', '.ranks-' and a number."
        )


class CannotRescueError(ElasticRunError):
    """Raised where a state is not known as it was at the last boundary.

    Args:
        why: What is not known.
        do: What the program can do.
    """

    def __init__(self, why: str, do: str = "save more often, to lose less") -> None:
        super().__init__(f"{why}: {do}")


class SavedFiles(Protocol):
    """The files of a checkpoint."""

    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> BinaryIO: ...


class BaseState(ABC):
    """One named thing in every checkpoint, which writes and reads itself.

    A shared state is written by rank 0 and loaded by all; with `is_per_replica`, each
    rank has a file of its own.

    Raises:
        StateNameError: The name is not a plain file name.
    """

    is_per_replica = False
    has_parts_on_first_rank_only = False  # If it has any: see `own_part`.
    target: object = None  # What it is the state of, if that is another object.
    trusts_pickle = False  # Set by the job that registers it.

    def __init__(self, name: str) -> None:
        check_state_name(name)
        self.name = name

    def sync(self) -> None:  # noqa: B027 (optional: most states have nothing to do)
        """Prepare for `save`; called on every replica, so it may use collectives."""

    def after_save(self) -> None:  # noqa: B027 (as `sync`)
        """Release what `sync` has prepared: `save` is not called again before it.

        It may have been called twice: into memory that ran out, then into the file.
        """

    def committed(self) -> None:  # noqa: B027 (as `sync`)
        """Act on the commit of the save in which this state was captured.

        Called on every replica in the training thread: at the end of a save that is
        awaited, else at the first boundary after it. Never for a save that has failed.
        """

    def values(self) -> Mapping[str, Any]:
        """Return the values of which a report shows those that are numbers."""
        return {}

    def checksums(self) -> Mapping[str, int]:
        """Return checksums of what is to be the same on all replicas, by its name."""
        return {}

    def samples(self) -> Mapping[str, list[float]]:
        """Return sums over parts of the state, by the parts' names.

        Where another replica has other sums, the replicas have drifted apart.
        """
        return {}

    @abstractmethod
    def save(self, fileobj: BinaryIO) -> None:
        """Write the state."""

    def begin_save(self) -> tuple[Callable[[BinaryIO], object], bool]:
        """Return what writes the state, and whether another thread may call it later.

        If so, it writes the state as it is now, whatever training makes of it in the
        meantime. Called in the training thread, at each boundary that is saved; what
        was returned before is of no use then.
        """
        return self.save, False

    @abstractmethod
    def load(self, fileobj: BinaryIO) -> None:
        """Read what `save` wrote, at any world size."""

    def load_from(self, checkpoint: SavedFiles, rank: int) -> bool:
        """Load what a checkpoint has for a rank; return whether it has anything."""
        name = self.file_name(rank)
        if not checkpoint.has(name):
            return False
        with checkpoint.open(name) as file:
            self.load_with(file, checkpoint.open)
        return True

    def load_with(
        self, fileobj: BinaryIO, open_file: Callable[[str], BinaryIO]
    ) -> None:
        """Read what was saved; `open_file` opens other files of the checkpoint."""
        del open_file
        self.load(fileobj)

    def parts(self) -> Iterable[BaseState]:
        """Return what is saved with it in files of its own, and not loaded alone."""
        return ()

    def note_states(self, states: Iterable[BaseState]) -> None:  # noqa: B027 (as `sync`)
        """Called with the registered states before this one is added to them.

        Args:
            states: Iterated later, it has those that were registered since, too.
        """

    def current(self) -> Any:
        """Return its values, nested, to find what replayed code has changed of them.

        None if replayed code does it no harm. Called on all replicas.
        """
        return None

    def put_back(self, values: Any) -> None:
        """Set values that `current` has returned before code was replayed."""
        raise NotImplementedError(f"{self.name} has no values that could be put back")

    # For a rescue: what one replica saves alone after another one's death.

    def remember(self) -> Callable[[], None] | None:
        """Remember the state as it is at a boundary; return what puts it back.

        Called at each boundary, so it takes microseconds. None if all that there is to
        it is what `current` returns.

        Raises:
            CannotRescueError: It cannot be remembered; or, when it is put back, more
                has changed than was remembered.
        """
        return None

    def own_part(self) -> Any:
        """Return what this replica alone has of a sum over replicas, as JSON has it.

        None if it has nothing, and so have the others. Called at each boundary.
        """
        return None

    def add_parts(self, parts: Iterable[Any]) -> None:
        """Add what `own_part` returned on each replica, as `sync` would."""
        raise NotImplementedError(f"{self.name} has no parts")

    def file_name(self, rank: int) -> str:
        """Return the name of the file that `rank` loads."""
        return replica_file_name(self.name, rank) if self.is_per_replica else self.name

    def file_names(self, world_size: int) -> list[str]:
        """Return the files that all ranks make of it together."""
        if not self.is_per_replica:
            return [self.name]
        return list(dict.fromkeys(map(self.file_name, range(world_size))))


def replica_file_name(name: str, rank: int) -> str:
    """Return the name of the file in which `rank` has its own of a state."""
    return f"{name}.rank-{rank}"


def per_rank_file_name(name: str, rank: int) -> str:
    """Return the name of the file in which rank 0 writes a rank's own, with others'."""
    return f"{name}.ranks-{rank - rank % RANKS_A_FILE}"


def state_of_file(file_name: str) -> str:
    """Return the name of the state that a file of a checkpoint belongs to."""
    match = _REPLICA_SUFFIX.fullmatch(file_name)
    return match["name"] if match else file_name


def has_many_ranks(file_name: str) -> bool:
    """Return whether a file of a checkpoint is one of `per_rank_file_name`."""
    match = _REPLICA_SUFFIX.fullmatch(file_name)
    return match is not None and match["has_many"] != ""


def name_in_epoch(name: str, epoch: int) -> str:
    """Return the name of a state that ends with its epoch: an unnamed accumulator."""
    return f"{name}.epoch-{epoch}"


def epoch_of(name: str) -> int | None:
    """Return the epoch that a state ends with; None for one of the whole job."""
    match = _EPOCH_SUFFIX.fullmatch(name)
    return int(match["epoch"]) if match else None
