"""What a replica has recorded can be read when it is dead, whenever it was killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from contextlib import closing
from typing import Any

import pytest

from elasticrun.replicas.records import Records, RecordTooLargeError
from elasticrun.replicas.store import Address, JobStore, serve_store_at
from tests.support.stage import wait_until


@pytest.fixture
def store() -> JobStore:
    server = serve_store_at("127.0.0.1")
    return JobStore(Address("127.0.0.1", server.port), server)


def record_without_end(address: Address, begun: Any) -> None:
    with closing(Records(1, range(2), JobStore(address, None))) as records:
        begun.set()
        number = 0
        while True:
            number += 1
            records.write(json.dumps([number] * (number % 1000 + 1)))


def test_a_kill_at_any_moment_leaves_a_whole_record(store: JobStore) -> None:
    context = multiprocessing.get_context("forkserver")
    for _ in range(20):
        begun = context.Event()
        other = context.Process(target=record_without_end, args=(store.address, begun))
        other.start()
        with closing(Records(0, range(2), store)) as records:
            begun.wait()
            assert records.ranks == [0, 1]
            wait_until(lambda: records.read(1)[0] is not None)
            assert records.is_alive(1)
            assert other.pid is not None
            os.kill(other.pid, signal.SIGKILL)
            wait_until(lambda: not records.is_alive(1))
            other.join()
            values, _ = records.read(1)
        assert values == [values[0]] * (values[0] % 1000 + 1)
        store.remove(["record/0", "record/1"])


def test_only_one_may_claim(store: JobStore) -> None:
    # Both in one process, whose locks are those of two open files all the same.
    store.put("record/1", [os.getpid(), 0, ""])
    with closing(Records(0, range(1), store)) as first:
        second = Records(1, range(2), store)
        assert second.ranks == [0, 1]
        assert second.claim()
        assert not first.claim()
        second.close()
        assert first.claim()


def test_what_is_not_a_record_is_taken_for_another_machines(store: JobStore) -> None:
    store.put("record/1", [os.getpid(), 0, "00" * 16])
    store.put("record/2", [2**22, 0, "00" * 16])
    with closing(Records(0, range(3), store)) as records:
        assert records.ranks == [0]


def test_too_much_is_refused_and_the_last_record_stays(store: JobStore) -> None:
    with closing(Records(0, range(1), store)) as records:
        records.write("[1]")
        with pytest.raises(RecordTooLargeError, match="bytes"):
            records.write(json.dumps("x" * (1 << 20)))
        assert records.read(0) == ([1], [])
