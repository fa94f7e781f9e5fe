"""A job whose directory was removed under it does not save into that of another."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrun import CheckpointError, Variables, save_all_states
from tests.support.generations import run_once
from tests.support.stores import (
    STATES,
    acquired,
    load,
    manifest,
    names,
    save,
    write_all,
)


def remove(path: Path) -> None:
    shutil.rmtree(path)


def remove_the_lock(path: Path) -> None:
    (path / "lock").unlink()


def replace(path: Path) -> None:
    path.rename(path.with_name("old"))
    path.mkdir()
    (path / "lock").touch()


@pytest.mark.parametrize("lose", [remove, remove_the_lock, replace])
def test_nothing_is_begun_there(tmp_path: Path, lose: Callable[[Path], None]) -> None:
    path = tmp_path / "digits"
    with acquired(path) as store:
        save(store)
        lose(path)
        with pytest.raises(
            CheckpointError, match="lock, which this job has locked, is"
        ):
            store.begin(2)
    assert not (path / "checkpoint-00000002").exists()


def test_the_job_that_is_there_now_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "digits"
    with acquired(path, keep=1) as lost:
        draft = lost.begin(1)
        records = write_all(draft, STATES)
        remove(path)
        with acquired(path, keep=3) as store:
            others = store.begin(1)
            written = write_all(others, STATES)
            with pytest.raises(CheckpointError, match="is another file now"):
                draft.commit(manifest(1, *records))
            draft.abandon()
            others.commit(manifest(1, *written))
            save(store)
            with pytest.raises(CheckpointError, match="is another file now"):
                lost.prune()
            lost.release()
            assert names(store) == ["checkpoint-00000001", "checkpoint-00000002"]
            assert load(store.find_newest()) == STATES


def test_a_job_stops_at_its_next_save(tmp_path: Path) -> None:
    path = tmp_path / "digits"

    def script() -> None:
        Variables(value=1)
        save_all_states()
        remove(path)
        save_all_states()

    with pytest.raises(
        CheckpointError, match="lock, which this job has locked, is gone"
    ):
        run_once(script, path)
    assert not path.exists()
