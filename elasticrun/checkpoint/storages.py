"""Which storage keeps a place."""

from __future__ import annotations

import os
from pathlib import Path

from elasticrun.checkpoint.local import LocalStorage
from elasticrun.checkpoint.objects import open_objects
from elasticrun.checkpoint.place import parse_place
from elasticrun.checkpoint.remote import RemoteStorage
from elasticrun.checkpoint.storage import Storage


def storage_at(path: str | os.PathLike[str]) -> Storage:
    """Return the storage for a directory's path or an object store's URL.

    Nothing is made, and nothing is asked of a store.

    Raises:
        ValueError: It is a URL without a path, or with a slash too few.
        CheckpointError: What is needed for such URLs is not installed.
    """
    place = parse_place(path)
    if isinstance(place, Path):
        return LocalStorage(place)
    return RemoteStorage(open_objects(place))
