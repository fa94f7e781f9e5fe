"""What becomes of a job, in its events and as told to a command."""

from __future__ import annotations

import contextlib
import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from elasticrun.checkpoint.events import read_events
from elasticrun.launcher import events
from elasticrun.launcher.events import EventKeeper
from elasticrun.launcher.options import Options, Program, Replicas
from elasticrun.launcher.terminal.console import open_console
from tests.launcher.running import (
    elasticrun,
    run,
    running,
    scaled,
)
from tests.support.stage import Stage

TOLD = ("start", "crash", "rescue", "restart", "rescaling", "stop", "end")


def events_of(stage: Stage) -> list[dict[str, Any]]:
    return [
        event
        for event in read_events(stage.checkpoints)
        if event["event"] != "progress"
    ]


def told(stage: Stage) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (stage.root / "told").read_text().split("\n")]


@pytest.mark.slow
def test_a_crash_is_kept_and_told_with_its_error(stage: Stage) -> None:
    # One that is slow, and one that has ended before it reads, disturb nobody.
    command = "test -e told && echo >> told; cat >> told; sleep 0.1; exit 3"
    options = ["--replicas", 2, "--save-interval", 0, "--on-event", command]
    job = run(stage, "--quiet", *options, "--", "--at", "0:1:5:raise")
    events = events_of(stage)
    kinds = [event["event"] for event in events if event["event"] != "checkpoint"]
    expected = ["start", "begin", "leave", "crash", "restart", "begin", "leave", "end"]
    assert kinds == expected
    assert told(stage) == [event for event in events if event["event"] in TOLD]
    start, crash, restart, end = told(stage)
    assert (start["job"], start["pid"]) == ("test", job.pid)
    assert (crash["rank"], crash["code"], crash["generation"]) == (1, 1, 0)
    assert crash["error"] == "rank 1 raised ValueError: the loss is not a number"
    assert crash["trace"].endswith("ValueError: the loss is not a number\n")
    assert f"; {restart['text']}\n" in job.events
    assert (job.output, "[1] " in job.events) == ("", False)
    crashed = elasticrun(stage, "logs", "checkpoints", "--generation", "0")
    assert "[1] Traceback" in crashed.stdout
    assert (end["code"], end["text"]) == (0, job.events.split("elasticrun: ")[-1][:-1])
    begun = [event for event in events if event["event"] == "begin"]
    assert [each["world_size"] for each in begun] == [2, 2]
    assert begun[1]["checkpoint"] == crash["checkpoint"]


@pytest.mark.slow
@pytest.mark.wide
def test_a_rescaling_and_a_stop_are_kept(stage: Stage) -> None:
    holds = ["--hold", "0:9", "--hold", "1:19"]
    with ExitStack() as stack:
        job = stack.enter_context(running(stage, "--replicas", 1, "--", *holds))
        job.wait_until_held(0, 1)
        assert scaled(job, "+1").returncode == 0
        job.wait_until_held(1, 2)
        assert job.ask("report", "test").stdout == "report.html\n"
        page = (stage.root / "report.html").read_text()
        assert '"state": {"text": "running", "mood": "busy"}' in page
        job.process.terminate()
        job.wait_until_said("SIGTERM: saving")
        stage.mark("stop-1")
        assert job.wait() == 143
    (ended,) = json.loads(
        elasticrun(stage, "status", stage.checkpoints, "--json").stdout
    )
    assert (ended["job"], ended["code"]) == ("test", 143)
    by_kind = {event["event"]: event for event in events_of(stage)}
    rescaling = by_kind["rescaling"]
    assert (rescaling["replicas"], rescaling["target"]) == (1, 2)
    assert by_kind["stop"]["cause"] == "SIGTERM"
    assert by_kind["leave"]["code"] == 75
    assert by_kind["end"]["code"] == 143
    assert "checkpoint 2 is saved" in by_kind["end"]["text"]


@pytest.mark.slow
@pytest.mark.wide
def test_a_stop_now_saves_nothing(stage: Stage) -> None:
    with running(stage, "--replicas", 1, "--", "--hold", "0:9") as job:
        job.wait_until_held(0, 1)
        assert (
            Path(f"/proc/{job.pid_of(0, 0)}/cmdline")
            .read_bytes()
            .startswith(b"rank 0 of program.py (elasticrun)\0")
        )
        stopped = job.ask("stop", "--now")
        assert (stopped.returncode, stopped.stdout) == (0, "ending at once\nended\n")
        assert job.wait() == 75
    assert stage.committed() == []
    assert "the stop command again: ending at once" in job.events


def failures_of(
    command: str,
    kinds: list[str],
    folder: Path,
    capfd: pytest.CaptureFixture[str],
) -> list[str]:
    """Return the lines on a terminal after so many events."""
    options = Options(
        program=Program("script", "train.py", (), ()),
        replicas=Replicas(1, 1, 1),
        name="job",
        is_named=False,
        checkpoint_dir=folder,
        local_dir=folder,
        log_dir=folder,
        on_event=command,
    )
    with contextlib.closing(open_console()) as console:
        keeper = EventKeeper(options, console, lambda: True)
        for kind in kinds:
            console.record(kind, "text")
        keeper.close()
    return capfd.readouterr().err.splitlines()


def test_a_command_that_fails_is_told_of_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """However much it says; what one that succeeds says is nobody's business."""
    command = (
        "head -c 5000000 /dev/zero | tr '\\0' x >&2; echo no mail >&2; grep -q end"
    )
    lines = failures_of(command, ["end", "crash", "crash"], tmp_path, capfd)
    (line,) = lines
    assert line.startswith(f"elasticrun: --on-event {command}: exit code 1: ")
    assert line.count("no mail") < 100


def test_a_command_that_hangs_is_ended_with_what_it_started(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "_MOST_SECONDS", 0.5)
    command = "sleep 1000 & sleep 1000"  # Both hold the other end of a pipe.
    lines = failures_of(command, ["crash", "end"], tmp_path, capfd)
    assert lines == [f"elasticrun: --on-event {command}: ended after 0 seconds"]


def test_what_a_command_leaves_running_is_not_waited_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    command = "setsid sleep 30 & exit 3"  # It holds the other end of a pipe, too.
    lines = failures_of(command, ["crash", "end"], tmp_path, capfd)
    assert lines == [f"elasticrun: --on-event {command}: exit code 3"]
