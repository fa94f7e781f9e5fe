"""The interface of a storage: a directory, or an object store.

A storage has one folder of files for each checkpoint, and a few files beside the
folders. Names have no slashes. A folder with a manifest is a checkpoint. One with a
file `DRAFT_NAME` instead is a draft: being written, or being removed. A folder with
neither belongs to somebody else, whatever its name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

from elasticrun.checkpoint.files.durable import FileRecord
from elasticrun.checkpoint.storage.place import OwnerProcess, Place


class Storage(ABC):
    """Keeps the checkpoints of one job at one place.

    What cannot be written, read or told raises an OSError; a FileNotFoundError says
    that it is known to be absent, a DamagedFileError that it is not what was written.
    Whoever would write where another job has taken over gets a CheckpointError.
    """

    @property
    @abstractmethod
    def place(self) -> Place:
        """Where it is, for people."""

    @abstractmethod
    def locate(self, *names: str) -> Place:
        """Return where a folder, or a file in it, is."""

    # Who may write.

    @abstractmethod
    def acquire(self, *, timeout: float) -> None:
        """Keep other jobs out; make the place if it is new.

        Args:
            timeout: Seconds to wait for an owner, which may be about to exit.
        """

    @abstractmethod
    def release(self) -> None:
        """Let another job have it; it may be free already."""

    @abstractmethod
    def find_owner(self) -> OwnerProcess | None:
        """Return who uses it now, without taking it."""

    @abstractmethod
    def folder_of_lost_owner(self) -> str | None:
        """Return the folder that a job may still write into though it has lost this."""

    # Files beside the folders, which are replaced as a whole.

    @abstractmethod
    def list_names(self) -> list[str]:
        """Return the names of folders, and perhaps of files beside them."""

    @abstractmethod
    def read(self, *names: str) -> bytes:
        """Return the content of a small file."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Replace a small file durably: a crash leaves the old or the new content."""

    # Folders.

    @abstractmethod
    def begin(self, folder: str) -> None:
        """Make a draft without files; one that was left there goes."""

    @abstractmethod
    def is_draft(self, folder: str) -> bool:
        """Return whether a folder was begun, or is being removed, by elasticrun."""

    @abstractmethod
    def join(self, folder: str) -> bool:
        """Return whether a draft that another replica has begun is to be seen here."""

    @abstractmethod
    def commit(self, folder: str, manifest: bytes) -> None:
        """Put the manifest, durably, after all other files: it makes the folder count.

        `DRAFT_NAME` goes then; one that cannot be removed does not matter.
        """

    def unforced(self) -> Storage:
        """Return what writes here, too, and leaves it to others to force it to a disk.

        A folder that it commits counts. A power cut may take parts of it, until `force`
        has been called. What cannot do so returns itself.
        """
        return self

    def is_unforced(self, folder: str) -> bool:
        """Return whether a folder was committed, and not yet forced to the disk."""
        del folder
        return False

    def force(self, folder: str, names: Iterable[str]) -> None:
        """Force a folder with these files, and its manifest, to the disk."""
        raise NotImplementedError(f"{self.place} has nothing to force")

    @abstractmethod
    def remove(self, folder: str) -> None:
        """Remove a folder in any condition; half a removal leaves a draft."""

    @abstractmethod
    def measure_folder(self, folder: str) -> int:
        """Return how many bytes are in it, 0 if that cannot be told."""

    # Files in folders.

    @abstractmethod
    def write(
        self, folder: str, name: str, write: Callable[[BinaryIO], object]
    ) -> FileRecord:
        """Write a file with what `write` puts into a stream that cannot seek."""

    def write_captured(
        self, folder: str, name: str, blocks: Sequence[memoryview]
    ) -> FileRecord:
        """Write a file from memory, while training runs."""
        return self.write(folder, name, lambda file: file.writelines(blocks))

    @abstractmethod
    def copy(self, source: str, folder: str, record: FileRecord) -> FileRecord:
        """Copy a file from one folder to another, and check it against its record."""

    def verify(self, folder: str, record: FileRecord) -> None:
        """Read every byte of a file."""
        self.open_checked(folder, record).close()

    @abstractmethod
    def open_checked(self, folder: str, record: FileRecord) -> BinaryIO:
        """Open a file for reading once its size and checksum have been found right."""

    @abstractmethod
    def find_sizes(self, folder: str, names: Iterable[str]) -> dict[str, int | None]:
        """Return the size of each of these files, None for what is not there.

        Whoever removes what has no manifest must not take an unreachable one for none.
        """


def not_ours_error(place: Place) -> FileExistsError:
    """Return the error for something of others in the place of a new folder."""
    return FileExistsError(
        f"{place} is in the way: elasticrun did not make it, so it will not remove it. "
        "Move it to another place."
    )
