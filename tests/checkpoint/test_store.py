"""A store finds the newest good checkpoint, and says what is wrong with the others."""

from __future__ import annotations

import os
import re
import socket
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import DamagedFileError, FileRecord
from elasticrun.checkpoint.storage.place import UNFORCED_NAME
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, CheckpointWarning
from tests.support.places import Content, make_place
from tests.support.stores import (
    STATES,
    acquired,
    load,
    manifest,
    names,
    save,
    write_all,
)

HOST = socket.gethostname()


# Saving and finding


def test_nothing_is_found_where_nothing_was_saved(store: CheckpointStore) -> None:
    assert store.find_newest() is None
    assert store.next_number() == 1


def test_making_a_store_touches_nothing(directory: Path) -> None:
    CheckpointStore(directory, job="digits")
    assert not directory.parent.exists()


def test_newest_is_found_bit_exact(store: CheckpointStore) -> None:
    save(store, {"model": b"older"})
    saved = save(store)
    found = store.find_newest()
    assert found == saved
    assert load(found) == STATES
    assert found is not None
    assert found.number == 2
    assert found.path == store.place / "checkpoint-00000002"
    assert found.names() == ("model", "random.0", "empty")
    assert found.has("model")
    assert not found.has("best")


def test_numbers_beyond_eight_digits_are_ordered(store: CheckpointStore) -> None:
    for number in (99_999_999, 100_000_000):
        store.begin(number).commit(manifest(number))
    found = store.find_newest()
    assert found is not None
    assert found.path.name == "checkpoint-100000000"
    assert store.next_number() == 100_000_001


def test_other_ranks_write_into_the_same_draft(store: CheckpointStore) -> None:
    other = CheckpointStore(store.place, job="digits")
    draft = store.begin(1)
    records = write_all(other.join(1), {"random.1": b"1"})
    records += write_all(draft, {"random.0": b"0"})
    committed = draft.commit(manifest(1, *records))
    opened = other.open(1, committed.manifest.digest)
    assert opened == committed
    assert load(opened) == {"random.1": b"1", "random.0": b"0"}
    other.release()


def test_draft_does_not_exist_before_its_commit(store: CheckpointStore) -> None:
    saved = save(store)
    write_all(store.begin(2), STATES)
    assert store.find_newest() == saved
    assert store.next_number() == 3


def test_abandoned_draft_is_removed(store: CheckpointStore) -> None:
    draft = store.begin(1)
    write_all(draft, STATES)
    draft.abandon()
    draft.abandon()
    assert names(store) == []


def test_begin_removes_a_torn_leftover(store: CheckpointStore) -> None:
    write_all(store.begin(1), {"leftover": b"1"})
    draft = store.begin(1)
    assert Content(draft.path).names() == ["manifest.json.draft"]


def test_begin_refuses_a_committed_number(store: CheckpointStore) -> None:
    path = re.escape(str(save(store).path))
    with pytest.raises(ValueError, match=f"{path} is committed; begin"):
        store.begin(1)
    assert load(store.find_newest()) == STATES


def test_join_needs_what_rank_0_has_begun(local_store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError) as caught:
        local_store.join(7)
    assert str(caught.value) == (
        f"{local_store.place}/checkpoint-00000007 is not there on host {HOST}, but "
        "rank 0 has begun it. The checkpoint directory must be on a file system that "
        "all replicas see."
    )


def test_commit_needs_every_file(store: CheckpointStore) -> None:
    draft = store.begin(1)
    records = write_all(draft, STATES)
    missing = FileRecord("random.1", 5, 0)
    with pytest.raises(CheckpointError) as caught:
        draft.commit(manifest(1, *records, missing))
    assert str(caught.value) == (
        f"{draft.path}/random.1 is missing on host {HOST}, but its replica wrote 5 "
        "bytes. The checkpoint directory must be on a file system that all replicas "
        "see."
    )
    with pytest.raises(CheckpointError, match=r"has 10 bytes on .* wrote 11 bytes\."):
        draft.commit(manifest(1, records[0]._replace(size=11)))
    assert store.find_newest() is None


