"""The replicas of a machine read each object of a store once, and share the file."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import nn

from elasticrun import current_job, register, save_all_states
from elasticrun.checkpoint.storage.place import MANIFEST_NAME
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.testing import run_generation
from tests.support.full_disk import small_disk
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
    folder = Path(tempfile.gettempdir())
    return sorted(path.name.split(".", 1)[1] for path in folder.glob("elasticrun-*"))


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
        assert all(
            not f.stat().st_mode & 0o077 for f in Path(tempfile.gettempdir()).iterdir()
        )
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
        (left,) = Path(tempfile.gettempdir()).iterdir()
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


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a file to another user")
def test_a_file_of_another_user_is_refused(place: str) -> None:
    with acquired(place) as store:
        saved = save(store, {"model": b"1"})
        load(saved)
        folder = Path(tempfile.gettempdir())
        (found,) = folder.iterdir()
        for path in (found, found.with_name(f"{found.name}.tmp")):
            path.write_bytes(b"1")
            os.chown(path, 12345, 12345)
        with pytest.raises(ValueError, match="belongs to user 12345"):
            load(saved)


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
    variables = {"ELASTICRUN_CHECKPOINT_DIR": place, "ELASTICRUN_JOB": "digits"}
    first = run_generation(train, 4, variables=variables)
    reads()
    second = run_generation(train, 4, variables=variables)
    assert set(second) == {first[0]}
    assert reads() == {"model": 1, "optimizer": 1, "random.ranks-0": 2}
    assert downloads() == []
