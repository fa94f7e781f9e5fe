"""Signals, deaths and hangs: what is saved, what is said, and that nothing survives."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable

import psutil
import pytest

from elasticrun.launcher.stop_signals import StopSignals
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    REPOSITORY,
    Running,
    forkserver_of,
    impatient,
    processes_of,
    run,
    running,
    take_for_hung,
    wait_until_nothing_is_left,
)
from tests.support.sockets import kept_port
from tests.support.stage import Stage, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow


def test_a_signal_saves_at_a_boundary_and_ends_everything(stage: Stage) -> None:
    options = ["--replicas", 2, "--", "--hold", "0:9", "--workers", 1]
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        job.process.send_signal(signal.SIGUSR1)
        stage.mark("stop-0")
        assert job.wait() == 138
        assert "SIGUSR1: saving at the next boundary" in job.events
        assert processes_of(stage) == []
    assert len(stage.committed()) == 1
    assert run(stage, "--replicas", 1).wait() == 0
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.parametrize(
    ("number", "code", "given"),
    [
        (signal.SIGTERM, 143, []),
        *in_wide((signal.SIGQUIT, 131, ["--stop-signals", "QUIT"])),
    ],
)
def test_a_signal_to_every_process_of_the_job_saves_as_well(
    stage: Stage, number: signal.Signals, code: int, given: list[str]
) -> None:
    """As Slurm sends it, and a process group: the launcher hears of it last here."""
    nodes = ["--nodes", "1:1", "--rdzv-endpoint", f"127.0.0.1:{kept_port()}"]
    program = ["--", "--hold", "0:9", "--workers", 1]
    with running(stage, *nodes, *given, "--replicas", 2, *program) as job:
        job.wait_until_held(0, 2)
        for pid in sorted(processes_of(stage), reverse=True):
            with contextlib.suppress(ProcessLookupError):  # It has ended by itself.
                os.kill(pid, number)
        stage.mark("stop-0")
        assert job.wait() == code
        assert processes_of(stage) == []
    assert f"{number.name}: saving at the next boundary" in job.events
    assert "stopped; checkpoint 1 is saved" in job.events
    assert "is lost" not in job.events
    assert "the forkserver has ended" not in job.events
    assert len(stage.committed()) == 1


def test_a_signal_to_one_replica_is_told_from_a_stop_of_the_program(
    stage: Stage,
) -> None:
    with running(stage, "--replicas", 2, "--", "--hold", "0:9") as job:
        job.wait_until_held(0, 2)
        os.kill(job.pid_of(0, 1), signal.SIGTERM)
        stage.mark("stop-0")
        assert job.wait() == 143
    assert (
        "stopped by SIGTERM to a replica with exit code 143; checkpoint 1 is saved"
        in (job.events)
    )


def test_signals_that_come_at_the_end_do_not_change_the_code(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with running(stage, "--replicas", 1, script=script) as job:
        job.wait_until_said("logs in")
        job.process.send_signal(signal.SIGINT)
        job.wait_until_said("nothing was trained since the start")
        while job.process.poll() is None:
            job.process.send_signal(signal.SIGINT)
        assert job.process.returncode == 130
        assert "Traceback" not in job.events


ENDS_SLOWLY = """
import atexit, os, pathlib, sys, time
import torch
import elasticrun

stage = pathlib.Path(sys.argv[1])

@atexit.register
def linger():
    (stage / "pid").write_text(str(os.getpid()))
    (stage / "marks" / "ends").touch()
    while not (stage / "marks" / "go").exists():
        time.sleep(0.01)

loader = elasticrun.AdaptiveDataLoader(torch.arange(8), 2)
# From now on there is a job, which is closed before `linger` is called.
for _ in elasticrun.remaining_epochs_until(2):
    for _ in loader:
        if "stop" in sys.argv:
            elasticrun.request_stop()
