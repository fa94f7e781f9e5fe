"""A claim keeps a second live job out of an object store, and only that."""

from __future__ import annotations

import logging
import os
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import psutil
import pytest

from elasticrun.checkpoint.storage.claim import (
    Claim,
    ClaimTiming,
    StoreClaim,
    find_claimant,
    this_machine,
)
from elasticrun.checkpoint.storage.objects import Objects, open_objects
from elasticrun.checkpoint.storage.place import OwnerProcess, RemotePath, parse_place
from elasticrun.errors import CheckpointError, CheckpointWarning
from tests.support.places import make_place
from tests.support.stage import wait_until

NEVER = 1e9
LIVELY = ClaimTiming(renewal=0.01, look=0.01, silence=NEVER)
SLEEPY = ClaimTiming(renewal=NEVER, look=0.01, silence=0.0)

Make = Callable[[ClaimTiming], StoreClaim]


@pytest.fixture
def objects(tmp_path: object) -> Objects:
    place = parse_place(make_place("memory", None))  # type: ignore[arg-type]
    assert isinstance(place, RemotePath)
    return open_objects(place)


@pytest.fixture
def make(objects: Objects) -> Iterator[Make]:
    made = []

    def make_one(timing: ClaimTiming) -> StoreClaim:
        made.append(StoreClaim(objects, timing=timing))
        return made[-1]

    yield make_one
    for each in made:
        each.release()


def numbers(objects: Objects) -> list[str]:
    return sorted(name for name in objects.list() if name.startswith("claim-"))


def stored(objects: Objects, number: int = 1) -> Claim:
    return Claim.decode(objects.get(f"claim-{number:08d}"))


def put(objects: Objects, number: int = 1, **changes: object) -> Claim:
    """Put a claim of a job on another machine, which says nothing any more."""
    claim = Claim(
        token=f"token {number}",
        machine="elsewhere",
        owner=OwnerProcess("far", 12, 0.0, "2026-01-01 00:00:00 UTC"),
        time=time.time(),
    )
    claim = replace(claim, **changes)  # type: ignore[arg-type]
    objects.put(f"claim-{number:08d}", claim.encode())
    return claim


@pytest.fixture
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_a_released_place_can_be_claimed_again(
    objects: Objects, make: Make, no_warning: None
) -> None:
    for number in (1, 2, 3, 4):
        claim = make(LIVELY)
        claim.acquire(timeout=0)
        claim.check()
        owner = find_claimant(objects)
        assert owner is not None
        assert owner.pid == os.getpid()
        claim.release()
        claim.release()
        assert find_claimant(objects) is None
        assert stored(objects, number).is_released
    assert numbers(objects) == ["claim-00000003", "claim-00000004"]


def test_a_live_job_is_not_disturbed(objects: Objects, make: Make) -> None:
    first = make(LIVELY)
    first.acquire(timeout=0)
    with pytest.raises(CheckpointError) as caught:
        make(LIVELY).acquire(timeout=0)
    assert f"{objects.place} is in use by a live job (process {os.getpid()} on" in str(
        caught.value
    )
    first.check()
    with pytest.raises(CheckpointError, match="is in use by a live job"):
        first.acquire(timeout=0)


def test_a_job_that_ends_within_the_time_is_waited_for(make: Make) -> None:
    first, second = make(LIVELY), make(LIVELY)
    first.acquire(timeout=0)
    waits = threading.Thread(target=second.acquire, kwargs={"timeout": NEVER / 1e6})
    waits.start()
    first.release()
    waits.join()
    second.check()


def test_a_process_that_died_here_holds_nothing(
    objects: Objects, make: Make, no_warning: None
) -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        owner = OwnerProcess(
            "here", process.pid, psutil.Process(process.pid).create_time(), "now"
        )
        put(objects, machine=this_machine(), owner=owner, folder="f")
        assert find_claimant(objects) == owner
        process.kill()
        process.wait()
    assert find_claimant(objects) is None
    claim = make(LIVELY)
    claim.acquire(timeout=0)
    assert claim.folder_of_lost_owner is None


def test_a_process_number_that_was_given_again_is_another_process(
    objects: Objects, make: Make, no_warning: None
) -> None:
    owner = replace(OwnerProcess.this_process(), process_started=1.0)
    put(objects, machine=this_machine(), owner=owner)
    make(LIVELY).acquire(timeout=0)


