"""Savers of two ranks: what they tell each other is little, and does not stay."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed import TCPStore

from elasticrun.checkpoint import store
from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.registry import Registry
from elasticrun.checkpoint.storage.place import MANIFEST_NAME
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError
from elasticrun.replicas.environment import Environment
from elasticrun.replicas.exchange import SAVE_ENDED
from elasticrun.replicas.membership import Membership
from elasticrun.replicas.store import Address, JobStore
from elasticrun.saving.opening import open_checkpoints
from elasticrun.saving.saver import Saver


class Pair:
    """Two savers over one store and one directory."""

    def __init__(self, directory: Path) -> None:
        self.server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        address = Address("127.0.0.1", self.server.port)
        self._pool = ThreadPoolExecutor(2)
        self._members = [
            Membership(
                Environment(rank=rank, world_size=2),
                torch.device("cpu"),
                JobStore(address, self.server if rank == 0 else None),
                None,
                owns_group=False,
            )
            for rank in range(2)
        ]
        self.checkpoints = [CheckpointStore(directory, job="test") for _ in range(2)]
        self.savers = list(self._pool.map(self._open, range(2)))

    def _open(self, rank: int) -> Saver:
        checkpoints, membership = self.checkpoints[rank], self._members[rank]
        start = open_checkpoints(checkpoints, membership)
        return Saver(checkpoints, Registry(rank), membership, start)

    def save(self, *, is_awaited: bool = True) -> list[Checkpoint]:
        def save(saver: Saver) -> Checkpoint:
            position = Position().encode()
            made = saver.save(position, timeout=60, is_awaited=is_awaited)
            saver.finish()
            newest = made or saver.newest
            assert newest is not None
            return newest

        return list(self._pool.map(save, self.savers))

    def close(self) -> None:
        list(self._pool.map(lambda saver: saver.close(timeout=60), self.savers))
        self.checkpoints[0].release()
        self._pool.shutdown()


@pytest.mark.parametrize("is_awaited", [True, False])
def test_what_all_have_heard_does_not_stay_in_the_store(
    tmp_path: Path, is_awaited: bool
) -> None:
    pair = Pair(tmp_path)
    num_keys = []
    for _ in range(4):
        first, second = pair.save(is_awaited=is_awaited)
        assert first == second
        num_keys.append(pair.server.num_keys())
    pair.close()
    assert len(set(num_keys)) == 1


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    pair = Pair(tmp_path)
    yield pair
    pair.close()


def test_ranks_are_told_no_manifest_and_read_it_when_they_need_it(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = pair.save()
    told = json.loads(pair.server.get(f"{SAVE_ENDED.format(1)}/verdict"))["made"]
    assert told == {"digest": first.manifest.digest, "time": first.time}
    manifest = Path(str(second.path / MANIFEST_NAME))
    away = manifest.rename(manifest.with_suffix(".away"))
    assert (second.path, second.number, second.time) == (first.path, 1, first.time)
    # Some file systems show it late.
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda _: away.rename(manifest)
    )
    monkeypatch.setattr(store, "time", clock)
    assert second.manifest == first.manifest


def test_a_rank_does_not_take_another_manifest_than_rank_0_has_committed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "LAG_SECONDS", 0.0)
    first, second = pair.save()
    other = replace(first.manifest, generation=7)
    Path(str(second.path / MANIFEST_NAME)).write_bytes(other.encode())
    with pytest.raises(CheckpointError, match="but rank 0 has one with the digest"):
        second.has("model")
