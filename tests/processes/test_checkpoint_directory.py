"""A checkpoint directory that is used twice, damaged, full or not to be written."""

from __future__ import annotations

import json
import os
import resource
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch.distributed as dist

from elasticrun import AdaptiveDataLoader, State, current_job, init, rank
from elasticrun.checkpoint.storage.place import MANIFEST_NAME
from elasticrun.replicas.environment import read_environment
from elasticrun.testing import (
    GenerationFailed,
    Job,
    read_trace,
    run_generation,
    start_generation,
    use_job,
)
from tests.support.full_disk import fill, small_disk
from tests.support.loops import (
    NUM_BATCHES,
    check_ends_right,
    held,
    hold_at,
    small,
    value_after,
)
from tests.support.programs import request_stop_and_wait
from tests.support.stage import DEADLINE, Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow


def stop_at(batch: int) -> Callable[[AdaptiveDataLoader], None]:
    def body(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index == batch and rank() == 0:
            request_stop_and_wait()

    return body


@pytest.fixture
def saved(stage: Stage) -> Stage:
    """Return a stage where two replicas have saved every boundary and stopped."""
    run_generation(
        small(stage, on_batch=stop_at(3)),
        2,
        variables=stage.variables(ELASTICRUN_SAVE_INTERVAL=0),
    )
    assert len(stage.committed()) == 3
    assert stage.committed()[-1]["position"]["index"] < 6 * NUM_BATCHES
    return stage


def newest(stage: Stage) -> Path:
    return stage.checkpoints / stage.directories()[-1]


def refusals(stage: Stage, world_size: int, **variables: object) -> list[str]:
    """Start the job; return what each replica was refused with; none may train."""
    before = len(read_trace(stage.trace))
    with start_generation(
        small(stage), world_size, variables=stage.variables(**variables)
    ) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [1] * world_size
    assert len(read_trace(stage.trace)) == before
    return [outcome.error or "" for outcome in outcomes]


# Used twice


@pytest.mark.slow  # It waits for the owner, which may be about to exit.
def test_a_second_live_job_is_refused_on_all_its_replicas(stage: Stage) -> None:
    loop = small(stage, on_batch=hold_at(stage, 3, 0, 1))
    with start_generation(loop, 2, variables=stage.variables()) as generation:
        stage.wait_for(*held([0, 1]))
        errors = refusals(stage, 3)
        for error in errors:
            assert "CheckpointError" in error
            assert f"in use by a live job (process {generation.pid(0)} on" in error
            assert "ELASTICRUN_CHECKPOINT_DIR" in error
        stage.mark("go")
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [0, 0]
    stage.check_exactly_once(6 * NUM_BATCHES)


def test_a_killed_job_does_not_hold_its_directory(stage: Stage) -> None:
    loop = small(stage, on_batch=hold_at(stage, 3, 0, 1))
    with start_generation(loop, 2, variables=stage.variables()) as generation:
        stage.wait_for(*held([0, 1]))
        for killed in (0, 1):
            generation.send_signal(killed, 9)
        generation.wait(timeout=DEADLINE)
    check_ends_right(stage, 2, stage.variables())


def test_another_jobs_directory_is_refused(saved: Stage) -> None:
    for error in refusals(saved, 2, ELASTICRUN_JOB="another"):
        assert "belongs to the job 'test', but this is the job 'another'" in error
        assert "ELASTICRUN_JOB=test" in error
    check_ends_right(saved, 2, saved.variables())


# Damaged


def rewrite(manifest: Path, **changes: object) -> None:
    """Change a manifest and make its checksum right, as another version would write."""
    fields = {**json.loads(manifest.read_text()), **changes}
    del fields["crc32"]
    body = json.dumps(fields, indent=2).removesuffix("\n}").encode()
    trailer = f',\n  "crc32": "{zlib.crc32(body):08x}"\n}}\n'
    manifest.write_bytes(body + trailer.encode())


def test_another_format_is_refused(saved: Stage) -> None:
    rewrite(newest(saved) / MANIFEST_NAME, format=0, elasticrun_version="0.0.1")
    for error in refusals(saved, 3):
        assert "has checkpoint format 0, written by elasticrun 0.0.1" in error
        assert "reads formats 1 to 3" in error


def largest(directory: Path) -> Path:
    files = [path for path in directory.iterdir() if path.name != MANIFEST_NAME]
    return max(files, key=lambda path: path.stat().st_size)


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("which", "damage"),
    [
        *[("state", flip_a_bit), ("manifest", truncate)],
        *in_wide(
            *[("state", truncate), ("state", Path.unlink)],
            *[("manifest", flip_a_bit), ("manifest", Path.unlink)],
        ),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(
    saved: Stage, damage: Callable[[Path], None], which: str
) -> None:
    directory = newest(saved)
    damage(largest(directory) if which == "state" else directory / MANIFEST_NAME)
    check_ends_right(saved, 3, saved.variables())
    warning = f"CheckpointWarning: {directory.name} is skipped: "
    is_taken_away = which == "manifest" and damage is Path.unlink
    assert (warning in saved.log(0)) is not is_taken_away
    if is_taken_away:
        assert f"{directory}: named like a checkpoint, but" in saved.log(0)
    for line in read_trace(saved.trace):
        if line["generation"] == 1:
            assert line["batch"] >= saved_batches(directory) - 1


def saved_batches(directory: Path) -> int:
    """Return how many batches each test's job had done: one more a checkpoint."""
    return int(directory.name.removeprefix("checkpoint-"))


def test_if_no_checkpoint_is_whole_nobody_starts_at_the_beginning(saved: Stage) -> None:
    for name in saved.directories():
        flip_a_bit(largest(saved.checkpoints / name))
    for error in refusals(saved, 3):
        assert "no checkpoint in" in error
        assert all(name in error for name in saved.directories())


# Seen differently


@pytest.mark.parametrize("is_copy", [True, *in_wide(False)])
@pytest.mark.parametrize("odd_one", [0, *in_wide(1, 2)])
def test_replicas_that_see_different_checkpoints_all_refuse(
    saved: Stage, odd_one: int, is_copy: bool
) -> None:
    elsewhere = saved.root / "elsewhere"
    if is_copy:
        shutil.copytree(saved.checkpoints, elsewhere)

    def script() -> int:
        if int(os.environ["RANK"]) == odd_one:
            init(elsewhere)
        return small(saved)()

    with start_generation(script, 3, variables=saved.variables()) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1, 1]
    for outcome in outcomes:
        assert "the replicas see different checkpoints" in (outcome.error or "")
        assert "on a file system that all replicas see" in (outcome.error or "")
    assert all(line["generation"] == 0 for line in read_trace(saved.trace))


# Full


class Ballast(State):
    """Writes more than there is room for, while the test wants it to."""

    is_per_replica = True

    def __init__(self, stage: Stage, size: int, ranks: tuple[int, ...]) -> None:
        super().__init__("ballast")
        self.stage = stage
        self.size = size
        self.ranks = ranks

    def save(self, fileobj: BinaryIO) -> None:
        is_heavy = rank() in self.ranks and not self.stage.has("relieved")
        fileobj.write(b"\0" * (self.size if is_heavy else 1))

    def load(self, fileobj: BinaryIO) -> None:
        fileobj.read()


def overloaded(
    stage: Stage, size: int, ranks: tuple[int, ...], *, file_limit: int | None = None
) -> Callable[[], int]:
    """Return a job that saves each boundary; from batch 3 to 5 there is no room."""

    def body(loader: AdaptiveDataLoader) -> None:
        if loader.batch_index == 3:
            stage.mark("heavy")
        if loader.batch_index == 6:
            saver = current_job()._saver
            assert saver is not None
            wait_until(lambda: not saver.is_busy, "the end of the last heavy save")
            dist.barrier()  # What another one writes still has its room.
            stage.mark("relieved")

    class Later(Ballast):
        def save(self, fileobj: BinaryIO) -> None:
            if not stage.has("heavy"):
                fileobj.write(b"\1")
            else:
                super().save(fileobj)

    def script() -> int:
        stage.keep_log(os.environ["RANK"])
        if file_limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (file_limit, file_limit))
        Later(stage, size, ranks)
        return small(stage, on_batch=body)()

    return script


