"""The replicas of a machine read each object of a store once, and share the file."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from torch import nn

from elasticrun import current_job, register, save_all_states
from elasticrun.checkpoint.files import durable
from elasticrun.checkpoint.files.durable import FileRecord, StoreUnreachableError
from elasticrun.checkpoint.storage.place import MANIFEST_NAME, RemotePath
from elasticrun.checkpoint.storage.remote import Downloads
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.testing import run_generation
from tests.support.full_disk import fail_for_space, small_disk
from tests.support.places import Content, CountedFolders
from tests.support.stores import acquired, load, save

STATES = {"model": bytes(1 << 20), "optimizer": b"moments", "model.rank-0": b"a shard"}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv(CountedFolders.VARIABLE, str(tmp_path / "reads"))
    (tmp_path / "digits").mkdir()
    return f"counted://{tmp_path}/digits"


@pytest.fixture
def reads(tmp_path: Path) -> Callable[[], dict[str, int]]:
    """Return what tells how often each state was read since it was asked last."""
    log = tmp_path / "reads"

    def count() -> dict[str, int]:
        paths = map(Path, log.read_text().split() if log.exists() else ())
        log.write_text("")
        states = (p for p in paths if p.parent.name.startswith("checkpoint-"))
        return Counter(path.name for path in states if path.name != MANIFEST_NAME)

    return count


def downloads() -> list[str]:
    """Return the files of this machine, by checkpoint and state."""
    names = (path.name.split(".", 1)[1] for path in own().glob("*"))
    return sorted(name for name in names if not name.endswith(".lock"))


def own() -> Path:
    return Path(tempfile.gettempdir(), f"elasticrun-{os.geteuid()}")


def test_four_replicas_read_each_object_once(
    place: str, reads: Callable[[], dict[str, int]]
) -> None:
    with acquired(place) as store:
        save(store, STATES)
    reads()
    with acquired(place) as store:
        newest = store.find_newest()
        assert newest is not None
        others = [CheckpointStore(place, job="digits") for _ in range(3)]
        found = [newest, *(each.open(1, newest.manifest.digest) for each in others)]
        with ThreadPoolExecutor(4) as pool:
            assert list(pool.map(load, found)) == [STATES] * 4
        # A shard, which is read whole to find damage, is none that all load.
        assert reads() == {"model": 1, "optimizer": 1, "model.rank-0": 2}
        assert own().stat().st_mode & 0o777 == 0o700
        save(store, STATES)
        others[0].join(2)
        assert downloads() == []


def test_on_other_machines_the_first_replica_fetches(
    place: str, reads: Callable[[], dict[str, int]]
) -> None:
    with acquired(place) as store:
        saved = save(store, STATES)
        reads()
        others = [CheckpointStore(place, job="digits") for _ in range(3)]
        found = [each.open(1, saved.manifest.digest) for each in others]
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(load, found)) == [STATES] * 3
        assert set(reads().values()) == {1}
        for each in others:
            each.release()
        assert downloads() == []


def test_a_good_file_here_hides_no_damage_there(place: str) -> None:
    with acquired(place) as store:
        save(store, {"model": b"older"})
        load(save(store, {"model": b"newest"}))
        Content(place).flip("checkpoint-00000002/model")
        other = CheckpointStore(place, job="digits")
        with pytest.warns(match="checkpoint-00000002 is skipped"):
            found = other.find_newest()
        assert load(found) == {"model": b"older"}
        assert downloads() == ["checkpoint-00000001.model"]


def test_what_is_left_of_another_checkpoint_goes(
    place: str, reads: Callable[[], dict[str, int]]
) -> None:
    with acquired(place) as store:
        first = save(store, {"model": b"first"})
        second = save(store, {"model": b"second"})
        assert load(first) == {"model": b"first"}
        # As a killed job leaves it: damaged, and half of the next one.
        (left,) = own().glob("*.model")
        left.write_bytes(b"other")
        left.with_name(left.name + ".tmp").write_bytes(b"half")
        assert load(first) == {"model": b"first"}
        assert load(second) == {"model": b"second"}
        assert downloads() == ["checkpoint-00000002.model"]


def test_without_room_for_all_of_them_one_is_kept(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with acquired(place) as store, small_disk(tmp_path / "small"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
        states = {"model": bytes(3 << 20), "optimizer": bytes(3 << 20)}
        assert load(save(store, states)) == states
        assert downloads() == ["checkpoint-00000001.optimizer"]


def test_where_one_has_no_room_a_checkpoint_is_still_found(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with acquired(place) as store, small_disk(tmp_path / "small"):
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "small"))
        save(store, {"model": bytes(5 << 20)})
        found = store.find_newest()
        with pytest.raises(OSError, match=f"No space left on device: '{tmp_path}/sma"):
            load(found)
        assert downloads() == []


Spoil = Callable[[Path, pytest.MonkeyPatch], object]


def others_may_enter(elsewhere: Path, patch: pytest.MonkeyPatch) -> None:
    own().chmod(0o770)


def it_is_of_another_user(elsewhere: Path, patch: pytest.MonkeyPatch) -> None:
    if os.geteuid() != 0:
        pytest.skip("gives a directory to another user")
    os.chown(own(), 12345, 12345)


def it_is_a_link(elsewhere: Path, patch: pytest.MonkeyPatch) -> None:
    own().rename(f"{own()}.old")
    own().symlink_to(elsewhere)


def it_is_a_file(elsewhere: Path, patch: pytest.MonkeyPatch) -> None:
    own().rename(f"{own()}.old")
    own().touch()


def links_have_the_names(elsewhere: Path, patch: pytest.MonkeyPatch) -> None:
    for path in own().glob("*.model*"):
        for each in (path, Path(f"{path}.tmp")):
            each.unlink(missing_ok=True)
            each.symlink_to(elsewhere / "file")


def directories_have_the_names(elsewhere: Path, patch: pytest.MonkeyPatch) -> None:
    for path in own().iterdir():
        path.unlink()
        path.mkdir()


def there_are_no_locks(elsewhere: Path, patch: pytest.MonkeyPatch) -> None:
    def flock(*_: object) -> NoReturn:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    for path in own().iterdir():
        path.unlink()
    patch.setattr(fcntl, "flock", flock)


def the_disk_is_full(elsewhere: Path, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(durable, "move_over", fail_for_space)


@pytest.mark.parametrize(
    ("spoil", "num_reads"),  # of the model, to find and to load it twice
    [
        (others_may_enter, 3),
        (it_is_of_another_user, 3),
        (it_is_a_link, 3),
        (it_is_a_file, 3),
        (links_have_the_names, 1),
        (directories_have_the_names, 3),
        (there_are_no_locks, 3),
        (the_disk_is_full, 9),
    ],
)
def test_each_replica_reads_for_itself_where_none_can_share(
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    reads: Callable[[], dict[str, int]],
    spoil: Spoil,
    num_reads: int,
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    with acquired(place) as store:
        load(save(store, STATES))
        reads()
        spoil(elsewhere, monkeypatch)
        found = CheckpointStore(place, job="digits").find_newest()
        assert load(found) == load(found) == STATES
        assert reads()["model"] == num_reads
        save(store, STATES)
    assert list(elsewhere.iterdir()) == []
    assert not list(own().glob("*.tmp"))


def test_a_name_may_be_too_long_to_share(place: str) -> None:
    with acquired(place) as store:
        states = {"long" * 60: b"1", "model": b"2"}
        assert load(save(store, states)) == states


def test_hosts_share_no_files_in_one_directory(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with acquired(place) as store:
        saved = save(store, {"model": b"1"})
        load(saved)
        monkeypatch.setattr(socket, "gethostname", lambda: "another")
        other = CheckpointStore(place, job="digits")
        load(other.open(1, saved.manifest.digest))
        assert downloads() == ["checkpoint-00000001.model"] * 2
        other.release()
        assert downloads() == ["checkpoint-00000001.model"]


def test_where_locks_do_not_work_no_file_of_another_is_cut(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    record = FileRecord("model", 1 << 20, 0)
    one, another = Downloads(RemotePath(place)), Downloads(RemotePath(place))

    def breaking() -> Iterator[bytes]:
        yield b"half"
        raise StoreUnreachableError("it is gone")

    def blocks() -> Iterator[bytes]:
        yield bytes(1 << 20)
        with pytest.raises(StoreUnreachableError, match="it is gone"):
            another.open("checkpoint-00000001", record, breaking, is_anew=True)

    file = one.open("checkpoint-00000001", record, blocks, is_anew=True)
    assert file is not None
    with file:
        assert file.read() == bytes(1 << 20)
    assert downloads() == []


def train() -> float:
    torch.manual_seed(current_job().generation)
    net = nn.Linear(64, 64)
    register(model=net, optimizer=torch.optim.Adam(net.parameters()))
    save_all_states()  # So none has ended while another one loads.
    return float(net.weight.sum())


@pytest.mark.wide
def test_so_do_the_replicas_of_a_job(
    place: str, reads: Callable[[], dict[str, int]]
) -> None:
    counted = {each: os.environ[each] for each in (CountedFolders.VARIABLE, "TMPDIR")}
    variables = {"ELASTICRUN_CHECKPOINT_DIR": place, "ELASTICRUN_JOB": "digits"}
    variables |= counted
    first = run_generation(train, 4, variables=variables)
    reads()
    second = run_generation(train, 4, variables=variables)
    assert set(second) == {first[0]}
    assert reads() == {"model": 1, "optimizer": 1, "random.ranks-0": 2}
    assert downloads() == []