"""


@pytest.mark.parametrize("end", ["stop", *in_wide("finish")])
def test_a_signal_to_a_replica_that_has_saved_is_no_crash(
    stage: Stage, end: str
) -> None:
    """Slurm sends another one while what got the first one is ending."""
    script = stage.root / "script.py"
    script.write_text(ENDS_SLOWLY)
    arguments = ("--replicas", 1, "--", stage.root, end)
    with running(stage, *arguments, script=script) as job:
        wait_until(lambda: stage.has("ends"), "its end")
        os.kill(int((stage.root / "pid").read_text()), signal.SIGTERM)
        stage.mark("go")
        assert job.wait() == (75 if end == "stop" else 0), job.events
    assert "killed" not in job.events
    assert ("stopped by itself" if end == "stop" else "finished after") in job.events


def test_a_second_signal_ends_everything_at_once(stage: Stage) -> None:
    with running(stage, "--replicas", 2, "--", "--hold", "0:9", "--workers", 1) as job:
        job.wait_until_held(0, 2)
        job.process.terminate()
        job.wait_until_said("saving at the next boundary")
        # Within a second of the first one it is taken for the same.
        wait_until(lambda: job.process.terminate() or job.process.poll() is not None)
        assert job.wait() == 143
        assert "SIGTERM again: ending at once" in job.events
        assert processes_of(stage) == []
    assert stage.committed() == []


def test_a_terminal_that_is_closed_costs_nothing(stage: Stage) -> None:
    """The shell sends SIGHUP, and so does the kernel."""
    with running(stage, "--replicas", 2, "--", "--hold", "0:9") as job:
        job.wait_until_held(0, 2)
        job.process.send_signal(signal.SIGHUP)
        job.wait_until_said("SIGHUP: saving at the next boundary\n")
        job.process.send_signal(signal.SIGHUP)
        # It is read in its order, so an answer shows that the signal was.
        assert job.status()["state"] == "stopping"
        stage.mark("stop-0")
        assert job.wait() == 129
    assert len(stage.committed()) == 1


def test_a_signal_that_repeats_another_is_told_from_a_second_one() -> None:
    stops: list[tuple[str, int]] = []
    signals = StopSignals(lambda name, code: stops.append((name, code)))
    for number, now in (
        (signal.SIGUSR1, 1.0),
        (signal.SIGUSR1, 3.0),
        (signal.SIGTERM, 5.0),
        (signal.SIGTERM, 5.9),
        (signal.SIGHUP, 20.0),
        (signal.SIGWINCH, 20.0),
        (signal.SIGTERM, 6.1),
        (signal.SIGINT, 6.2),
        (signal.SIGUSR1, 9.0),
        (signal.SIGQUIT, 9.0),
    ):
        signals.take(number, now=now)
    assert stops == [("SIGUSR1", 138), ("SIGTERM", 143), ("SIGINT", 130)]


@pytest.mark.parametrize("is_first", [True, False])
def test_the_end_of_who_started_the_launcher_is_no_impatience(is_first: bool) -> None:
    """A signal to a whole step, service or container ends both."""
    stops: list[tuple[str, int]] = []
    signals = StopSignals(lambda name, code: stops.append((name, code)))
    if is_first:
        signals.take_end_of_parent(now=1.0)
    signals.take(signal.SIGTERM, now=1.0)
    if not is_first:
        signals.take_end_of_parent(now=3.0)
    assert [code for _, code in stops] == [143]
    signals.take(signal.SIGTERM, now=9.0)
    assert [code for _, code in stops] == [143, 143]


def test_who_does_not_come_to_a_boundary_in_time_is_ended(stage: Stage) -> None:
    with running(stage, "--replicas", 2, "--grace", 0.5, "--", "--hold", "0:9") as job:
        job.wait_until_held(0, 2)
        job.process.terminate()
        assert job.wait() == 143
        assert processes_of(stage) == []
    assert "without a new checkpoint" in job.events
    assert "tests/launcher/program.py" in job.events  # The stacks.


@pytest.mark.parametrize("after", [*in_wide("logs in"), "started"])
def test_a_signal_while_it_starts_leaves_nothing(stage: Stage, after: str) -> None:
    script = stage.root / "script.py"
    script.write_text("import time, torch; time.sleep(1000)")
    with running(stage, "--replicas", 2, script=script) as job:
        job.wait_until_said(after)
        job.process.terminate()
        assert job.wait() == 143
        assert processes_of(stage) == []


def kill_launcher(job: Running) -> None:
    os.kill(job.pid, signal.SIGKILL)


def kill_launcher_and_forkserver(job: Running) -> None:
    forkserver = forkserver_of(job.pid)
    os.kill(job.pid, signal.SIGSTOP)  # So that it does not start another one.
    os.kill(forkserver, signal.SIGKILL)
    os.kill(job.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("kill", "start"),
    [
        (kill_launcher, "fork"),
        *in_wide((kill_launcher_and_forkserver, "exec")),
    ],
)
def test_nothing_survives_a_killed_launcher(
    stage: Stage, start: str, kill: Callable[[Running], None]
) -> None:
    options = ["--replicas", 2, "--start", start, "--"]
    with running(stage, *options, "--hold", "0:9", "--workers", 1) as job:
        job.wait_until_held(0, 2)
        kill(job)
        wait_until_nothing_is_left(stage)
        job.process.wait()
    assert run(stage, "--replicas", 1).wait() == 0


def test_a_launcher_killed_while_it_starts_leaves_nothing(stage: Stage) -> None:
    with running(stage, "--replicas", 2) as job:
        job.wait_until_said("logs in")
        wait_until(lambda: len(processes_of(stage)) > 1)
        os.kill(job.pid, signal.SIGKILL)
        job.process.wait()
        wait_until_nothing_is_left(stage)


def test_what_a_killed_rank_had_started_does_not_survive_it(stage: Stage) -> None:
    """Workers, and a process that has left the rank's process group and session."""
    options = ["--replicas", 2, "--save-interval", 0, "--", "--workers", 1]
    options += ["--at", "0:1:5:spawn", "--hold", "0:9", "--hold", "1:20"]
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        before = set(processes_of(stage))
        victim = job.pid_of(0, 1)
        kept = {job.pid, forkserver_of(job.pid)}
        os.kill(victim, signal.SIGKILL)
        job.wait_until_held(1, 2)
        wait_until(lambda: before & set(processes_of(stage)) == kept, "the end of all")
        stage.mark("go-1")
        assert job.wait() == 0
        assert processes_of(stage) == []


