"""What a power cut may leave of a directory: recorded operations, enumerated states.

The model is harsher than any file system. Until a file is forced to the disk, what was
written since may be absent, there in part, or zeros of the right length. Until a
directory is forced there, each change of a name in it may have come to the disk or not,
in any combination. A file's fsync forces its content, not its name.
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from elasticrun.checkpoint.files import durable, replacing

Tree = dict[str, "bytes | Tree"]

_MOST_SUBSETS = 6  # Of pending changes, all combinations; of more, the telling ones.


@dataclass
class _File:
    """A file's content as it is forced to the disk, and what was done since.

    Attributes:
        pending: Contents after each operation since then.
    """

    forced: bytes = b""
    pending: list[bytes] = field(default_factory=list)

    @property
    def content(self) -> bytes:
        return self.pending[-1] if self.pending else self.forced

    def variants(self) -> set[bytes]:
        """Return what a power cut may leave."""
        found = {self.forced, *self.pending}
        for content in self.pending:
            half = len(content) // 2
            found |= {content[:half], bytes(len(content))}
            found |= {bytes(half) + content[half:], content[:half] + bytes(half)}
        return found


@dataclass
class _Directory:
    """The names that are forced to the disk, and their changes since then."""

    forced: dict[str, int] = field(default_factory=dict)
    pending: list[dict[str, int | None]] = field(default_factory=list)

    def variants(self) -> list[dict[str, int]]:
        """Return what a power cut may leave."""
        return [self._after(chosen) for chosen in self._subsets()]

    def _subsets(self) -> Iterator[tuple[int, ...]]:
        every = range(len(self.pending))
        if len(self.pending) <= _MOST_SUBSETS:
            for size in range(len(self.pending) + 1):
                yield from itertools.combinations(every, size)
            return
        for number in every:
            yield tuple(range(number))
            yield (number,)
            yield tuple(n for n in every if n != number)
        yield tuple(every)

    def _after(self, chosen: tuple[int, ...]) -> dict[str, int]:
        names = dict(self.forced)
        for number in chosen:
            for name, child in self.pending[number].items():
                if child is None:
                    names.pop(name, None)
                else:
                    names[name] = child
        return names


class Recorder:
    """Records what happens below a directory, and what a power cut would leave of it.

    Args:
        ignored: Names of files whose content does not matter.
    """

    def __init__(self, root: Path, *, ignored: tuple[str, ...] = ("lock",)) -> None:
        self._files: dict[int, _File] = {}
        self._directories: dict[int, _Directory] = {}
        self._ids: dict[int, int] = {}
        self._ignored = ignored
        self._next = itertools.count()
        self._root = self._adopt(root)
        self._seen: set[str] = set()
        self.on_state: Callable[[str, Tree], None] = lambda operation, tree: None

    def _adopt(self, path: Path) -> int:
        """Take in what is there, as forced to the disk."""
        number = self._new_id(path)
        if path.is_dir():
            names = {each.name: self._adopt(each) for each in path.iterdir()}
            self._directories[number] = _Directory(names)
        else:
            self._files[number] = _File(path.read_bytes())
        return number

    def _new_id(self, path: Path | int) -> int:
        number = next(self._next)
        self._ids[os.stat(path).st_ino] = number
        return number

    def _id(self, path: Path | int | str) -> int | None:
        """Return what is known under an inode; None for what is not below the root."""
        return self._ids.get(os.stat(path).st_ino)

    # Operations.

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record while the block runs, and hand on the states after each operation."""
        with ExitStack() as stack:
            for name in ("open", "fsync", "ftruncate", "mkdir", "unlink", "rmdir"):
                wrapped = getattr(self, f"_{name}")(getattr(os, name))
                stack.enter_context(mock.patch.object(os, name, wrapped))
            replace = self._replace(os.replace)
            stack.enter_context(mock.patch.object(os, "replace", replace))
            for module in (durable, replacing):
                stack.enter_context(
                    mock.patch.object(module, "open", self.open, create=True)
                )
            yield

    def open(self, path: Any, mode: str = "r", **keywords: Any) -> Any:
        """Open a file as `open` does; what is written to it is recorded."""
        if mode == "rb":
            return builtins.open(path, mode, **keywords)
        existed = os.path.lexists(path)
        raw = _RecordedFile(str(path), mode.replace("b", ""))
        raw.recorder = self
        if existed:
            self._note_content(raw.fileno(), b"")
        else:
            self._note_new(Path(path), _File())
        return io.BufferedWriter(raw)

    def note_written(self, descriptor: int, position: int, data: bytes) -> None:
        number = self._id(descriptor)
        if number is None:
            return
        old = self._files[number].content.ljust(position, b"\0")
        content = old[:position] + data + old[position + len(data) :]
        self._note_content(descriptor, content)

    def _note_content(self, descriptor: int, content: bytes) -> None:
        number = self._id(descriptor)
        if number is not None:
            self._files[number].pending.append(content)
            self._report("write")

    def _note_new(self, path: Path, what: _File | _Directory) -> None:
        parent = self._id(path.parent)
        if parent is None:
            return
        number = self._new_id(path)
        if isinstance(what, _File):
            self._files[number] = what
        else:
            self._directories[number] = what
        self._directories[parent].pending.append({path.name: number})
        self._report("create")

    def _note_gone(self, path: Any, dir_fd: int | None) -> None:
        parent = self._id(Path(path).parent if dir_fd is None else dir_fd)
        if parent is not None:
            self._directories[parent].pending.append({Path(path).name: None})
            self._report("remove")

    def _open(self, original: Callable[..., int]) -> Callable[..., int]:
        def call(path: Any, flags: int, *rest: Any, **keywords: Any) -> int:
            is_new = bool(flags & os.O_CREAT) and not os.path.lexists(path)
            descriptor = original(path, flags, *rest, **keywords)
            if is_new:
                self._note_new(Path(path), _File())
            return descriptor

        return call

    def _fsync(self, original: Callable[[int], None]) -> Callable[[int], None]:
        def call(descriptor: int) -> None:
            original(descriptor)
            number = self._id(descriptor)
            if number in self._files:
                file = self._files[number]
                file.forced, file.pending = file.content, []
                self._report("fsync")
            elif number in self._directories:
                directory = self._directories[number]
                everything = tuple(range(len(directory.pending)))
                directory.forced = directory._after(everything)
                directory.pending = []
                self._report("fsync")

        return call

    def _ftruncate(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(descriptor: int, length: int) -> None:
            original(descriptor, length)
            number = self._id(descriptor)
            if number is not None:
                content = self._files[number].content
                self._note_content(descriptor, content[:length])

        return call

    def _mkdir(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *rest: Any, **keywords: Any) -> None:
            original(path, *rest, **keywords)
            self._note_new(Path(path), _Directory())

        return call

    def _unlink(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(path: Any, *, dir_fd: int | None = None) -> None:
            original(path, dir_fd=dir_fd)
            self._note_gone(path, dir_fd)

        return call

    _rmdir = _unlink

    def _replace(self, original: Callable[..., None]) -> Callable[..., None]:
        def call(source: Any, target: Any) -> None:
            number = self._id(source)
            original(source, target)
            parent = self._id(Path(target).parent)
            if parent is not None and number is not None:
                change = {Path(source).name: None, Path(target).name: number}
                self._directories[parent].pending.append(change)
                self._report("rename")

        return call

    # States.

    def _report(self, operation: str) -> None:
        for tree in self.states():
            key = repr(tree)
            if key not in self._seen:
                self._seen.add(key)
                self.on_state(operation, tree)

    def forget(self) -> None:
        """Hand on again what was handed on before: something else is expected of it."""
        self._seen.clear()

    def states(self) -> Iterator[Tree]:
        """Yield each tree that a power cut now may leave."""
        yield from self._trees(self._root)

    def _trees(self, number: int) -> Iterator[Tree]:
        for names in self._directories[number].variants():
            choices = [
                [(name, each) for each in self._of(name, child)]
                for name, child in sorted(names.items())
            ]
            for chosen in itertools.product(*choices):
                yield dict(chosen)

    def _of(self, name: str, number: int) -> Iterator[bytes | Tree]:
        if number in self._directories:
            yield from self._trees(number)
        elif name in self._ignored:
            yield b""
        else:
            yield from sorted(self._files[number].variants())


class _RecordedFile(io.FileIO):
    recorder: Recorder

    def write(self, data: Any) -> int:
        position = self.tell()
        written = super().write(data)
        self.recorder.note_written(
            self.fileno(), position, bytes(memoryview(data)[:written])
        )
        return written


def lay_out(tree: Tree, target: Path) -> None:
    """Write a state as files."""
    target.mkdir()
    for name, content in tree.items():
        if isinstance(content, bytes):
            (target / name).write_bytes(content)
        else:
            lay_out(content, target / name)
