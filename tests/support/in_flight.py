"""What tests of saves in flight look at: the directory, the thread, a user's state."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from elasticrun import AdaptiveDataLoader, State, request_checkpoint
from elasticrun.checkpoint import draft
from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.storage.local import LocalStorage
from tests.support.data import Numbers
from tests.support.held import WRITER, Held


def list_paths(directory: Path) -> list[Path]:
    numbers = draft.list_numbers(LocalStorage(directory))
    return [directory / draft.checkpoint_name(number) for number in numbers]


def read_checkpoint(path: Path) -> Checkpoint:
    number = draft.number_of(path.name)
    assert number is not None
    return draft.read_checkpoint(LocalStorage(path.parent), number)


def committed(directory: Path) -> list[int]:
    """Return the numbers of the checkpoints that exist, the oldest first."""
    found = [
        path for path in list_paths(directory) if (path / "manifest.json").exists()
    ]
    return sorted(int(path.name.partition("-")[2]) for path in found)


def batches(num: int) -> AdaptiveDataLoader:
    return AdaptiveDataLoader(Numbers(num), 1, name="train")


def is_writing() -> bool:
    return any(thread.name == WRITER for thread in threading.enumerate())


class Text(State):
    """Holds a text, whose `save` is a user's own."""

    def __init__(self, text: str = "initial", name: str = "text") -> None:
        super().__init__(name)
        self.text = text

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(self.text.encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.text = fileobj.read().decode()


def loop_with_save_in_flight(held: Held, num: int = 3) -> Iterator[int]:
    """Loop over batches; from the second one on the first one's save is in flight."""
    for _ in (loader := batches(num)):
        if loader.batch_index == 0:
            request_checkpoint()
        if loader.batch_index == 1:
            held.wait_for_writer()
        yield loader.batch_index
