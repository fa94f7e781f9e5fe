"""What cannot work is refused where it is written, with the reason and the way out."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest

import elasticrun
from elasticrun import (
    AdaptiveDataLoader,
    CheckpointError,
    ElasticRunError,
    JobStopped,
    LoopOrderError,
    StateNameError,
    current_job,
    init,
    remaining_epochs_until,
    request_stop,
    save_all_states,
)
from elasticrun.testing import Job
from tests.support.data import AskingForTheJob, Numbers
from tests.support.generations import run_once

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def test_overlapping_loops_are_refused_with_both_places(job: Job) -> None:
    train = AdaptiveDataLoader(Numbers(10), 4, name="train")
    valid = AdaptiveDataLoader(Numbers(10), 4, name="valid")
    outer, inner = iter(train), iter(valid)
    next(outer), next(inner), next(inner)
    with pytest.raises(
        LoopOrderError,
        match=r"the loop over `train` \(test_errors\.py:\d+\) went on while the loop "
        r"over `valid` \(test_errors\.py:\d+\) was at batch 1, which had begun in its "
        r"body\. A job has one position, so it cannot resume two loops at once\. Let "
        r"the inner loop end, or leave it, .* iterate both together with a "
        r"CombinedLoader\.",
    ):
        next(outer)
    assert job.progress.position.index == 0
    assert job.loader is None


def test_an_inner_loop_that_goes_on_after_the_outer_one_is_refused(job: Job) -> None:
    train = AdaptiveDataLoader(Numbers(10), 4, name="train")
    valid = AdaptiveDataLoader(Numbers(10), 4, name="valid")
    for _ in train:
        inner = iter(valid)
        next(inner)
        break
    with pytest.raises(LoopOrderError, match="`valid` .* after the loop around it had"):
        next(inner)
    assert job.progress.position.finished_loops == 1


def test_two_loaders_in_one_zip_are_refused(job: Job) -> None:
    train = AdaptiveDataLoader(Numbers(10), 4, name="train")
    valid = AdaptiveDataLoader(Numbers(10), 4, name="valid")
    with pytest.raises(LoopOrderError, match="`train` .* went on while .* `valid`"):
        list(zip(train, valid, strict=True))
    with pytest.raises(LoopOrderError, match="`train` .* began while another one over"):
        list(zip(train, train, strict=True))


def test_a_kept_iterator_is_named_as_the_reason(job: Job) -> None:
    train = AdaptiveDataLoader(Numbers(10), 4, name="train")
    iterator = iter(train)
    next(iterator)
    with pytest.raises(LoopOrderError, match="do not keep its iterator"):
        list(train)
    del iterator
    assert len(list(train)) == 3


def test_a_loader_is_not_made_in_a_loop(job: Job) -> None:
    train = AdaptiveDataLoader(Numbers(10), 4, name="train")
    for _ in train:
        with pytest.raises(
            LoopOrderError,
            match=r"a loader is being made inside the loop over `train` "
            r"\(test_errors\.py:\d+\)\. After a restart that loop continues in the "
            r"middle, so a loader made earlier in it would be missing\. Make all "
            r"loaders before the epoch loop\.",
        ):
            AdaptiveDataLoader(Numbers(10), name="valid")


def test_a_loader_without_a_name_is_not_made_in_an_epoch(job: Job) -> None:
    for epoch in remaining_epochs_until(2):
        with pytest.raises(
            LoopOrderError,
            match=rf"a loader without a name is being made in epoch {epoch}\. Loaders "
            r"without a name are known by the order in which they are made, which "
            r"differs after a restart, when earlier epochs are skipped\. Make it "
            r"before the epoch loop, or give it a name= of its own in each epoch\.",
        ):
            AdaptiveDataLoader(Numbers(10))
        AdaptiveDataLoader(Numbers(10), name=f"valid-{epoch}")


def test_a_loaders_name_is_taken_once(job: Job) -> None:
    AdaptiveDataLoader(Numbers(10), name="train")
    AdaptiveDataLoader(Numbers(10))
    with pytest.raises(
        StateNameError, match="taken by another one.*before the epoch loop"
    ):
        AdaptiveDataLoader(Numbers(10), name="train")


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "length": (
        {"dataset": Numbers(12)},
        "had 10 samples in the data set (or its sampler), but now 12",
    ),
    "batch size": ({"batch_size": 5}, "had 2 as the batch size, but now 5"),
    "seed": ({"seed": 3}, "had 0 as the seed, but now 3"),
    "shuffle": ({"shuffle": True}, "had False as shuffle, but now True"),
    "drop_last": ({"drop_last": True}, "had False as drop_last, but now True"),
    "sampler": ({"sampler": [1, 2]}, "had 10 samples in the data set"),
    "two": (
        {"batch_size": 5, "seed": 3},
        "had 2 as the batch size, but now 5; 0 as the seed, but now 3. With other",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_the_batches_depend_on_must_not_change(
    tmp_path: Path, change: str
) -> None:
    def script(**changes: Any) -> None:
        options: dict[str, Any] = {"dataset": Numbers(10), "batch_size": 2}
        for _ in AdaptiveDataLoader(**{**options, **changes}, name="train"):
            request_stop()

    changes, text = CHANGES[change]
    run_once(script, tmp_path)
    whole = f"the checkpoint's loader `train` {text}"
    with pytest.raises(CheckpointError, match=re.escape(whole)) as caught:
        run_once(lambda: script(**changes), tmp_path)
    assert "Give the loader what it had, or start anew with" in str(caught.value)
    # World size, workers and micro-batches may.
    run_once(
        lambda: script(num_workers=1, max_local_batch_size=1, seed_each="sample"),
        tmp_path,
    )


def test_a_job_starts_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, clean_env: None
) -> None:
    monkeypatch.setenv("ELASTICRUN_SAVE_INTERVAL", "off")
    init(tmp_path)
    with pytest.raises(
        ElasticRunError,
        match=r"init\(\) was called after the job had started, too late for its "
        r"settings\. Call it first, before loaders, models and epoch loops\.",
    ):
        init(tmp_path)
    assert save_all_states() == tmp_path / "checkpoint-00000001"


def test_the_first_use_starts_the_job_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("ELASTICRUN_CHECKPOINT_DIR", str(tmp_path))
    assert elasticrun.rank() == elasticrun.local_rank() == 0
    assert elasticrun.world_size() == 1
    assert elasticrun.generation() == 0
    assert elasticrun.device().type in ("cpu", "cuda")
    assert save_all_states() == tmp_path / "checkpoint-00000001"
    with pytest.raises(ElasticRunError, match="init\\(\\) was called after the job"):
        init()


def test_a_worker_has_no_job(job: Job) -> None:
    loader = AdaptiveDataLoader(AskingForTheJob(4), 2, num_workers=1)
    with pytest.raises(
        ElasticRunError,
        match=r"(?s)this is a DataLoader worker, which has no job, since it reads "
        r"batches ahead of the loop\. Use elasticrun in the main process only, not in "
        r"the data set or the collate function\.",
    ):
        list(loader)


def test_without_workers_the_data_set_may_ask(job: Job) -> None:
    assert [batch.tolist() for batch in AdaptiveDataLoader(AskingForTheJob(2), 2)] == [
        [0, 0]
    ]


def in_fork(action: Any) -> str:
    """Return the text of the error that `action` raises in a forked child."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            action()
            os.write(writer, b"no error")
        except BaseException as error:
            os.write(writer, f"{type(error).__name__}: {error}".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        text = file.read().decode()
    os.waitpid(pid, 0)
    return text


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_has_no_job_and_leaves_its_parents_alone(
    job: Job, tmp_path: Path
) -> None:
    assert re.fullmatch(
        rf"ElasticRunError: process \d+ was forked from the replica {os.getpid()} and "
        r"has no job of its own\. Use elasticrun in the replica only\.",
        in_fork(current_job),
    )
    in_fork(job.close)
    assert not job.is_closed
    assert save_all_states() is not None


def test_errors_are_caught_as_one_kind_and_a_stop_is_none() -> None:
    kinds = ("CheckpointError", "StateNameError", "LoopOrderError", "AgreementError")
    for name in kinds:
        assert issubclass(getattr(elasticrun, name), ElasticRunError)
    assert issubclass(JobStopped, SystemExit)
    assert not issubclass(JobStopped, Exception)


@pytest.mark.slow
def test_except_exception_does_not_swallow_a_stop(tmp_path: Path) -> None:
    reached = []

    def script() -> None:
        try:
            for _ in AdaptiveDataLoader(Numbers(6), 2):
                request_stop()
        except Exception:
            reached.append("handler")
        reached.append("after")

    run_once(script, tmp_path)
    assert reached == []


def test_another_order_of_the_same_length_is_refused(tmp_path: Path) -> None:
    orders = [list(range(10)), list(range(10))[::-1]]

    def script(order: list[int]) -> None:
        AdaptiveDataLoader(Numbers(10), 2, sampler=order, name="train")
        list(remaining_epochs_until(1))

    run_once(lambda: script(orders[0]), tmp_path)
    run_once(lambda: script(orders[0]), tmp_path)
    with pytest.raises(CheckpointError, match="checksum of the order"):
        run_once(lambda: script(orders[1]), tmp_path)