@pytest.mark.parametrize("how", ["silent", "long ago"])
def test_a_silent_job_elsewhere_is_taken_over_with_a_warning(
    objects: Objects, make: Make, how: str
) -> None:
    if how == "silent":
        put(objects, folder="checkpoint-00000007")
    else:
        put(objects, folder="checkpoint-00000007", time=time.time() - 7200)
    timing = ClaimTiming(look=0.01, silence=0.02 if how == "silent" else NEVER)
    claim = make(timing)
    with pytest.warns(CheckpointWarning) as caught:
        claim.acquire(timeout=0)
    assert str(caught[0].message) == (
        f"{objects.place} is taken over from process 12 on far, since 2026-01-01 "
        "00:00:00 UTC, which gave no sign of life. If that job is still alive, it "
        "stops at its next save."
    )
    assert claim.folder_of_lost_owner == "checkpoint-00000007"
    claim.check()


def test_a_job_that_was_taken_over_stops_and_harms_nothing(
    objects: Objects, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make(SLEEPY), make(SLEEPY)
    first.acquire(timeout=0)
    with pytest.warns(CheckpointWarning, match="is taken over"):
        second.acquire(timeout=0)
    for act in (first.check, lambda: first.begin("checkpoint-00000002")):
        with pytest.raises(CheckpointError) as caught:
            act()
        assert f"another job has taken over {objects.place} (process" in str(
            caught.value
        )
        assert "this one stops without saving" in str(caught.value)
    first.release()
    assert "was not given back: another job has taken over" in caplog.text
    second.check()
    assert not stored(objects, 2).is_released


def test_a_claim_that_others_have_forgotten_is_lost(
    objects: Objects, make: Make
) -> None:
    claim = make(SLEEPY)
    claim.acquire(timeout=0)
    objects.remove_object("claim-00000001")
    with pytest.raises(CheckpointError, match=r"taken over memory://\S+, because"):
        claim.check()


def test_the_owners_thread_renews_until_it_is_taken_over(
    objects: Objects, make: Make, caplog: pytest.LogCaptureFixture
) -> None:
    claim = make(LIVELY)
    claim.acquire(timeout=0)
    claim.begin("checkpoint-00000003")
    wait_until(lambda: stored(objects).renewals > 3)
    assert stored(objects).folder == "checkpoint-00000003"
    with caplog.at_level(logging.ERROR):
        put(objects, 2)
        assert claim._thread is not None
        claim._thread.join()
    assert "another job has taken over" in caplog.text


def test_of_many_that_start_at_once_one_has_the_place(
    objects: Objects, make: Make
) -> None:
    made = [make(LIVELY) for _ in range(8)]
    barrier = threading.Barrier(len(made))

    def start(claim: StoreClaim) -> None:
        barrier.wait()
        with suppress(CheckpointError):
            claim.acquire(timeout=0)

    threads = [threading.Thread(target=start, args=[each]) for each in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(map(has_it, made)) == 1


def has_it(claim: StoreClaim) -> bool:
    try:
        claim.check()
    except (CheckpointError, ValueError):
        return False
    return True


def test_a_claim_that_cannot_be_read_is_watched_like_any_other(
    objects: Objects, make: Make
) -> None:
    objects.put("claim-00000005", b"garbage")
    claim = make(ClaimTiming(look=0.01, silence=0.02))
    with pytest.warns(CheckpointWarning, match="process 0 on an unknown host"):
        claim.acquire(timeout=0)
    assert claim.name == "claim-00000006"


def test_a_claim_that_cannot_be_read_and_changes_is_that_of_a_live_job(
    objects: Objects, make: Make
) -> None:
    has_ended = threading.Event()

    def write() -> None:
        number = 0
        while not has_ended.wait(0.01):
            number += 1
            objects.put("claim-00000005", b"version 2: %d" % number)

    objects.put("claim-00000005", b"version 2: 0")
    writer = threading.Thread(target=write)
    writer.start()
    with pytest.raises(CheckpointError, match="is in use by a live job"):
        make(LIVELY).acquire(timeout=0)
    has_ended.set()
    writer.join()


def test_nobody_commits_without_a_claim(make: Make) -> None:
    with pytest.raises(ValueError, match="was not acquired"):
        make(LIVELY).check()
