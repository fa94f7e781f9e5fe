"""What a check says of what it has found."""

from __future__ import annotations

from pathlib import Path

from elasticrun.check.blame import Cause
from elasticrun.check.checked_run import CheckedRun
from elasticrun.check.comparing import Mismatch
from elasticrun.check.report import (
    ExitCode,
    Report,
    Result,
    as_text,
    problem_of,
    where_it_waits,
)
from elasticrun.check.scenarios import (
    RestartPlace,
    Scenario,
)
from elasticrun.check.source import WORK, find_source
from elasticrun.launcher.endings import Ending
from elasticrun.launcher.supervisor.generation import Stack


def test_what_differs_without_a_restart_is_not_blamed_on_restarts() -> None:
    found = [Mismatch("optimizer.lr", 0.1, 0.2)]
    one, two = (Scenario((size,)) for size in (1, 2))
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


def test_a_program_that_was_not_let_write_hears_of_writable(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    source = find_source(str(tmp_path / "train.py"), directory=str(tmp_path), linked=[])
    run = CheckedRun(Scenario((1,)), tmp_path, Ending(0, 1, 0.0))
    for line, is_told in (("sh: out: Permission denied", True), ("oh", False)):
        run.output = {0: [line]}
        problem = problem_of(run, [], source=source, finder=None)
        assert ("add --writable FOLDER" in problem.text) == is_told


def test_stacks_tell_where_each_replica_waits(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("def train():\n    dist.all_reduce(x)\n\n\ntrain()\n")
    source = find_source(str(script), directory=str(tmp_path), linked=[])
    copy = f"/tmp/elasticrun-check-x/elasticrun-run-3/{WORK}/train.py"
    stack = Stack()
    for line in (
        "Thread 0x1 (most recent call first):",
        f'  File "{copy}", line 1 in in_a_thread',
        "",
        "Current thread 0x2 (most recent call first):",
        '  File "/usr/lib/torch/distributed/distributed_c10d.py", line 4 in all_reduce',
        f'  File "{copy}", line 2 in train',
        f'  File "{copy}", line 5 in <module>',
        '  File "/usr/elasticrun/launcher/replica/main.py", line 130 in _run_script',
    ):
        stack.take(line.encode())
    assert where_it_waits(0, stack, source) == (
        f"rank 0 waits at {script}:2 in train: dist.all_reduce(x)"
    )
    assert where_it_waits(1, Stack(), source) == "rank 1 did not say where it waits"