def test_commit_needs_its_own_number(store: CheckpointStore) -> None:
    draft = store.begin(1)
    with pytest.raises(ValueError, match="00000001 cannot have the number 2"):
        draft.commit(manifest(2))


def test_draft_writes_only_into_its_directory(store: CheckpointStore) -> None:
    with pytest.raises(ValueError, match=r"'\.\./model' is not a plain"):
        write_all(store.begin(1), {"../model": b""})


def test_file_is_carried_over(store: CheckpointStore) -> None:
    old = save(store)
    draft = store.begin(2)
    new = draft.commit(manifest(2, draft.copy(old, "model")))
    Content(old.path).write("model", b"rot")
    assert load(new) == {"model": b"parameters"}


def test_damaged_file_is_not_carried_over(store: CheckpointStore) -> None:
    old = save(store)
    Content(old.path).write("model", b"Parameters")
    text = re.escape(f"{old.path}/model has the checksum")
    with pytest.raises(DamagedFileError, match=text):
        store.begin(2).copy(old, "model")


def test_opening_a_damaged_file_says_what_to_do(store: CheckpointStore) -> None:
    checkpoint = save(store)
    Content(checkpoint.path).remove("model")
    with pytest.raises(CheckpointError) as caught:
        checkpoint.open("model")
    assert str(caught.value) == (
        f"{checkpoint.path}/model is missing; it had 10 bytes. It cannot be trusted. "
        "Start the job again: it resumes from the newest good checkpoint."
    )


# Generations


