"""Fixtures of the tests of checkpoints: a directory, a store, its content."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticrun.checkpoint.store import CheckpointStore
from tests.support.places import KINDS, Content, make_place
from tests.support.stores import acquired


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "digits"


@pytest.fixture
def local_store(directory: Path) -> Iterator[CheckpointStore]:
    with acquired(directory) as store:
        yield store


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return a directory, or the URL of an object store."""
    return make_place(request.param, tmp_path)


@pytest.fixture
def store(place: str) -> Iterator[CheckpointStore]:
    with acquired(place) as store:
        yield store


@pytest.fixture
def content(place: str) -> Content:
    return Content(place)
