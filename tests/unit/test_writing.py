"""Who writes a checkpoint with others: rank 0 goes last."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from elasticrun.capturing import Capture
from elasticrun.channel import Channel
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.control.store import Address, JobStore
from elasticrun.errors import CheckpointError
from elasticrun.position import Position
from elasticrun.writing import Contributor, Owner


def test_what_all_have_heard_does_not_stay_in_the_store(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = JobStore(Address("127.0.0.1", server.port), server)
    directory = CheckpointStore(tmp_path, job="test")
    directory.acquire()
    owner = Owner(directory, world_size=2, generation=0, warn=lambda _: None)
    contributor = Contributor(directory, 1)
    position = Position().encode()
    num_keys = []
    for number in range(1, 5):
        capture = Capture(number, position)
        channel = Channel(JobStore(store.address, None), 60)
        with ThreadPoolExecutor() as pool:
            other = pool.submit(contributor.write, capture, None, channel)
            newest = owner.write(capture, None, Channel(store, 60))
            assert other.result() == newest
        num_keys.append(server.num_keys())
    directory.release()
    owner.wait_until_heard(store, timeout=1000)
    assert len(set(num_keys)) == 1


def test_rank_0_stays_until_all_who_live_have_heard_the_end(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = JobStore(Address("127.0.0.1", server.port), server)
    other = JobStore(store.address, None)
    directory = CheckpointStore(tmp_path, job="test")
    owner = Owner(directory, world_size=3, generation=0, warn=lambda _: None)
    owner.wait_until_heard(store, timeout=1000)  # Nothing was said yet.

    owner.tell_mistake(1, ValueError("a mistake"), Channel(store, 1))
    begun = time.monotonic()
    owner.wait_until_heard(store, timeout=0.05)
    assert time.monotonic() - begun >= 0.05

    waiting = threading.Thread(
        target=owner.wait_until_heard,
        args=[store],
        kwargs={"timeout": 1000},
        daemon=True,
    )
    waiting.start()
    with pytest.raises(CheckpointError, match="a mistake"):
        Contributor(directory, 1).write(Capture(1, {}), None, Channel(other, 60))
    assert waiting.is_alive()
    owner.note_gone(2, "its process died", other)
    waiting.join(30)
    assert not waiting.is_alive()
