"""Replicas whose checkpoints are in an S3-compatible store, which may go away."""

from __future__ import annotations

import gc
import os
import warnings
from collections.abc import Callable
from typing import BinaryIO

import pytest

from elasticrun import AdaptiveDataLoader, State, current_job, init, rank
from elasticrun.checkpoint.storage.objects import Objects, open_objects
from elasticrun.checkpoint.storage.place import RemotePath
from elasticrun.checkpoint.store import CheckpointStore
from elasticrun.errors import CheckpointError
from elasticrun.testing import read_trace, start_generation
from tests.support.loops import (
    NUM_BATCHES,
    check_ends_right,
    held,
    hold_at,
    small,
)
from tests.support.object_store import Bucket, Door, credentials
from tests.support.places import Content
from tests.support.stage import DEADLINE, Stage, wait_until

pytestmark = pytest.mark.slow


def variables(stage: Stage, bucket: Bucket, **more: object) -> dict[str, str]:
    return stage.variables(
        ELASTICRUN_CHECKPOINT_DIR=bucket.url, **bucket.variables, **more
    )


def each_boundary(stage: Stage, bucket: Bucket) -> dict[str, str]:
    """Save at each boundary, and before training goes on."""
    return variables(
        stage, bucket, ELASTICRUN_SAVE_INTERVAL=0, ELASTICRUN_ASYNC_SAVE="off"
    )


def test_killed_replicas_go_on_at_another_size(stage: Stage, bucket: Bucket) -> None:
    loop = small(stage, on_batch=hold_at(stage, 5, 0, 1))
    with start_generation(
        loop, 2, variables=each_boundary(stage, bucket)
    ) as generation:
        stage.wait_for(*held([0, 1]))
        for killed in (0, 1):
            generation.send_signal(killed, 9)
        generation.wait(timeout=DEADLINE)
    assert [each["number"] for each in bucket.manifests()][-1] == 5
    check_ends_right(stage, 3, variables(stage, bucket))
    saved = bucket.manifests()[-1]
    assert saved["world_size"] == 3
    assert saved["generation"] == 1
    # At once: a process that died on this machine holds no claim.
    assert "is taken over" not in stage.log(0)
    assert all(
        line["batch"] >= 4 for line in read_trace(stage.trace) if line["generation"]
    )


@pytest.mark.wide
def test_a_second_live_job_is_refused_on_all_its_replicas(
    stage: Stage, bucket: Bucket
) -> None:
    loop = small(stage, on_batch=hold_at(stage, 3, 0, 1))
    with start_generation(loop, 2, variables=variables(stage, bucket)) as generation:
        stage.wait_for(*held([0, 1]))
        with start_generation(
            small(stage), 2, variables=variables(stage, bucket)
        ) as second:
            outcomes = second.wait(timeout=DEADLINE)
        for outcome in outcomes:
            assert outcome.exit_code == 1
            text = f"{bucket.url} is in use by a live job (process {generation.pid(0)}"
            assert text in (outcome.error or "")
        stage.mark("go")
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    stage.check_exactly_once(6 * NUM_BATCHES)


class Ballast(State):
    """Large enough that the store can go in the middle of it."""

    is_per_replica = True
    size = 1 << 20

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(bytes(self.size))

    def load(self, fileobj: BinaryIO) -> None:
        assert len(fileobj.read()) == self.size


def interrupted(stage: Stage, when: Callable[[int], bool]) -> Callable[[], int]:
    """Return a job that saves each boundary, and tells when it is in some batches."""

    def body(loader: AdaptiveDataLoader) -> None:
        if rank() == 0 and when(loader.batch_index):
            number = loader.batch_index
            stage.mark(f"in {number}")
            stage.wait_for(f"after {number}")

    def script() -> int:
        stage.keep_log(os.environ["RANK"])
        Ballast("ballast")
        return small(stage, on_batch=body)()

    return script


@pytest.mark.parametrize("num_bytes", [0, 1 << 19, 3 << 19])
@pytest.mark.wide
def test_a_store_that_goes_during_a_save_leaves_the_one_before_and_training_goes_on(
    stage: Stage, bucket: Bucket, num_bytes: int
) -> None:
    script = interrupted(stage, lambda number: number in (3, 4))
    with start_generation(
        script, 2, variables=each_boundary(stage, bucket)
    ) as generation:
        stage.wait_for("in 3")
        bucket.door.shut_after(num_bytes)
        stage.mark("after 3")
        stage.wait_for("in 4")
        assert not bucket.door.is_open
        bucket.door.reopen()
        assert bucket.manifests()[-1]["position"]["index"] == 6 * 3
        stage.mark("after 4")
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    assert "CheckpointWarning: checkpoint 4 was not saved" in stage.log(0)
    assert f"The newest checkpoint is {bucket.url}/checkpoint-00000003" in stage.log(0)
    stage.check_exactly_once(6 * NUM_BATCHES)
    assert bucket.manifests()[-1]["number"] > 4
    assert CheckpointStore(bucket.url, job="test").find_newest() is not None


