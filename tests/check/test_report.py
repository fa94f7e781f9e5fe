"""What a check says of what it has found."""

from __future__ import annotations

from elasticrun.check.blame import Cause
from elasticrun.check.comparing import Mismatch
from elasticrun.check.report import ExitCode, Report, Result, as_text
from elasticrun.check.runs.scenarios import (
    RestartPlace,
    Scenario,
    scenario_without_restart,
)


def test_what_differs_without_a_restart_is_not_blamed_on_restarts() -> None:
    found = [Mismatch("optimizer.lr", 0.1, 0.2)]
    one, two = (scenario_without_restart(size) for size in (1, 2))
    by_size = Result(two, found, [], [], one)
    text = as_text(Report(ExitCode.DIFFERENT, results=[by_size]))
    assert "different without any restart, from 1 to 2 replicas" in text
    assert "different: another number of replicas changes the outcome (1 found)" in text
    by_restart = Result(Scenario((1, 1), (RestartPlace(0, 0, 1),)), found, [], [])
    text = as_text(Report(ExitCode.DIFFERENT, results=[by_size, by_restart]))
    assert "different: restarts change the outcome (2 found)" in text


def test_a_line_that_lost_several_variables_is_shown_once() -> None:
    one, other = (
        Cause("lost", name, path="a.py", line=3, source="total += 1")
        for name in ("a.total", "b.total")
    )
    scenario = Scenario((1, 1), (RestartPlace(0, 0, 1),))
    found = Result(scenario, [Mismatch("net.weight", 0.1, 0.2)], [one, other], [])
    text = as_text(Report(ExitCode.DIFFERENT, results=[found]))
    assert "variable a.total" in text
    assert "variable b.total" in text
    assert text.count("3 | total += 1") == 1


def test_other_places_of_one_difference_do_not_read_as_equal() -> None:
    scenario, other = (
        Scenario((1, 1), (RestartPlace(0, 0, batch),)) for batch in (1, 3)
    )
    found = Result(scenario, [Mismatch("net.weight", 0.1, 0.2)], [], [], also=[other])
    text = as_text(Report(ExitCode.DIFFERENT, results=[found]))
    assert "  the same difference also when restarted at 0:0:3\n" in text
