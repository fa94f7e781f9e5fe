"""A store finds the newest good checkpoint, and says what is wrong with the others."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrun import errors
from elasticrun.checkpoint import recorded
from elasticrun.checkpoint.draft import Checkpoint, Draft
from elasticrun.checkpoint.manifest import Manifest
from elasticrun.checkpoint.recorded import DamagedFileError, FileRecord
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError, CheckpointWarning
from tests.support.places import KINDS, Content, make_place

REPOSITORY = Path(errors.__file__).parents[1]
HOST = socket.gethostname()
STATES = {"model": b"parameters", "random.0": b"generators", "empty": b""}


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
    return Content(store.directory).checkpoints()


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
    assert found.path == store.directory / "checkpoint-00000002"
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
    other = CheckpointStore(store.directory, job="digits")
    draft = store.begin(1)
    records = write_all(other.join(1), {"random.1": b"1"})
    records += write_all(draft, {"random.0": b"0"})
    committed = draft.commit(manifest(1, *records))
    opened = other.open(1, committed.manifest.digest)
    assert opened == committed
    assert load(opened) == {"random.1": b"1", "random.0": b"0"}


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
    assert Content(draft.path).names() == []


def test_begin_refuses_a_committed_number(store: CheckpointStore) -> None:
    path = re.escape(str(save(store).path))
    with pytest.raises(ValueError, match=f"{path} is committed; begin"):
        store.begin(1)
    assert load(store.find_newest()) == STATES


def test_join_needs_what_rank_0_has_begun(local_store: CheckpointStore) -> None:
    with pytest.raises(CheckpointError) as caught:
        local_store.join(7)
    assert str(caught.value) == (
        f"{local_store.directory}/checkpoint-00000007 is not there on host {HOST}, but "
        "rank 0 has begun it. The checkpoint directory must be on a file system that "
        "all replicas see."
    )


def test_join_can_ask_for_the_very_draft(store: CheckpointStore) -> None:
    draft = store.begin(1)
    assert store.join(1, token=draft.token).path == draft.path
    for token in ("", store.begin(2).token):
        with pytest.raises(CheckpointError, match="is not the one that rank 0 has beg"):
            store.join(1, token=token)
    draft.commit(manifest(1))
    with pytest.raises(CheckpointError, match="is not the one that rank 0 has begun"):
        store.join(1, token=draft.token)


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
        "Start the job again: it goes on from the newest checkpoint that is whole."
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
            "written. The job goes on from checkpoint-00000001."
        )
    ]
    assert path.name in names(store)


@settings(deadline=None)
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
        f"none of the checkpoints in {store.directory} is whole:\n"
        f"  checkpoint-00000002: {second}/manifest.json is damaged: its checksum does "
        "not fit its 2 bytes.\n"
        f"  checkpoint-00000001: {first}/model is missing; it had 10 bytes.\n"
        "To start at the beginning would give up the training that they stand for. "
        "Bring one of them back from a copy, or start anew: remove them, or give the "
        "job another directory (ELASTICRUN_CHECKPOINT_DIR)."
    )


def test_other_job_is_refused(store: CheckpointStore) -> None:
    path = re.escape(str(save(store).path))
    with pytest.raises(CheckpointError, match=f"{path} belongs to the job 'digits'"):
        CheckpointStore(store.directory, job="text").find_newest()


def test_other_format_is_refused(store: CheckpointStore) -> None:
    save(store)
    newer = store.begin(2).commit(Manifest(**{**vars(manifest(2)), "format": 2}))
    text = re.escape(f"{newer.path}/manifest.json has check")
    with pytest.raises(CheckpointError, match=text):
        store.find_newest()


# What other ranks see


def test_absent_checkpoint_is_refused(store: CheckpointStore) -> None:
    path = store.directory / "checkpoint-00000003"
    with pytest.raises(CheckpointError) as caught:
        store.open(3, "0123456789abcdef")
    assert str(caught.value) == (
        f"{path} cannot be read ([Errno 2] No such file or directory: "
        f"'{path}/manifest.json') on host {HOST}, but rank 0 resumes from one with the "
        "digest 0123456789abcdef. The checkpoint directory must be on a file system "
        "that all replicas see."
    )


def test_other_digest_is_refused(store: CheckpointStore) -> None:
    checkpoint = save(store)
    with pytest.raises(CheckpointError) as caught:
        store.open(1, "0123456789abcdef")
    assert str(caught.value) == (
        f"{checkpoint.path} has the digest {checkpoint.manifest.digest} on host "
        f"{HOST}, but rank 0 resumes from one with the digest 0123456789abcdef. The "
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


# Removal


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

    path = store.directory / "checkpoint-00000001"
    with monkeypatch.context() as patch:
        patch.setattr(os, "rmdir", rmdir)
        with pytest.warns(CheckpointWarning) as caught:
            store.prune()
    assert [str(warning.message) for warning in caught] == [
        (
            f"{path} could not be removed: [Errno 16] Device or resource busy. It "
            "takes space until it can be."
        )
    ]
    assert path.is_dir()
    store.sweep()
    assert not path.is_dir()


def test_sweep_removes_only_what_was_never_committed(
    store: CheckpointStore, content: Content, caplog: pytest.LogCaptureFixture
) -> None:
    saved = save(store)
    torn = store.begin(2).path
    Content(torn).write("manifest.json.tmp", b"")
    mine = "checkpoint-before-the-holidays"
    content.write(f"{mine}/note", b"")
    store.sweep()
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
            store.sweep()
        assert len(caught) == 1
        assert store.find_newest() is None
        saved = [save(store).number for _ in range(3)]
        assert saved == [8, 9, 10]
        store.prune()
        store.begin(11).write("model", lambda file: file.write(b"half"))
    assert_mine(content)
    with acquired(place, keep=1) as store:
        with pytest.warns(CheckpointWarning, match=told):
            store.sweep()
        newest = store.find_newest()
        assert newest is not None
        assert newest.number == 10
        assert store.next_number() == 11
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
    with pytest.warns(CheckpointWarning, match="or its manifest was taken away"):
        store.sweep()
    assert content.names("checkpoint-00000002") == sorted(STATES)
    assert save(store).number == 3


def test_a_note_of_what_is_committed_or_gone_is_removed(
    store: CheckpointStore, content: Content
) -> None:
    save(store)
    for number in (1, 2):
        content.write(f"draft.checkpoint-0000000{number}", b"")
    store.sweep()
    assert not [name for name in content.names() if name.startswith("draft.")]
    assert load(store.find_newest()) == STATES


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
    open_checked = recorded.open_checked

    def remove_first(path: Path, record: FileRecord) -> BinaryIO:
        if newer.path.is_dir():
            store.storage.remove(newer.path.name)
        return open_checked(path, record)

    monkeypatch.setattr(recorded, "open_checked", remove_first)
    assert store.find_newest() == older
    store.storage.remove(newer.path.name)


def test_sweep_leaves_what_it_cannot_reach(local_store: CheckpointStore) -> None:
    store = local_store
    path = store.directory / "checkpoint-00000001"
    path.symlink_to(path.name)
    store.sweep()
    assert path.is_symlink()


def test_keep_must_be_positive(directory: Path) -> None:
    with pytest.raises(ValueError, match="keep=0: at least 1 checkpoint must be kept"):
        CheckpointStore(directory, job="digits", keep=0)


# The lock

HOLD = """
import os, sys
from elasticrun.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1], job="digits")
if sys.argv[2] == "tries":
    print("owner", flush=True)
    sys.stderr = open(os.devnull, "w")
