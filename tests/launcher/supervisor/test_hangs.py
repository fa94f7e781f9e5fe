"""When silence is a hang, and whose."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest

from elasticrun.launcher.forks.waiting import ForkedReplica
from elasticrun.launcher.options import (
    OptionError,
    parse_hang_timeout,
)
from elasticrun.launcher.supervisor.generation import Member
from elasticrun.launcher.supervisor.watchdog import HangClock, find_hanging
from elasticrun.launcher.terminal.output import (
    Log,
)
from elasticrun.replicas.wire import Channel


def test_it_learns_what_is_usual_and_looks_at_loops_only() -> None:
    clock = HangClock("auto")
    assert not clock.is_hung(539, is_in_loop=True)
    assert clock.is_hung(541, is_in_loop=True)
    assert not clock.is_hung(10_000, is_in_loop=False)
    clock.learn_gap(100)
    assert not clock.is_hung(1999, is_in_loop=True)
    assert clock.is_hung(2001, is_in_loop=True)


def test_it_is_more_patient_after_a_hang() -> None:
    clock = HangClock("auto")
    clock.learn_hang()
    assert clock.timeout == 1080


def test_it_takes_seconds_and_off() -> None:
    assert HangClock(parse_hang_timeout("30")).is_hung(31, is_in_loop=False)
    assert not HangClock(parse_hang_timeout("off")).is_hung(1e9, is_in_loop=True)
    with pytest.raises(OptionError, match="auto, or off"):
        parse_hang_timeout("never")


@pytest.mark.parametrize(
    ("reports", "culprit"),
    [
        ([((0, 0, 30), 6), ((0, 0, 30), 5)], 1),
        ([((0, 0, 36), 6), ((0, 0, 30), 6)], 1),
        ([((0, 0, 30), 5), ((0, 0, 36), 6), ((0, 0, 36), 6)], 0),
        ([((0, 0, 30), 5), ((0, 0, 30), 5)], None),
        ([((0, 0, 30), 5), None], 1),
        ([None, None], None),
        ([((0, 0, 30), 5)], 0),
    ],
)
def test_who_is_behind_holds_the_others_up(
    tmp_path: Path, reports: list[Any], culprit: int | None
) -> None:
    silent = []
    for rank, each in enumerate(reports):
        left, right = socket.socketpair()
        left.close()
        right.close()
        member = Member(
            rank,
            pid=0,
            replica=ForkedReplica(rank, 0, Channel(left), (0, 0), ()),
            pidfd=0,
            started_at=0.0,
            log=Log(tmp_path / str(rank), pytest.fail),
        )
        if each is not None:
            member.report = {"counts": list(each[0]), "num_forward_passes": each[1]}
        member.log.close()
        silent.append(member)
    found = find_hanging(silent)
    assert (None if found is None else found.rank) == culprit
