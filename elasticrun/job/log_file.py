"""A text file in which each row stands once, whatever stops the job."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from elasticrun.checkpoint.files.durable import (
    AppendedFile,
    OverwrittenFile,
    make_directory,
)
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.checkpoint.storage.place import parse_place
from elasticrun.errors import CheckpointError
from elasticrun.job.current import current_job
from elasticrun.logger import Logger

logger = Logger(__name__)

_VALUES = "size", "tail", "device", "inode"


class LogFile(io.TextIOBase):
    """A text file to append to, which goes back to its place in the checkpoint.

        log = LogFile("log.csv")
        rows = csv.writer(log)

    After a restart the rows that were written since the checkpoint are cut off, since
    the program will write them again; a file with rows of others behind that place is
    refused, and not cut. Rank 0 writes; on other replicas writing does
    nothing. Nothing is buffered, so a kill loses no row. What is in the file when the
    job begins stays. In an object store that is not kept, so there a job that is killed
    before its first checkpoint writes its first rows twice.

    Collective: make it on every replica, in the same order.
    Replay: made again in each generation. What replayed code writes, such as a header,
    is in the file already, and is left out.

    Args:
        path: Of the file, in UTF-8; its folder must exist.
        name: What it is called in checkpoints; that of the file, if not given.

    Raises:
        StateNameError: The name is taken.
        CheckpointError: On rank 0: it is another file than it was, or others have
            appended to it.
        OSError: On rank 0: the file cannot be opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, name: str | None = None
    ) -> None:
        super().__init__()
        self.path = Path(path).absolute()
        self._job = current_job()
        self._file = AppendedFile(self.path) if self._job.rank == 0 else None
        self._state = _LogFileState(name or self.path.name, self.path, self._file)
        self._record = self._state.record = self._open_record()
        self._job.register(self._state)
        if self._record is not None:
            if not self._job.has_resumed and self._record.known is not None:
                # What an earlier start wrote came to no checkpoint.
                self._state.cut(self._record.known["begin"])
            self._record.begin(self._state.marks)

    def _open_record(self) -> _Record | None:
        directory = self._job.settings.checkpoint_dir
        place = None if directory is None else parse_place(directory)
        if self._file is None or not isinstance(place, Path):
            return None
        return _Record(place / "log-files" / self._state.name, self._file)

    def write(self, text: str) -> int:
        """Append text; return how many characters it has."""
        if self.closed:
            raise ValueError(f"{self.path} is closed")
        if self._file is not None and not self._job.progress.is_done_already:
            data = text.encode()
            if self._record is not None:
                self._record.announce(len(data))
            self._file.append(data)
        return len(text)

    def writable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file; it stays in checkpoints as it is."""
        if self._file is not None and not self.closed:
            self._file.close()
        super().close()


class _Record:
    """Where a file began, and how far the job has written it; a kill does not lose it.

    Raises:
        CheckpointError: There is something else in its place.
    """

    def __init__(self, path: Path, file: AppendedFile) -> None:
        self._written = file
        make_directory(path.parent)
        try:
            self._file = OverwrittenFile(path)
        except ValueError as error:
            raise CheckpointError(
                f"{error} It says how far LogFile has written, which must not be "
                "guessed: rows would be lost. Remove it, and nothing is cut."
            ) from error
        self.known: dict[str, Any] | None = None
        if text := self._file.read():
            self.known = _decoded(text)
            if self.known is None:
                logger.warning("%s cannot be read: rows may come twice", path)

    def begin(self, values: dict[str, Any]) -> None:
        """Begin anew where the file ends now."""
        self._begin = values
        self.announce(0)

    def announce(self, num_bytes: int) -> None:
        """Note that so many bytes are about to be appended."""
        file = self._written
        if file.is_shared:  # Others' rows stay behind what is this job's.
            return
        own: dict[str, Any] = {"done": file.size, "tail": file.checksum(file.size)}
        own |= {"end": file.size + num_bytes, "begin": self._begin}
        self._file.replace(json.dumps(own).encode())


def _decoded(text: bytes) -> dict[str, Any] | None:
    try:
        own = json.loads(text)
        numbers = own["done"], own["tail"], own["end"], *map(own["begin"].get, _VALUES)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    is_known = all(isinstance(each, int) and each >= 0 for each in numbers)
    return own if is_known else None


class _LogFileState(BaseState):
    """How long the file is, and how to know it again; rank 0 alone knows.

    Args:
        file: Where it is written; None on other replicas.
    """

    has_parts_on_first_rank_only = True

    def __init__(self, name: str, path: Path, file: AppendedFile | None) -> None:
        super().__init__(name)
        self._path = path
        self._file = file
        self._values: dict[str, Any] = {"size": 0}  # On others: as rank 0 told last.
        if file is not None:
            self._values = self._values_at(file, file.size)
        self.record: _Record | None = None

    def save(self, fileobj: BinaryIO) -> None:
        if self._file is not None:
            self._file.force()  # What a checkpoint counts must be there.
        save_values(self.marks, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        self._values = load_values(fileobj)
        self.cut(self._values)

    def remember(self) -> Callable[[], None]:
        marks = self.marks
        return lambda: self.cut(marks)

    def own_part(self) -> Any:
        # The others learn it from this replica's record.
        return None if self._file is None else self.marks

    def add_parts(self, parts: Iterable[Any]) -> None:
        self._values = max(parts, key=lambda part: part["size"])

    @property
    def marks(self) -> dict[str, Any]:
        """Its length, and what it is known by."""
        file = self._file
        if file is not None and self._values["size"] != file.size:
            self._values = self._values_at(file, file.size)
        return self._values

    def _values_at(self, file: AppendedFile, size: int) -> dict[str, Any]:
        device, inode = file.identity
        own = dict(
            zip(_VALUES, (size, file.checksum(size), device, inode), strict=True)
        )
        return {**own, "path": str(self._path)}

    def cut(self, known: dict[str, Any]) -> None:
        """Cut it back to what is known of it."""
        file, size = self._file, known["size"]
        if file is None:
            return
        if file.size < size:
            logger.warning(
                "%s has %d bytes, but had %d when the checkpoint was written: the "
                "missing rows are lost",
                self._path,
                file.size,
                size,
            )
            return
        if misfit := self._misfit(file, known):
            raise CheckpointError(
                f"{self._path} ({file.size} bytes, inode {file.identity[1]}) is not as "
                f"LogFile {self.name!r} left it: {misfit}. It was to be cut back to "
                f"{size} bytes, as {known.get('path', 'it')} (inode "
                f"{known.get('inode', 'unknown')}) was; rows of others would be lost, "
                "so nothing is cut. Give LogFile the file that it had and nobody else "
                "writes to; or another name=, and it goes on behind what is there."
            )
        file.cut(size)

    def _misfit(self, file: AppendedFile, known: dict[str, Any]) -> str:
        """Return why the file is not the one that is known; empty if it is."""
        size, own = known["size"], self._values_at(file, known["size"])
        tail = known.get("tail", own["tail"])  # Older versions noted the size alone.
        if tail != own["tail"]:
            return (
                f"the checksum before byte {size} is {own['tail']:08x}, and was "
                f"{tail:08x}"
            )
        record = None if self.record is None else self.record.known
        if file.size == size or record is None:
            return ""
        # What follows was written since. A file that was copied, as to another machine,
        # is another one by its inode, and then has all that was written.
        is_same = all(own[key] == record["begin"][key] for key in ("device", "inode"))
        is_within = file.size <= record["end"] and (
            is_same
            or (
                record["done"] <= file.size
                and file.checksum(record["done"]) == record["tail"]
            )
        )
        end = record["end"]
        return "" if is_within else f"this job has written it up to byte {end} at most"