store.acquire(timeout=0)
if sys.argv[2] == "forks" and os.fork() == 0:
    print("child", flush=True)
    sys.stdin.read()
    os._exit(0)
if sys.argv[2] != "forks":
    print("owner", flush=True)
sys.stdin.read()
"""


@contextmanager
def other_job(directory: Path, how: str = "holds") -> Iterator[subprocess.Popen[str]]:
    """Run a process that holds the lock until its input ends."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(directory), how],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() in ("owner\n", "child\n")
        yield process


def take_and_release(directory: Path, *, timeout: float = 0) -> None:
    store = CheckpointStore(directory, job="digits")
    store.acquire(timeout=timeout)
    store.release()


def test_second_live_job_is_refused(directory: Path) -> None:
    with other_job(directory) as other:
        with pytest.raises(CheckpointError) as caught:
            take_and_release(directory)
        assert re.fullmatch(
            rf"{directory} is in use by a live job \(process {other.pid} on {HOST}, "
            r"since \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC\)\. Two jobs in one directory "
            r"would remove each other's checkpoints\. Stop that job or wait for its "
            r"end, or give this one a directory of its own "
            r"\(ELASTICRUN_CHECKPOINT_DIR\)\.",
            str(caught.value),
        )
    take_and_release(directory)


def test_lock_ends_with_a_killed_owner(directory: Path) -> None:
    with other_job(directory) as other:
        other.kill()
        assert other.wait() == -signal.SIGKILL
        take_and_release(directory)


def test_living_child_of_a_killed_owner_does_not_hold_the_lock(
    directory: Path,
) -> None:
    with other_job(directory, "forks") as owner:
        owner.kill()
        assert owner.wait() == -signal.SIGKILL
        assert owner.stdout is not None
        assert select.select([owner.stdout], [], [], 0)[0] == []  # the child lives
        take_and_release(directory)