class Awaited(State):
    """Written by rank 0, once the test lets it."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        super().__init__("awaited")

    def save(self, fileobj: BinaryIO) -> None:
        self.stage.mark("saving")
        self.stage.wait_for("save")

    def load(self, fileobj: BinaryIO) -> None:
        raise AssertionError("nothing resumes here")


def test_a_store_that_a_rank_cannot_reach_at_the_commit_is_no_harm(
    stage: Stage, bucket: Bucket
) -> None:
    own = Door(bucket.door.port)
    reach = credentials(own.port)

    def script() -> tuple[int, int, float]:
        if os.environ["RANK"] == "1":
            os.environ.update(reach)
        Awaited(stage)
        Ballast("ballast")
        end = small(stage)()
        newest = current_job().newest_checkpoint
        assert newest is not None
        return end, newest.number, newest.time

    def has_written(rank: int) -> bool:
        names = Content(bucket.url).names("checkpoint-00000001")
        return f"ballast.rank-{rank}" in names

    with start_generation(
        script, 2, variables=variables(stage, bucket, ELASTICRUN_ASYNC_SAVE="off")
    ) as generation:
        stage.wait_for("saving")
        wait_until(lambda: has_written(1), "its file")
        own.shut()
        stage.mark("save")
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].result == outcomes[1].result
    stage.check_exactly_once(6 * NUM_BATCHES)


def test_a_job_does_not_start_when_the_store_is_gone(
    stage: Stage, bucket: Bucket
) -> None:
    check_ends_right(stage, 2, variables(stage, bucket))
    before = len(read_trace(stage.trace))
    bucket.door.shut()
    with start_generation(
        small(stage), 2, variables=variables(stage, bucket)
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    for outcome in outcomes:
        assert outcome.exit_code == 1
        assert "cannot hold this job's checkpoints" in (outcome.error or "")
        assert "EndpointConnectionError" in (outcome.error or "")
    assert len(read_trace(stage.trace)) == before


def test_a_bucket_that_is_not_there_is_not_made(bucket: Bucket) -> None:
    with pytest.raises(CheckpointError, match=r"No such file .*://nosuch/a/claim-0"):
        init("s3://nosuch/a")
    import s3fs

    assert "nosuch" not in s3fs.S3FileSystem().ls("", refresh=True)


@pytest.fixture
def objects(bucket: Bucket) -> Objects:
    return open_objects(RemotePath(bucket.url))


@pytest.mark.parametrize("size", [0, 10, 60 << 20])
def test_a_stream_is_put_whole_or_not_at_all(objects: Objects, size: int) -> None:
    data = os.urandom(size)
    measured = objects.put_stream("model", lambda file: file.write(data))
    assert measured[0] == objects.find_size("model") == size
    assert b"".join(objects.blocks("model")) == data

    def fail(file: BinaryIO) -> None:
        file.write(data)
        raise LookupError("a bug of the user's")

    with pytest.raises(LookupError):
        objects.put_stream("other", fail)
    gc.collect()
    assert objects.find_size("other") is None
    assert objects.list() == {"model": size}


def test_of_two_claims_of_one_number_the_first_stays(objects: Objects) -> None:
    assert objects.put_new("claim", b"first")
    assert not objects.put_new("claim", b"second")
    assert objects.get("claim") == b"first"


def test_everything_that_others_change_is_seen(objects: Objects) -> None:
    other = Content(objects.place)
    objects.put("a/b", b"1")
    assert objects.list() == {"a": 0}
    assert objects.find_size("a/c") is None
    other.write("a/c", b"22")
    assert objects.list("a") == {"b": 1, "c": 2}
    other.write("a/b", b"333")
    assert objects.find_size("a/b") == 3
    objects.remove("a", last="b")
    assert objects.list() == {}
    with pytest.raises(FileNotFoundError, match=r"No such file .*digits/a/b"):
        objects.get("a/b")


def test_a_healthy_life_gives_no_warning(bucket: Bucket) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            store = CheckpointStore(bucket.url, job="digits")
            store.acquire(timeout=0)
            assert store.next_generation() in (0, 1)
            store.find_newest()
            store.remove_uncommitted()
            store.prune()
            store.release()
    assert bucket.names() == ["claim-00000001", "claim-00000002", "generation"]