BACKGROUND = """
sleep 1000 & echo $! > $0/plain
setsid sleep 1000 & echo $! > $0/session
(sleep 1000 & echo $! > $0/orphan
while [ ! -e $0/marks/held-0-0 ]; do sleep 0.01; done) &
exec "$@"
"""


@pytest.mark.wide
def test_what_ran_before_the_launcher_outlives_it(stage: Stage) -> None:
    """As what an entry point puts into the background before it `exec`s."""
    before = ("bash", "-c", BACKGROUND, str(stage.root))
    with running(stage, "--replicas", 1, "--", "--hold", "0:9", before=before) as job:
        job.wait_until_held(0, 1)
        pids = {
            int((stage.root / name).read_text())
            for name in ("plain", "session", "orphan")
        }
        wait_until(lambda: all(psutil.Process(p).ppid() == job.pid for p in pids))
        stage.mark("go-0")
        assert job.wait() == 0, job.events
        assert set(processes_of(stage)) == pids


def is_held_up(job: Running) -> bool:
    """Return whether the launcher knows that rank 0 is a boundary further."""
    first, second = (each["position"] or "" for each in job.status()["members"])
    return "sample 36 " in first and "sample 30 " in second


def test_a_hang_prints_all_stacks_and_counts_as_a_crash(stage: Stage) -> None:
    options = ["--replicas", 2, "--save-interval", 0, "--", "--at", "0:1:5:hang"]
    with running(stage, *options, command=impatient(stage)) as job:
        wait_until(lambda: stage.num_delivered(1))
        since = time.monotonic()
        wait_until(lambda: stage.has("hangs-0-1") and is_held_up(job))
        wait_until(lambda: stage.committed()[-1]["number"] == 5)
        take_for_hung(stage, since)
        logs = stage.checkpoints / "logs" / "generation-0000"
        wait_until(lambda: "in act" in (logs / "rank-1.log").read_text(), "a stack")
        wait_until(lambda: "in main" in (logs / "rank-0.log").read_text(), "a stack")
        stage.mark("dumped")
        assert job.wait() == 0, job.events
        wait_until_nothing_is_left(stage)
    assert "rank 1 passed no boundary for" in job.events
    assert "restart 1 of 3 from checkpoint 5" in job.events
    for epoch in range(NUM_EPOCHS):
        assert stage.delivered(epoch=epoch) == list(range(NUM_SAMPLES))


# An `elasticrun` that waits long before a second restart.
SLOW_TO_RESTART = """
import sys
from elasticrun.__main__ import main
from elasticrun.launcher.supervisor.restart_policy import CrashHistory
delay = CrashHistory.delay
CrashHistory.delay = lambda *given, **named: 1000 * delay(*given, **named)
sys.exit(main())
"""


@pytest.mark.wide
def test_a_stop_between_two_crashes_says_what_is_kept(stage: Stage) -> None:
    assert run(stage, "--replicas", 1, "--", "--at", "0:0:5:stop").wait() == 75
    crashes = [f"--at={generation}:0:39:exit" for generation in (1, 2)]
    slow = [sys.executable, "-c", SLOW_TO_RESTART]
    with running(stage, "--replicas", 1, "--", *crashes, command=slow) as job:
        job.wait_until_said("restart 2 of 3 in 1000 s")
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait() == 143
    end = "SIGTERM: ending; checkpoint 1 is the newest; the same command resumes"
    assert end in job.events


IGNORING = """
import os, signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.wide
def test_who_ignored_the_ends_of_children_does_not_hide_them(stage: Stage) -> None:
    before = (sys.executable, "-c", IGNORING)
    options = ["--replicas", 1, "--start", "exec", "--", "--at", "0:0:5:exit"]
    job = run(stage, *options, before=before)
    assert job.wait() == 0, job.events
    assert "rank 0 exited with code 3" in job.events


@pytest.mark.wide
def test_what_keeps_a_program_from_beginning_is_shown(stage: Stage) -> None:
    site = stage.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text("import os; del os.set_inheritable")
    path = os.pathsep.join([str(site), str(REPOSITORY)])
    job = run(stage, "--replicas", 1, PYTHONPATH=path)
    assert job.wait() == 1
    assert "[0] Traceback (most recent call last):" in job.events