@pytest.mark.skipif(not hasattr(fcntl, "F_OFD_SETLK"), reason="Linux has it")
def test_to_copy_the_directory_does_not_lose_the_lock(
    directory: Path, tmp_path: Path
) -> None:
    store = CheckpointStore(directory, job="digits")
    store.acquire(timeout=0)
    shutil.copytree(directory, tmp_path / "copy")
    with other_job(directory, "tries") as other:
        assert other.wait() == 1
    store.release()
    with other_job(directory) as other:
        other.kill()


ORPHAN = """
import os, sys
from elasticrun.checkpoint.store import CheckpointStore
store = CheckpointStore(sys.argv[1], job="digits")
store.acquire(timeout=0)
ends_with_owner, owner_end = os.pipe()
if os.fork():
    os._exit(0)
os.close(owner_end)
os.read(ends_with_owner, 1)
CheckpointStore(sys.argv[1], job="digits").acquire(timeout=60)
print("taken")
"""


def test_child_of_a_dead_owner_can_take_the_lock(directory: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", ORPHAN, str(directory)],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert result.stdout == "taken\n"


def test_acquire_waits_for_an_owner_that_ends(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with other_job(directory) as other:

        def end_owner(seconds: float) -> None:
            other.communicate()

        monkeypatch.setattr(time, "sleep", end_owner)
        take_and_release(directory, timeout=60)
        assert other.returncode == 0


def test_second_job_in_one_process_is_refused(local_store: CheckpointStore) -> None:
    store = local_store
    for _ in range(2):
        with pytest.raises(CheckpointError, match=f"process {os.getpid()} on {HOST}"):
            take_and_release(store.directory)
    assert_other_process_is_refused(store.directory)


def assert_other_process_is_refused(directory: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", HOLD, str(directory), "holds"],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        input="",
        capture_output=True,
        text=True,
        check=False,
    )
    assert "is in use by a live job" in result.stderr


def test_lock_held_under_another_name_is_seen(
    local_store: CheckpointStore, tmp_path: Path
) -> None:
    store = local_store
    (tmp_path / "alias").symlink_to(store.directory)
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on {HOST}"):
        take_and_release(tmp_path / "alias")


def test_released_lock_can_be_taken_again(local_store: CheckpointStore) -> None:
    store = local_store
    store.release()
    store.release()
    take_and_release(store.directory)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"pid": 1}'])
def test_owner_that_has_not_written_its_name_is_refused_too(
    directory: Path, content: bytes
) -> None:
    with other_job(directory):
        (directory / "lock").write_bytes(content)
        with pytest.raises(CheckpointError, match="process that has not yet written"):
            take_and_release(directory)


def test_lock_file_of_a_dead_owner_is_taken_over(directory: Path) -> None:
    with other_job(directory) as other:
        other.communicate()
    assert f'"pid": {other.pid}' in (directory / "lock").read_text()
    take_and_release(directory)
    assert f'"pid": {os.getpid()}' in (directory / "lock").read_text()


# Permissions


def test_directory_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError) as caught:
        take_and_release(tmp_path / "file" / "checkpoints")
    assert str(caught.value) == (
        f"{tmp_path}/file/checkpoints cannot hold this job's checkpoints: [Errno 17] "
        f"File exists: '{tmp_path}/file'. Nothing could be saved, so the job would "
        "lose its work when it is stopped. Make that directory writable, or give the "
        "job another one (ELASTICRUN_CHECKPOINT_DIR)."
    )


READ_ONLY = """
import os, sys
import psutil  # While it can be read.
from elasticrun.checkpoint.store import CheckpointStore
if os.getuid() == 0:
    os.setuid(65534)
directory = os.path.join(sys.argv[1], "checkpoints")
os.umask(0)
store = CheckpointStore(directory, job="digits")
store.acquire(timeout=0)
store.release()
os.chmod(directory, 0o555)
try:
    store.acquire(timeout=0)
finally:
    os.chmod(directory, 0o777)
"""


def test_read_only_directory_is_refused() -> None:
    # Not below tmp_path, whose parents a user that root turns into cannot pass.
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o777)
        result = subprocess.run(
            [sys.executable, "-c", READ_ONLY, parent],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
    path = Path(parent) / "checkpoints"
    assert (
        f"CheckpointError: {path} cannot hold this job's checkpoints: [Errno 13] "
        f"Permission denied: '{path}'." in result.stderr
    )


def test_no_warning_comes_from_a_healthy_life(store: CheckpointStore) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(5):
            save(store)
            store.prune()
        store.sweep()
        assert load(store.find_newest()) == STATES
