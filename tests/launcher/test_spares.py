"""Spares: a whole generation waits for a crash of the one that trains."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from tests.launcher.running import (
    check_trains,
    processes_of,
    wait_until_nothing_is_left,
)
from tests.launcher.supervisor.test_rehearsal import Rescaled, started
from tests.support.stage import Stage, wait_until

pytestmark = pytest.mark.slow


@pytest.fixture
def spared(stage: Stage) -> Iterator[Rescaled]:
    with started(stage, "--spares") as each:
        yield each


def ready(spared: Rescaled, number: int) -> list[int]:
    """Return the last two of so many that have begun, once they are ready."""
    pids = spared.pids(number)
    spared.stage.mark("prepare")
    wait_until(lambda: spared.job.status()["spares"] == 2, "spares")
    return sorted(pids[-2:])


def members(spared: Rescaled) -> list[int]:
    return sorted(each["pid"] for each in spared.job.status()["members"])


def test_a_crash_is_followed_by_the_spares(spared: Rescaled) -> None:
    """And those by others: in the background, after a batch."""
    for number, last in enumerate((4, 6)):
        pids = ready(spared, last)
        assert spared.job.status()["spare_memory"] > 0
        os.kill(members(spared)[number], signal.SIGKILL)
        spared.job.wait_until_said(f"generation {number + 1}: 2 replicas started")
        assert members(spared) == pids
        spared.stage.wait_for(f"trains-{number + 1}")
    ready(spared, 8)
    spared.stop()


def test_a_spare_that_is_killed_is_replaced(spared: Rescaled) -> None:
    pids = ready(spared, 4)
    os.kill(pids[0], signal.SIGKILL)
    spared.job.wait_until_said("a spare failed; others take their place")
    assert not {*ready(spared, 6)} & {*pids}
    wait_until(lambda: not {*pids} & {*processes_of(spared.stage)}, "their end")
    check_trains(spared.stage)
    os.kill(spared.job.pid, signal.SIGKILL)
    wait_until_nothing_is_left(spared.stage)


def test_a_script_that_cannot_run_beside_itself_has_no_spares(
    spared: Rescaled,
) -> None:
    spared.stage.mark("fail")
    spared.stage.mark("prepare")
    spared.job.wait_until_said("a spare failed; there are no more")
    spared.job.wait_until_said("OSError: the port is taken")
    check_trains(spared.stage)
    assert spared.job.status()["spares"] == 0
    spared.stop()


def test_a_rescaling_begins_with_others_which_get_spares_of_their_own(
    spared: Rescaled,
) -> None:
    pids = ready(spared, 4)
    spared.free()
    assert spared.scale(1).result().returncode == 0
    assert not {*members(spared)} & {*pids}
    spared.pids(6)
    wait_until(lambda: spared.job.status()["spares"] == 1, "a spare")
    spared.finish()
