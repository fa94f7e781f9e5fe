"""A text file in which each row stands once, whatever stops the job."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO

from elasticrun.checkpoint.files.durable import AppendedFile, write_atomically
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.checkpoint.states.values import load_values, save_values
from elasticrun.checkpoint.storage.place import parse_place
from elasticrun.job.current import current_job

logger = logging.getLogger(__name__)


class LogFile(io.TextIOBase):
    """A text file to append to, which goes back to its place in the checkpoint.

        log = LogFile("log.csv")
        rows = csv.writer(log)

    After a restart the rows that were written since the checkpoint are cut off, since
    the program will write them again. Rank 0 writes; on other replicas writing does
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
        OSError: On rank 0: the file cannot be opened.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, name: str | None = None
    ) -> None:
        super().__init__()
        self.path = Path(path).absolute()
        self._job = current_job()
        self._file = AppendedFile(self.path) if self._job.rank == 0 else None
        state = _LogFileState(name or self.path.name, self.path, self._file)
        self._job.register(state)
        if self._file is not None and not self._job.has_resumed:
            self._begin(state.name, self._file)

    def _begin(self, name: str, file: AppendedFile) -> None:
        """Cut off what an earlier start wrote that came to no checkpoint."""
        directory = self._job.settings.checkpoint_dir
        place = None if directory is None else parse_place(directory)
        if not isinstance(place, Path):
            return
        begins = place / "log-files" / name
        if begins.exists():
            file.cut(min(file.size, int(begins.read_text())))
        else:
            begins.parent.mkdir(exist_ok=True)
            write_atomically(begins, str(file.size).encode())

    def write(self, text: str) -> int:
        """Append text; return how many characters it has."""
        if self.closed:
            raise ValueError(f"{self.path} is closed")
        if self._file is not None and not self._job.progress.is_repeating:
            self._file.append(text.encode())
        return len(text)

    def writable(self) -> bool:
        """Return True."""
        return True

    def close(self) -> None:
        """Close the file; it stays in checkpoints as it is."""
        if self._file is not None and not self.closed:
            self._file.close()
        super().close()


class _LogFileState(BaseState):
    """How long the file is, which rank 0 alone knows.

    Args:
        file: Where it is written; None on other replicas.
    """

    has_parts_on_first_rank_only = True

    def __init__(self, name: str, path: Path, file: AppendedFile | None) -> None:
        super().__init__(name)
        self._path = path
        self._file = file
        self._size = 0  # On another replica: as rank 0 has told last.

    def save(self, fileobj: BinaryIO) -> None:
        if self._file is not None:
            self._file.force()  # What a checkpoint counts must be there.
        save_values({"size": self._own_size}, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        self._size = load_values(fileobj)["size"]
        self._cut(self._size)

    def remember(self) -> Callable[[], None]:
        size = self._own_size
        return lambda: self._cut(size)

    def own_part(self) -> Any:
        # The others learn it from this replica's record.
        return None if self._file is None else self._file.size

    def add_parts(self, parts: Iterable[Any]) -> None:
        self._size = max(parts)

    @property
    def _own_size(self) -> int:
        return self._size if self._file is None else self._file.size

    def _cut(self, size: int) -> None:
        if self._file is None:
            return
        if self._file.size < size:
            logger.warning(
                "%s has %d bytes, but had %d when the checkpoint was written: the "
                "missing rows are lost",
                self._path,
                self._file.size,
                size,
            )
        else:
            self._file.cut(size)