def test_generations_count_from_0(store: CheckpointStore) -> None:
    assert [store.next_generation() for _ in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("counted", [None, b"", b"7", b"garbage \xff"])
def test_generation_survives_a_damaged_counter(
    store: CheckpointStore, counted: bytes | None, content: Content
) -> None:
    store.next_generation()
    save(store, generation=5)
    save(store, generation=4)
    content.remove("generation")
    if counted is not None:
        content.write("generation", counted)
    assert store.next_generation() == 6
    assert store.next_generation() == 7


def test_generation_survives_damaged_manifests(store: CheckpointStore) -> None:
    Content(save(store, generation=5).path).write("manifest.json", b"")
    assert store.next_generation() == 0


# Damage


def test_older_one_is_found_and_the_damage_named(store: CheckpointStore) -> None:
    save(store, {"model": b"older"})
    path = save(store).path
    Content(path).write("model", b"short")
    with pytest.warns(CheckpointWarning) as caught:
        found = store.find_newest()
    assert load(found) == {"model": b"older"}
    assert [str(warning.message) for warning in caught] == [
        (
            f"checkpoint-00000002 is skipped: {path}/model has 5 bytes, but 10 were "
            "written. The job resumes from checkpoint-00000001."
        )
    ]
    assert path.name in names(store)


@given(
    kind=st.sampled_from(["local", "memory"]),
    name=st.sampled_from([*(name for name in STATES if STATES[name]), "manifest.json"]),
    data=st.data(),
)
def test_any_damage_to_any_file_is_named(
    tmp_path_factory: pytest.TempPathFactory, kind: str, name: str, data: st.DataObject
) -> None:
    place = make_place(kind, tmp_path_factory.mktemp("job"))
    with acquired(place) as store:
        older = save(store, {"model": b"older"})
        path = save(store).path
        content = Content(path)
        size = len(content.read(name))
        position = data.draw(st.integers(0, size - 1), label="position")
        flip = data.draw(st.integers(0, 255), label="flip, 0 truncates")
        if flip:
            content.flip(name, position, flip)
        else:
            content.truncate(name, position)
        text = f"checkpoint-00000002 is skipped: {re.escape(str(path / name))} "
        with pytest.warns(CheckpointWarning, match=text):
            found = store.find_newest()
        assert found == older
        assert load(found) == {"model": b"older"}


def test_missing_state_file_is_named(store: CheckpointStore) -> None:
    older = save(store)
    Content(save(store).path).remove("random.0")
    with pytest.warns(CheckpointWarning, match=r"random\.0 is missing; it had 10 byt"):
        assert store.find_newest() == older


@pytest.mark.parametrize("kind", ["directory", "link", "pipe"])
def test_what_is_no_plain_file_is_named_and_not_followed(
    local_store: CheckpointStore, tmp_path: Path, kind: str
) -> None:
    store = local_store
    older = save(store)
    newer = save(store)
    path = newer.path / "model"
    path.rename(tmp_path / "elsewhere")
    if kind == "directory":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    else:
        os.mkfifo(path)
    text = f"{path} is (a link, )?not a plain file."
    with pytest.warns(CheckpointWarning, match=text):
        assert store.find_newest() == older
    with pytest.raises(DamagedFileError, match=text):
        store.begin(3).copy(newer, "model")


def test_renamed_directory_is_not_trusted(
    store: CheckpointStore, content: Content
) -> None:
    older = save(store)
    content.rename(save(store).path.name, "checkpoint-00000009")
    with pytest.warns(CheckpointWarning, match=r"manifest\.json is that of number 2\."):
        assert store.find_newest() == older


def test_job_does_not_start_anew_in_silence(store: CheckpointStore) -> None:
    first, second = save(store).path, save(store).path
    Content(first).remove("model")
    Content(second).write("manifest.json", b"{}")
    with pytest.raises(CheckpointError) as caught:
        store.find_newest()
    assert str(caught.value) == (
        f"no checkpoint in {store.place} is good:\n"
        f"  checkpoint-00000002: {second}/manifest.json is damaged: its checksum does "
        "not fit its 2 bytes.\n"
        f"  checkpoint-00000001: {first}/model is missing; it had 10 bytes.\n"
        "Starting at the beginning would lose their training. Restore one of them from "
        "a copy, or start anew: remove them, or give the "
        "job another directory (ELASTICRUN_CHECKPOINT_DIR)."
    )


def test_other_job_is_refused(store: CheckpointStore) -> None:
    path = re.escape(str(save(store).path))
    with pytest.raises(CheckpointError, match=f"{path} belongs to the job 'digits'"):
        CheckpointStore(store.place, job="text").find_newest()


def test_other_format_is_refused(store: CheckpointStore) -> None:
    save(store)
    newer = store.begin(2)
    store.storage.commit(newer.folder, replace(manifest(2), format=4).encode())
    text = re.escape(f"{newer.path}/manifest.json has check")
    with pytest.raises(CheckpointError, match=text):
        store.find_newest()


# What other ranks see


def test_absent_checkpoint_is_refused(store: CheckpointStore) -> None:
    path = store.place / "checkpoint-00000003"
    with pytest.raises(CheckpointError) as caught:
        store.open(3, "0123456789abcdef")
    assert str(caught.value) == (
        f"{path} cannot be read ([Errno 2] No such file or directory: "
        f"'{path}/manifest.json') on host {HOST}, but rank 0 has one with the digest "
        "0123456789abcdef. The checkpoint directory must be on a file system that all "
        "replicas see."
    )


def test_other_digest_is_refused(store: CheckpointStore) -> None:
    checkpoint = save(store)
    with pytest.raises(CheckpointError) as caught:
        store.open(1, "0123456789abcdef")
    assert str(caught.value) == (
        f"{checkpoint.path} has the digest {checkpoint.manifest.digest} on host "
        f"{HOST}, but rank 0 has one with the digest 0123456789abcdef. The "
        "checkpoint directory must be on a file system that all replicas see."
    )


def test_directory_that_rank_0_does_not_see_is_refused(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    store = local_store
    generation = store.next_generation()
    store.check_shared(generation)
    with pytest.raises(CheckpointError) as caught:
        CheckpointStore(tmp_path / "other", job="digits").check_shared(generation)
    assert str(caught.value) == (
        f"{tmp_path}/other does not show generation 0 on host {HOST}, which rank 0 "
        "has just begun there (it shows -1). The checkpoint directory must be on a "
        "file system that all replicas see."
    )
    with pytest.raises(CheckpointError, match=r"just begun there \(it shows 0\)"):
        store.check_shared(1)


def test_no_warning_comes_from_a_healthy_life(store: CheckpointStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            save(store)
            store.prune()
        store.remove_uncommitted()
        assert load(store.find_newest()) == STATES


# Left to successors, which read it from this machine's memory

WITHOUT_MARK = "without the mark"


def leave(store: CheckpointStore, states: dict[str, bytes]) -> Checkpoint:
    """Save what nobody has forced to the disk, under another launcher."""
    with mock.patch.object(os, "getppid", return_value=1):
        draft = store.begin(store.next_number(), is_forced=False)
    records = write_all(draft, states)
    return draft.commit(manifest(draft.number, *records))


@pytest.mark.parametrize("name", ["model", "random.0", "manifest.json"])
@pytest.mark.parametrize("has_older", [True, False])
def test_a_power_cut_takes_at_most_what_was_left(
    local_store: CheckpointStore, name: str, has_older: bool
) -> None:
    store = local_store
    older = save(store, {"model": b"older"}) if has_older else None
    left = leave(store, STATES)
    assert load(store.find_newest()) == STATES
    content = Content(left.path)
    content.write(name, bytes(len(content.read(name))))
    text = r"The machine went down before it was on the disk\."
    if older is None:
        with pytest.raises(CheckpointError, match=f"is good:\n.*{text}\nStarting at"):
            store.find_newest()
        return
    with pytest.warns(CheckpointWarning, match=f"{text} The job resumes from checkpo"):
        assert store.find_newest() == older
    again = save(store, {"model": b"again"})  # The job goes on, and all is well.
    assert store.find_newest() == again


def test_what_was_left_and_then_forced_is_a_checkpoint_like_others(
    local_store: CheckpointStore,
) -> None:
    left = leave(local_store, STATES)
    assert local_store.is_unforced(left)
    forced: list[str] = []

    def note(descriptor: int) -> None:
        forced.append(os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")))
        if not local_store.is_unforced(left):
            forced.append(WITHOUT_MARK)

    with mock.patch.object(os, "fsync", note):
        local_store.force(left)
    folder, parent = left.path.name, left.path.parent.name
    assert forced == [*STATES, "manifest.json", folder, parent, folder, WITHOUT_MARK]
    assert not local_store.is_unforced(left)
    Content(left.path).write("model", b"short")
    with pytest.raises(CheckpointError, match=r"is good:\n"):
        local_store.find_newest()


def test_checksums_are_left_out_by_replicas_of_the_same_launcher_alone(
    local_store: CheckpointStore,
) -> None:
    draft = local_store.begin(1, is_forced=False)
    left = draft.commit(manifest(1, *write_all(draft, STATES)))
    Content(left.path).write("model", b"parametres")
    assert load(local_store.find_newest())["model"] == b"parametres"
    with (
        mock.patch.object(os, "getppid", return_value=1),
        pytest.raises(DamagedFileError, match="checksum"),
    ):
        left.open("model")


@pytest.mark.parametrize("error", [psutil.NoSuchProcess(0), psutil.AccessDenied(1)])
def test_replicas_that_cannot_see_their_launcher_save_and_trust_no_mark(
    local_store: CheckpointStore, error: psutil.Error
) -> None:
    with mock.patch.object(psutil, "Process", side_effect=error):
        draft = local_store.begin(1, is_forced=False)
        left = draft.commit(manifest(1, *write_all(draft, STATES)))
        assert Content(left.path).read(UNFORCED_NAME) == b""
        assert load(local_store.find_newest()) == STATES
        Content(left.path).write("model", b"parametres")
        with pytest.raises(CheckpointError, match="checksum"):
            local_store.find_newest()


def test_what_was_killed_before_its_draft_was_named_is_removed(
    local_store: CheckpointStore,
) -> None:
    with (
        mock.patch.object(durable, "make_empty_file", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        local_store.begin(1, is_forced=False)
    assert "checkpoint-00000001" in names(local_store)
    local_store.remove_uncommitted()
    assert "checkpoint-00000001" not in names(local_store)


def test_a_file_that_has_become_a_link_cannot_be_forced(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    left = leave(local_store, STATES)
    model = Path(left.path) / "model"
    model.rename(tmp_path / "model")
    model.symlink_to(tmp_path / "model")
    with pytest.raises(DamagedFileError, match="model is a link, not a plain file"):
        local_store.force(left)
    assert local_store.is_unforced(left)
