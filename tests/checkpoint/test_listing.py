"""A counter in a checkpoint directory is read as written, or not believed."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.checkpoint.draft import read_counter, write_counter
from elasticrun.checkpoint.storage.remote import storage_at


def test_counter_comes_back(tmp_path: Path) -> None:
    storage = storage_at(tmp_path)
    assert read_counter(storage, "generation") == -1
    write_counter(storage, "generation", 41)
    assert read_counter(storage, "generation") == 41
    (tmp_path / "directory").mkdir()
    assert read_counter(storage, "directory") == -1


@given(position=st.integers(0, 11), flip=st.integers(1, 255))
def test_damaged_counter_is_not_believed(
    tmp_path_factory: pytest.TempPathFactory, position: int, flip: int
) -> None:
    storage = storage_at(tmp_path_factory.mktemp("files"))
    write_counter(storage, "generation", 41)
    data = bytearray(storage.read("generation"))
    assert len(data) == 12
    data[position] ^= flip
    storage.replace("generation", bytes(data))
    assert read_counter(storage, "generation") == -1
    storage.replace("generation", bytes(data[:position]))
    assert read_counter(storage, "generation") == -1
