"""A store removes what is old or was never committed, and nothing else."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from elasticrun.checkpoint.draft import is_uncommitted
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import FileRecord
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointWarning
from tests.support.places import Content, Folders, make_place
from tests.support.stores import (
    STATES,
    acquired,
    load,
    names,
    save,
)


def test_newest_are_kept(store: CheckpointStore) -> None:
    for _ in range(5):
        save(store)
        store.prune()
    assert names(store) == [f"checkpoint-{n:08d}" for n in (3, 4, 5)]


def test_restarts_that_save_once_do_not_pile_up(place: str) -> None:
    for _ in range(5):
        with acquired(place, keep=2) as store:
            store.find_newest()
            save(store)
            store.prune()
    assert names(store) == ["checkpoint-00000004", "checkpoint-00000005"]


def test_damaged_one_does_not_count_and_goes_when_it_is_old(
    place: str, content: Content
) -> None:
    with acquired(place, keep=2) as store:
        for _ in range(3):
            save(store)
        content.write("checkpoint-00000003/model", b"Parameters")
        with pytest.warns(CheckpointWarning, match="00000003 is skipped"):
            store.find_newest()
        store.prune()
        assert names(store) == [f"checkpoint-{n:08d}" for n in (1, 2, 3)]
        save(store)
        store.prune()
        assert names(store) == [f"checkpoint-{n:08d}" for n in (2, 3, 4)]
        save(store)
        store.prune()
        assert names(store) == [f"checkpoint-{n:08d}" for n in (4, 5)]


def test_truncated_one_does_not_count_unseen(place: str) -> None:
    with acquired(place, keep=1) as store:
        older = save(store)
        Content(save(store).path).write("model", b"")
        store.prune()
        assert older.path.name in names(store)


def test_failed_removal_is_a_warning(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_store
    for _ in range(4):
        save(store)

    def rmdir(path: str, *, dir_fd: int | None = None) -> None:
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))

    path = store.place / "checkpoint-00000001"
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        with pytest.warns(CheckpointWarning) as caught:
            store.prune()
    [said] = [str(warning.message) for warning in caught]
    # From Python 3.13 on, the error names a path, too.
    assert said.startswith(
        f"{path} could not be removed: [Errno 16] Device or resource busy"
    )
    assert said.endswith(". It takes space until it can be.")
    assert path.is_dir()
    store.remove_uncommitted()
    assert not path.is_dir()


def test_sweep_removes_only_what_was_never_committed(
    store: CheckpointStore, content: Content, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save(store)
    torn = store.begin(2).path
    Content(torn).write("manifest.json.tmp", b"")
    mine = "checkpoint-before-the-holidays"
    content.write(f"{mine}/note", b"")
    store.remove_uncommitted()
    assert names(store) == [saved.path.name, mine]
    assert caplog.messages == [f"removing {torn}, which was never committed"]


DATE = 20261122


def put_mine(content: Content) -> None:
    """Leave what somebody else has named like checkpoints: two folders and a file."""
    content.write(f"checkpoint-{DATE}/weights.pt", b"mine")
    content.write("checkpoint-00000003/log/text", b"mine, too")
    content.write("checkpoint-00000007", b"a file")


def assert_mine(content: Content) -> None:
    assert content.read(f"checkpoint-{DATE}/weights.pt") == b"mine"
    assert content.read("checkpoint-00000003/log/text") == b"mine, too"
    assert content.read("checkpoint-00000007") == b"a file"


def test_what_is_only_named_like_a_checkpoint_is_left_alone(
    place: str, content: Content
) -> None:
    put_mine(content)
    told = (
        f"{re.escape(place)}/checkpoint-00000003, .*/checkpoint-00000007, "
        f".*/checkpoint-{DATE}: named like a checkpoint, but elasticrun did not make"
    )
    with acquired(place, keep=1) as store:
        assert store.next_generation() == 0
        with pytest.warns(CheckpointWarning, match=told) as caught:
            store.remove_uncommitted()
        assert len(caught) == 1
        assert store.find_newest() is None
        saved = [save(store).number for _ in range(3)]
        assert saved == [DATE + 1, DATE + 2, DATE + 3]
        store.prune()
        store.begin(DATE + 4).write("model", lambda file: file.write(b"half"))
    assert_mine(content)
    with acquired(place, keep=1) as store:
        with pytest.warns(CheckpointWarning, match=told):
            store.remove_uncommitted()
        newest = store.find_newest()
        assert newest is not None
        assert newest.number == DATE + 3
        assert store.next_number() == DATE + 4
    assert_mine(content)
    assert len(names(store)) == 4


def test_what_comes_in_the_way_later_is_not_written_over(
    store: CheckpointStore, content: Content
) -> None:
    save(store)
    content.write("checkpoint-00000002/weights.pt", b"mine")
    with pytest.raises(FileExistsError, match=r"00000002 is in the way: .* Move it"):
        store.begin(2)
    assert content.read("checkpoint-00000002/weights.pt") == b"mine"
    assert save(store).number == 3
    store.prune()
    assert content.names("checkpoint-00000002") == ["weights.pt"]


def test_one_whose_manifest_was_taken_away_is_left_alone(
    store: CheckpointStore, content: Content
) -> None:
    save(store), save(store)
    content.remove("checkpoint-00000002/manifest.json")
    with pytest.warns(CheckpointWarning, match="or its manifest was removed"):
        store.remove_uncommitted()
    assert content.names("checkpoint-00000002") == sorted(STATES)
    assert save(store).number == 3


@pytest.mark.parametrize("name", ["manifest.json", "model"])
def test_half_a_removal_leaves_a_draft(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    store = local_store
    path = save(store).path
    replace, unlink = os.replace, os.unlink

    def fail(act: Callable[..., None]) -> Callable[..., None]:
        def operation(source: Any, *others: Any, **keywords: Any) -> None:
            if os.path.basename(source) == name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            act(source, *others, **keywords)

        return operation

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail(replace))
        patch.setattr(os, "unlink", fail(unlink))
        with pytest.raises(OSError, match="Input/output error"):
            store.storage.remove(path.name)
    is_whole = name == "manifest.json"
    assert is_uncommitted(store.storage, 1) != is_whole
    assert store.storage.is_draft(path.name) != is_whole
    store.remove_uncommitted()
    assert path.is_dir() == is_whole


def test_half_a_removal_from_an_object_store_leaves_a_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = make_place("folders", tmp_path)
    with acquired(place) as store:
        path = save(store).path
        rm, num_calls = Folders.rm, 0

        def fail_at_the_end(self: Folders, *arguments: Any, **keywords: Any) -> None:
            nonlocal num_calls
            num_calls += 1
            if num_calls == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            rm(self, *arguments, **keywords)

        with monkeypatch.context() as patch:
            patch.setattr(Folders, "rm", fail_at_the_end)
            with pytest.raises(OSError, match="Input/output error"):
                store.storage.remove(path.name)
        assert Content(path).names() == ["manifest.json.draft"]
        store.remove_uncommitted()
    assert names(store) == []


def test_an_empty_folder_is_a_draft(local_store: CheckpointStore) -> None:
    path = local_store.place / "checkpoint-00000001"
    path.mkdir()
    local_store.remove_uncommitted()
    assert not path.exists()


def test_a_link_is_removed_but_not_what_it_leads_to(
    directory: Path, tmp_path: Path
) -> None:
    store = CheckpointStore(directory, job="digits", keep=1)
    store.acquire(timeout=0)
    old = save(store).path
    old.rename(tmp_path / "moved")
    old.symlink_to(tmp_path / "moved")
    assert load(store.find_newest()) == STATES
    save(store)
    store.prune()
    store.release()
    assert names(store) == ["checkpoint-00000002"]
    assert sorted(os.listdir(tmp_path / "moved")) == sorted([*STATES, "manifest.json"])


def test_one_that_somebody_else_removes_is_no_damage(
    local_store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = local_store
    older, newer = save(store), save(store)
    open_checked = durable.open_checked

    def remove_first(path: Path, record: FileRecord, *, is_read: bool) -> BinaryIO:
        if newer.path.is_dir():
            store.storage.remove(newer.path.name)
        return open_checked(path, record, is_read=is_read)

    monkeypatch.setattr(durable, "open_checked", remove_first)
    assert store.find_newest() == older
    store.storage.remove(newer.path.name)


def test_sweep_leaves_what_it_cannot_reach(local_store: CheckpointStore) -> None:
    store = local_store
    path = store.place / "checkpoint-00000001"
    path.symlink_to(path.name)
    store.remove_uncommitted()
    assert path.is_symlink()


def test_keep_must_be_positive(directory: Path) -> None:
    with pytest.raises(ValueError, match="keep=0: at least 1 checkpoint must be kept"):
        CheckpointStore(directory, job="digits", keep=0)
