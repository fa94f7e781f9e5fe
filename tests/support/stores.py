"""Stores, and checkpoints of a few bytes in them."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elasticrun.checkpoint.draft import Checkpoint, Draft
from elasticrun.checkpoint.files.durable import FileRecord
from elasticrun.checkpoint.manifest import Manifest
from elasticrun.checkpoint.store import CheckpointStore
from tests.support.places import Content

STATES = {"model": b"parameters", "random.0": b"generators", "empty": b""}


@contextmanager
def acquired(place: str | Path, **settings: Any) -> Iterator[CheckpointStore]:
    store = CheckpointStore(place, job="digits", **settings)
    store.acquire(timeout=0)
    try:
        yield store
    finally:
        store.release()


def manifest(number: int, *files: FileRecord, generation: int = 0) -> Manifest:
    return Manifest(
        job="digits",
        number=number,
        generation=generation,
        world_size=2,
        position={"epoch": 1, "index": number},
        time=1700000000.5,
        torch_version="2.13.0",
        elasticrun_version="0.1.0",
        files=files,
    )


def write_all(draft: Draft, states: Mapping[str, bytes]) -> list[FileRecord]:
    return [
        draft.write(name, lambda file, data=data: file.write(data))  # type: ignore[misc]
        for name, data in states.items()
    ]


def save(
    store: CheckpointStore,
    states: Mapping[str, bytes] = STATES,
    *,
    generation: int = 0,
) -> Checkpoint:
    draft = store.begin(store.next_number())
    records = write_all(draft, states)
    return draft.commit(manifest(draft.number, *records, generation=generation))


def load(checkpoint: Checkpoint | None) -> dict[str, bytes]:
    assert checkpoint is not None
    loaded = {}
    for name in checkpoint.names():
        with checkpoint.open(name) as file:
            loaded[name] = file.read()
    return loaded


def names(store: CheckpointStore) -> list[str]:
    return Content(store.place).checkpoints()


def forge(path: Path, file: str, **changes: Any) -> None:
    """Change what a manifest says of a file, as somebody would who can write there."""
    fields = json.loads((path / "manifest.json").read_bytes())
    del fields["crc32"]
    (entry,) = [each for each in fields["files"] if each["name"] == file]
    entry |= changes
    body = json.dumps(fields, indent=2).removesuffix("\n}")
    trailer = f',\n  "crc32": "{zlib.crc32(body.encode()):08x}"\n}}\n'
    (path / "manifest.json").write_text(body + trailer)


class Surprise:
    """Touches a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))
