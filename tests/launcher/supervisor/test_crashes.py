"""What crashes cost a job, and who is at fault for one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticrun.launcher.endings import EndKind, Outcome
from elasticrun.launcher.nodes.nodes import plan_round
from elasticrun.launcher.supervisor.restart_policy import CrashHistory, RestartPolicy
from tests.launcher.offers import offer


@pytest.mark.parametrize(
    ("max_restarts", "checkpoints", "delays"),
    [
        (10, [0] * 11, [0, 1, 2, 4, 8, 16, 32, 60, 60, 60, None]),
        (2, [1, 1, 2, 2, 2], [0, 1, 0, 1, None]),  # Full again by a newer checkpoint.
        (0, [5], [None]),
    ],
)
def test_delays_double_up_to_a_minute_until_none_is_left(
    max_restarts: int, checkpoints: list[int], delays: list[float | None]
) -> None:
    book = CrashHistory(max_restarts, newest_at_start=0)
    book.has_trained = True
    crash = Outcome(EndKind.CRASHED, text="no module named x", is_own_fault=True)
    found = [book.decide(replace(crash, newest=each), 0)[0] for each in checkpoints]
    assert found == delays


def test_what_comes_from_outside_costs_no_pause_three_times() -> None:
    book = CrashHistory(10, newest_at_start=0)
    book.has_trained = True
    killed = Outcome(EndKind.CRASHED, text="killed", is_from_outside=True)
    full = replace(killed, is_out_of_memory=True)
    delays = [book.decide(each, 0)[0] for each in [killed] * 5 + [full, killed]]
    assert delays == [0, 0, 0, 1, 2, 16, 8]


def test_a_newcomer_that_fails_at_once_fails_alone() -> None:
    veteran = CrashHistory(3, newest_at_start=0)
    veteran.has_trained = True
    newcomer = CrashHistory(3, newest_at_start=0)
    offers = [offer(1, has_trained=True), offer(1)]
    for node, book in enumerate((veteran, newcomer)):
        book.adopt(plan_round(offers, node, addresses=["a", "b"], interface=""))
    here = Outcome(EndKind.CRASHED, text="no module named x", is_own_fault=True)
    assert veteran.decide(replace(here, is_here=False), 3)[0] == 0
    assert newcomer.decide(here, 3)[0] is None
    assert newcomer.decide(replace(here, is_here=False), 3)[0] == 0


@pytest.mark.parametrize(
    ("has_trained", "newest", "text"),
    [
        (True, 7, "checkpoint 7 is the newest; the same command resumes"),
        (True, 0, "nothing was saved"),
        (False, 7, "nothing was trained since the start"),
    ],
)
def test_a_stop_between_two_generations_says_what_is_kept(
    tmp_path: Path, has_trained: bool, newest: int, text: str
) -> None:
    said: list[str] = []
    options: Any = SimpleNamespace(
        checkpoint_dir=tmp_path, how_to_go_on="; the same command resumes"
    )
    console: Any = SimpleNamespace(event=said.append)
    book = CrashHistory(3, newest_at_start=0)
    book.has_trained, book.newest_at_crash = has_trained, newest
    RestartPolicy(options, console, book).say_idle_end("SIGTERM")
    assert said == [f"SIGTERM: ending; {text}"]