def check_went_on(stage: Stage, world_size: int, values: list[Any]) -> None:
    for rank_ in range(world_size):
        log = stage.log(rank_)
        assert "CheckpointWarning: checkpoint" in log
        assert "was not saved" in log
        assert f"The newest checkpoint is {stage.checkpoints}/checkpoint-" in log
    assert set(values) == {value_after(stage.samples())}
    stage.check_exactly_once(6 * NUM_BATCHES)
    positions = [c["position"]["index"] // 6 for c in stage.committed()]
    missing = set(range(1, NUM_BATCHES)) - set(positions)
    assert missing
    assert missing <= {3, 4, 5, 6}
    assert positions[-1] == 0
    if len(stage.directories()) != len(positions):  # Others still wrote into it.
        assert "could not be removed" in stage.log(0)


@pytest.mark.parametrize(
    "ranks",
    [
        *in_wide(((0,),), ((0, 1, 2),)),
        (2,),
    ],
)
def test_a_save_that_does_not_fit_leaves_the_one_before_and_training_goes_on(
    stage: Stage, ranks: tuple[int, ...]
) -> None:
    values = run_generation(
        overloaded(stage, 4 << 20, ranks, file_limit=1 << 20),
        3,
        variables=stage.variables(ELASTICRUN_SAVE_INTERVAL=0, ELASTICRUN_KEEP=100),
    )
    check_went_on(stage, 3, values)


@pytest.mark.parametrize("heavy", [0, *in_wide(1)])
def test_a_full_disk_leaves_the_one_before_and_training_goes_on(
    stage: Stage, heavy: int
) -> None:
    with small_disk(stage.checkpoints):
        values = run_generation(
            overloaded(stage, 8 << 20, (heavy,)),
            2,
            variables=stage.variables(ELASTICRUN_SAVE_INTERVAL=0, ELASTICRUN_KEEP=100),
        )
        check_went_on(stage, 2, values)
        assert run_generation(small(stage), 2, variables=stage.variables()) == values


def test_a_disk_that_is_full_when_a_generation_begins_is_waited_for(
    saved: Stage,
) -> None:
    kept = saved.root / "kept"
    saved.checkpoints.rename(kept)
    with small_disk(saved.checkpoints):
        shutil.copytree(kept, saved.checkpoints, dirs_exist_ok=True)
        fill(saved.checkpoints / "x")
        with start_generation(small(saved), 2, variables=saved.variables()) as running:
            wait_until(lambda: "waiting for room" in saved.log(0), "a word on it")
            (saved.checkpoints / "x").unlink()
            outcomes = running.wait(timeout=DEADLINE)
        assert [outcome.exit_code for outcome in outcomes] == [0, 0]
        saved.check_exactly_once(6 * NUM_BATCHES)


# Not to be written


def test_a_directory_that_cannot_be_made_is_refused(stage: Stage) -> None:
    stage.checkpoints.write_text("a file is in the way")
    errors = refusals(stage, 2, ELASTICRUN_CHECKPOINT_DIR=stage.checkpoints / "job")
    for error in errors:
        assert "CheckpointError" in error
        assert f"{stage.checkpoints}/job cannot hold this job's checkpoints" in error


def test_without_permission_the_job_is_refused(stage: Stage) -> None:
    stage.checkpoints.mkdir()
    stage.checkpoints.chmod(0o555)

    def script() -> int:
        environment = read_environment()
        "localhost".encode("idna")  # Loads what nobody may not have the right to read.
        if os.geteuid() == 0:  # Who may write everywhere becomes nobody.
            os.setresuid(65534, 65534, 65534)
        with use_job(Job(environment)):
            return 1

    with start_generation(script, 2, variables=stage.variables()) as generation:
        outcomes = generation.wait(timeout=DEADLINE)
    assert [outcome.exit_code for outcome in outcomes] == [1, 1]
    for outcome in outcomes:
        assert "CheckpointError" in (outcome.error or "")
        assert "cannot hold this job's checkpoints" in (outcome.error or "")
        assert "Permission denied" in (outcome.error or "")


def test_a_job_alone_is_refused_as_well(saved: Stage) -> None:
    with pytest.raises(GenerationFailed, match="belongs to the job 'test'"):
        run_generation(small(saved), 1, variables=saved.variables(ELASTICRUN_JOB="x"))
