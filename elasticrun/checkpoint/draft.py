"""One checkpoint: a draft while ranks write into it, a checkpoint once committed."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from elasticrun.checkpoint import files
from elasticrun.checkpoint.files import DamagedFileError, FileRecord
from elasticrun.checkpoint.manifest import MANIFEST_NAME, Manifest, check_file_name
from elasticrun.checkpoint.memory import Captured
from elasticrun.errors import CheckpointError

logger = logging.getLogger(__name__)

MUST_BE_SHARED = (
    "The checkpoint directory must be on a file system that all replicas see."
)


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint, open for reading."""

    path: Path
    manifest: Manifest

    @property
    def number(self) -> int:
        return self.manifest.number

    def names(self) -> tuple[str, ...]:
        """Return the names of its files."""
        return tuple(record.name for record in self.manifest.files)

    def has(self, name: str) -> bool:
        """Return whether it holds a file of this name."""
        return name in self.names()

    def open(self, name: str) -> BinaryIO:
        """Open a file for reading after its size and checksum have been checked.

        Raises:
            KeyError: The checkpoint was saved without it.
            CheckpointError: It is missing or damaged.
        """
        try:
            return files.open_checked(self.path / name, self.manifest.record(name))
        except DamagedFileError as error:
            raise DamagedFileError(
                f"{error} It cannot be trusted. Start the job again: it goes on from "
                "the newest checkpoint that is whole."
            ) from error


class Draft:
    """A checkpoint being written, which does not exist until it is committed."""

    def __init__(self, path: Path, number: int) -> None:
        self.path = path
        self.number = number

    def write(self, name: str, write: Callable[[BinaryIO], object]) -> FileRecord:
        """Write one file and force it to the disk.

        Raises:
            ValueError: The name is not a plain file name.
            OSError: The file exists or could not be written.
        """
        check_file_name(name)
        return files.write_file(self.path / name, write)

    def write_captured(self, name: str, captured: Captured) -> FileRecord:
        """Write one file from memory and force it to the disk.

        Raises:
            ValueError: The name is not a plain file name.
            OSError: The file exists or could not be written.
        """
        check_file_name(name)
        return files.write_blocks(
            self.path / name, captured.blocks, checksum=captured.checksum
        )

    def copy(self, checkpoint: Checkpoint, name: str) -> FileRecord:
        """Carry a file over from another checkpoint.

        Raises:
            KeyError: The checkpoint was saved without it.
            CheckpointError: It is damaged.
            OSError: It could not be written.
        """
        record = checkpoint.manifest.record(name)
        return files.copy_file(checkpoint.path / name, self.path / name, record=record)

    def adopt(self, name: str) -> FileRecord:
        """Take in a file that somebody else has written here and forced to the disk.

        Raises:
            ValueError: It is not a plain file, or its name is the manifest's.
            OSError: It cannot be read.
        """
        check_file_name(name)
        return files.measure_file(self.path / name)

    def commit(self, manifest: Manifest) -> Checkpoint:
        """Make the checkpoint exist, durably; rank 0 only, once all ranks have written.

        Raises:
            CheckpointError: A file in the manifest is not here as its rank wrote it.
            OSError: It could not be written; `abandon` it.
        """
        if manifest.number != self.number:
            raise ValueError(f"{self.path} cannot have the number {manifest.number}")
        for record in manifest.files:
            self._check_present(record)
        files.fsync_directory(self.path)
        files.write_atomically(self.path / MANIFEST_NAME, manifest.encode())
        files.fsync_directory(self.path.parent)
        return Checkpoint(self.path, manifest)

    def abandon(self) -> None:
        """Remove what was written; rank 0 only. What cannot be removed now is torn."""
        try:
            remove_checkpoint(self.path)
        except OSError as error:
            logger.warning("%s could not be removed: %s", self.path, error)

    def _check_present(self, record: FileRecord) -> None:
        path = self.path / record.name
        size = files.find_size(path)
        if size != record.size:
            found = "is missing" if size is None else f"has {size} bytes"
            raise CheckpointError(
                f"{path} {found} on host {socket.gethostname()}, but its replica wrote "
                f"{record.size} bytes. {MUST_BE_SHARED}"
            )


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint in any condition; half a removal leaves a torn one."""
    files.remove_tree(path, first=MANIFEST_NAME)
