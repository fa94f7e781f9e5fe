"""`scale`, `status`, `stop` and `logs`, while the job runs."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from subprocess import CompletedProcess

import psutil
import pytest

from elasticrun.testing import read_trace
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    ELASTICRUN,
    PROGRAM,
    elasticrun,
    processes_of,
    run,
    running,
    variables,
    wait_until_nothing_is_left,
)
from tests.launcher.test_starting import scaled
from tests.support.stage import Stage, freeze, wait_until

pytestmark = pytest.mark.slow


def sizes(stage: Stage) -> dict[int, int]:
    return {line["generation"]: line["world_size"] for line in read_trace(stage.trace)}


def test_scaling_loses_nothing_and_costs_no_restart(stage: Stage) -> None:
    options = ["--replicas", 2, "--max-restarts", 0, "--"]
    options += ["--hold", "0:9", "--hold", "1:19", "--hold", "2:39", "--workers", 1]
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        more = scaled(job, 3)
        assert more.stdout == (
            "rescaling from 2 to 3 replicas\ngeneration 1 trains with 3 replicas\n"
        )
        job.wait_until_held(1, 3)
        fewer = scaled(job, 1, "test", held=1)
        assert fewer.returncode == 0, fewer.stderr
        job.wait_until_held(2, 1)
        same = job.ask("scale", 1, job.pid)
        assert same.stdout == "the job has 1 replicas already\n"
        status = job.status()
        stage.mark("go-2")
        assert job.wait() == 0, job.events
        wait_until_nothing_is_left(stage)
    assert sizes(stage) == {0: 2, 1: 3, 2: 1}
    assert (status["replicas"], status["restarts"]) == (1, 0)
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_scaling_that_comes_before_training_is_not_lost(stage: Stage) -> None:
    holds = ["--hold", "0:9", "--hold", "1:19"]
    with running(stage, "--replicas", 1, "--", *holds) as job:
        job.wait_until_said("logs in")
        wait_until(lambda: job.ask("status").stdout.startswith("test"))
        answer = scaled(job, 2)  # Held if that came too late.
        assert answer.returncode == 0, answer.stderr
        for generation in (0, 1):
            stage.mark(f"go-{generation}")
        assert job.wait() == 0
    assert list(sizes(stage).values())[-1] == 2
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


SLOW_ONCE = """
import pathlib, sys, threading
mark = pathlib.Path(sys.argv[1], "began")
if not mark.exists():
    mark.touch()
    threading.Event().wait()
from tests.launcher.program import main
main()
"""


def test_scaling_does_not_wait_for_a_script_that_only_starts(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(SLOW_ONCE)
    options = ["--replicas", 1, "--max-restarts", 0, "--grace", 1000, "--", stage.root]
    with running(stage, *options, script=script) as job:
        wait_until((stage.root / "began").exists)
        answer = job.ask("scale", 2)
        # It "runs" where a machine is so slow that it makes its job much later.
        assert re.search("generation 0 (trains|runs) with 2 replicas", answer.stdout)
        assert job.wait() == 0, job.events
        wait_until_nothing_is_left(stage)
    assert sizes(stage) == {0: 2}  # Number 0 was not taken: nothing had begun.
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_a_rescaling_that_could_not_save_is_no_crash(stage: Stage) -> None:
    options = ["--replicas", 1, "--max-restarts", 0, "--grace", 0.5, "--"]
    with running(stage, *options, "--hold", "0:9", "--hold", "1:9") as job:
        job.wait_until_held(0, 1)
        assert job.ask("scale", 2).returncode == 0
        job.wait_until_said("no boundary came within 0.5 s of a rescaling")
        job.wait_until_held(1, 2)
        assert job.status()["restarts"] == 0
        stage.mark("go-1")
        assert job.wait() == 0, job.events


def test_bounds_are_kept(stage: Stage) -> None:
    with running(stage, "--replicas", "1:2", "--", "--hold", "0:3") as job:
        wait_until(lambda: stage.has("held-0-0"))
        refused = job.ask("scale", 3)
        assert refused.returncode == 4
        assert "3 replicas is outside of 1 to 2" in refused.stderr
        nonsense = job.ask("scale", 0)
        assert nonsense.returncode == 4
        assert "0 replicas: give a number from 1 up" in nonsense.stderr


def test_stop_saves_and_the_same_command_goes_on(stage: Stage) -> None:
    with running(stage, "--replicas", 2, "--", "--hold", "0:9") as job:
        job.wait_until_held(0, 2)
        stage.mark("stop-0")
        answer = job.ask("stop")
        assert answer.stdout == "saving and ending\nended\n"
        assert job.wait() == 75
        assert "stopped; checkpoint 1 is saved" in job.events
        wait_until_nothing_is_left(stage)
    assert run(stage, "--replicas", 1).wait() == 0
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


@pytest.mark.parametrize("request_", ["stop", "scale", "none"])
def test_a_last_save_that_failed_is_told(stage: Stage, request_: str) -> None:
    options = ["--replicas", 2, "--", "--at", "0:0:3:fill", "--hold", "0:9"]
    lost = "the last save failed, as rank 0 says in its log: everything is lost"
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        with ThreadPoolExecutor() as pool:
            if request_ != "none":
                size = [1] if request_ == "scale" else []
                answer = pool.submit(job.ask, request_, *size)
                state = "stopping" if request_ == "stop" else "rescaling"
                wait_until(lambda: job.status()["state"] == state)
            stage.mark("go-0" if request_ == "none" else "stop-0")
        code = job.wait()
    if request_ == "stop":
        assert (answer.result().returncode, code) == (4, 75)
        assert lost in answer.result().stderr
        assert f"stopped; {lost}; the same command goes on" in job.events
    elif request_ == "scale":
        assert (answer.result().returncode, code) == (0, 0)
        assert lost in answer.result().stdout
        assert re.search(f"generation 0 ended at .*; {lost}", job.events)
    else:
        assert code == 0
        assert f"; {lost}" in job.events
        again = run(stage, "--replicas", 1)
        assert again.wait() == 0
        assert "generation 1: 1 replica started" in again.events
    assert "No space left on device" in job.events


def test_a_stop_that_saved_nothing_is_told_from_one_that_did(stage: Stage) -> None:
    options = ["--replicas", 1, "--grace", 0.5, "--", "--hold", "0:9"]
    with running(stage, *options) as job:
        job.wait_until_held(0, 1)
        answer = job.ask("stop")
        assert answer.returncode == 4
        assert answer.stdout == "saving and ending\n"
        assert "stopped without a new checkpoint: no boundary came" in answer.stderr
        assert job.wait() == 75


REPORTS_LATE = """
import json, threading
from tests.launcher.program import arguments, main

real = json.dumps

def dumps(value, **options):
    if threading.current_thread().name == "elasticrun-reporter":
        if (value.get("generation"), elasticrun.rank()) == (1, 1):
            arguments().stage.wait_for("report")
    return real(value, **options)

import elasticrun
json.dumps = dumps
main()
"""


def test_who_scales_again_waits_for_the_new_number(stage: Stage) -> None:
    """Before the old generation has ended, and while the new one starts."""
    script = stage.root / "script.py"
    script.write_text(REPORTS_LATE)
    holds = ["--hold", "0:9", "--hold", "1:19"]
    options = ["--replicas", 2, "--", stage.root, *holds]
    with running(stage, *options, script=script) as job, ThreadPoolExecutor() as pool:

        def scale(before: int, after: int) -> Future[CompletedProcess[str]]:
            asked = pool.submit(job.ask, "scale", after)
            job.wait_until_said(f"from {before} to {after} replicas")
            return asked

        job.wait_until_held(0, 2)
        overruled = scale(2, 3)
        unchanged = scale(3, 4)
        refused = overruled.result()
        changed = scale(4, 3)
        refused_too = unchanged.result()
        stage.mark("stop-0")
        wait_until(lambda: stage.has("held-1-0", "held-1-1", "held-1-2"))
        last = scale(3, 2)
        refused_last = changed.result()
        stage.mark("report")
        stage.mark("stop-1")
        answer = last.result()
        assert job.wait() == 0, job.events
    for each, asked, size in (
        (refused, 3, 4),
        (refused_too, 4, 3),
        (refused_last, 3, 2),
    ):
        assert each.returncode == 4
        assert f"goes on with {size} replicas, not {asked}" in each.stderr
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.endswith("generation 2 trains with 2 replicas\n")
    assert sizes(stage) == {0: 2, 1: 3, 2: 2}
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_scaling_a_script_that_makes_no_job_returns(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with running(stage, "--replicas", 1, "--start", "exec", script=script) as job:
        job.wait_until_said("1 replica started")
        answer = job.ask("scale", 2)
        assert answer.returncode == 0, answer.stderr
        assert answer.stdout.endswith(
            "runs with 2 replicas; its program has not made a job so far\n"
        )


REPORTS_FAIL = """
import json, threading
from tests.launcher.program import main

real = json.dumps

def dumps(value, **options):
    if threading.current_thread().name == "elasticrun-reporter" and value["index"]:
        raise KeyError("no such thing")
    return real(value, **options)

json.dumps = dumps
main()
"""


def test_a_stop_gets_through_where_reports_fail(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(REPORTS_FAIL)
    options = ["--replicas", 1, "--", stage.root, "--hold", "0:0"]
    with running(stage, *options, "--at", "0:0:1:await", script=script) as job:
        job.wait_until_held(0, 1)
        stage.mark("go-0")
        job.wait_until_said("the launcher is not told where this replica is")
        assert job.ask("stop").stdout == "saving and ending\nended\n"
        assert job.wait() == 75
    assert "stopped; checkpoint 1 is saved" in job.events


SWALLOWS_ITS_STOP = """
from tests.launcher.program import main
try:
    main()
except:
    pass
"""


def test_a_program_that_swallows_its_stop_has_not_finished(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text(SWALLOWS_ITS_STOP)
    options = ["--replicas", 1, "--", stage.root, "--hold", "0:0"]
    with running(stage, *options, script=script) as job:
        job.wait_until_held(0, 1)
        stage.mark("stop-0")
        assert job.ask("stop").stdout == "saving and ending\nended\n"
        assert job.wait() == 75
    assert "stopped; checkpoint 1 is saved; the same command goes on" in job.events


def test_status_says_where_the_job_is(stage: Stage) -> None:
    assert elasticrun(stage, "status").stdout == "no job of this user is running\n"
    options = ["--replicas", 2, "--save-interval", 0]
    with running(stage, *options, "--", "--hold", "0:10") as job:
        job.wait_until_held(0, 2)
        wait_until(lambda: job.status()["index"] == 60)
        wait_until(lambda: job.status()["checkpoint"] == 10)
        status = job.status()
        text = job.ask("status", "test").stdout
        other = job.ask("status", "other")
        stage.mark("go-0")
        assert job.wait() == 0
    assert (other.returncode, other.stdout) == (3, "")
    assert other.stderr == "elasticrun: no job 'other' is running\n"
    assert status["job"] == "test"
    assert status["pid"] == job.pid
    assert status["state"] == "training"
    assert (status["epoch"], status["num_samples"]) == (0, NUM_SAMPLES)
    assert (status["generation"], status["checkpoint"]) == (0, 10)
    assert 0 <= status["seconds_since_checkpoint"] < 600
    assert status["checkpoint_dir"] == str(stage.checkpoints)
    assert [each["pid"] for each in status["members"]] == [
        job.pid_of(0, 0),
        job.pid_of(0, 1),
    ]
    assert all(each["memory"] > 1e6 for each in status["members"])
    assert text.startswith(f"test ({job.pid}): training, 2 replicas, generation 0\n")
    assert "epoch 0, loop 0, sample 60" in text


def test_a_program_without_boundaries_is_told_so(stage: Stage) -> None:
    script = stage.root / "train.py"
    script.write_text(
        "import itertools, torch\n"
        "from elasticrun import AdaptiveDataLoader, register\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])\n"
        "register(optimizer=optimizer)\n"
        "for _ in itertools.cycle(AdaptiveDataLoader(torch.zeros(2))):\n"
        "    optimizer.step()\n"
    )
    why = "times since the last boundary, outside of any loop over an Adaptive"
    with running(stage, script=script, ELASTICRUN_GRACE=0.5) as job:
        wait_until(lambda: why in job.events)
        wait_until(lambda: why in (job.status()["no_boundary"] or ""))
        assert why in job.ask("status").stdout
        job.process.terminate()
        job.wait()
    assert f"{why}DataLoader): exiting without a new checkpoint" in job.events


def test_logs_are_kept_by_generation_and_rank(stage: Stage) -> None:
    options = ["--replicas", 2, "--save-interval", 0, "--"]
    run(stage, *options, "--at", "0:1:5:raise")
    kept = stage.checkpoints
    newest = elasticrun(stage, "logs", kept)
    assert newest.stdout.endswith("[0] finished with 2\n[1] finished with 2\n")
    assert elasticrun(stage, "logs", kept, "--rank", 1).stdout.count("finished") == 1
    before = elasticrun(stage, "logs", kept, "--generation", 0, "--rank", 1)
    assert "ValueError: the loss is not a number\n" in before.stdout
    missing = elasticrun(stage, "logs", kept, "--generation", 7)
    assert missing.returncode == 3
    assert "generations: 0 (ranks 0, 1), 1 (ranks 0, 1)" in missing.stderr


def test_logs_of_a_running_job_come_before_a_folder_of_its_name(stage: Stage) -> None:
    (stage.root / "test").mkdir()
    script = stage.root / "script.py"
    script.write_text("import time; print('up', flush=True); time.sleep(1000)")
    with running(stage, "--replicas", 1, script=script) as job:
        wait_until(lambda: "up" in job.output)
        assert job.ask("logs", "test").stdout == "[0] up\n"
    assert job.ask("logs", stage.checkpoints).stdout == "[0] up\n"
    assert "has no such log" in job.ask("logs", "test").stderr


def test_logs_can_be_followed_to_the_end(stage: Stage) -> None:
    with running(stage, "--replicas", 1, "--", "--hold", "0:3") as job:
        job.wait_until_held(0, 1)
        stage.mark("go-0")
        followed = job.ask("logs", "-f")
    assert followed.returncode in (0, 3)  # 3: it had ended before it was asked.
    assert followed.returncode == 3 or followed.stdout == "[0] finished with 1\n"


def test_two_jobs_of_one_name_are_told_apart(stage: Stage) -> None:
    options = ["--replicas", 1, "--checkpoint-dir"]
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with (
        running(stage, *options, stage.root / "a", script=script) as first,
        running(stage, *options, stage.root / "b", script=script) as second,
    ):
        wait_until(lambda: first.ask("status").stdout.count("test (") == 2)
        unclear = first.ask("stop")
        assert unclear.returncode == 3
        assert f"test ({first.pid})" in unclear.stderr
        assert f"test ({second.pid})" in unclear.stderr
        assert first.ask("stop", second.pid).returncode == 0
        assert second.wait() == 75
        assert first.process.poll() is None


def test_a_second_job_is_kept_out_of_a_live_directory(stage: Stage) -> None:
    """Also while no replica holds the lock: before the first one, or between two."""
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with running(stage, "--replicas", 1, script=script) as job:
        claim = stage.checkpoints / "launcher.lock"
        wait_until(lambda: claim.exists() and claim.read_text())
        for more in ([], ["--fresh"], ["--name", "other"]):
            refused = elasticrun(stage, "run", *more, script)
            assert refused.returncode == 2
            assert refused.stdout == ""
            [line] = refused.stderr.splitlines()
            assert f"a live job uses {stage.checkpoints} (process {job.pid} on" in line
        job.process.kill()  # A claim ends with its launcher.
        job.process.wait()
        assert run(stage, "--replicas", 1, "--fresh").wait() == 0
    assert stage.checkpoints.with_name("checkpoints.old-1").exists()


def test_a_job_that_was_started_otherwise_is_respected(stage: Stage) -> None:
    program = [sys.executable, PROGRAM, stage.root, "--hold", "0:3"]
    with subprocess.Popen(program, env=variables(stage)) as other:
        wait_until(lambda: stage.has("held-0-0"))
        refused = elasticrun(stage, "run", "--replicas", 1, PROGRAM, stage.root)
        assert refused.returncode == 2
        assert f"(process {other.pid} on" in refused.stderr
        stage.mark("go-0")
    assert other.returncode == 0


def test_the_socket_is_the_users_alone_and_takes_no_nonsense(stage: Stage) -> None:
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    with running(stage, "--replicas", 1, script=script) as job:
        folder = stage.root / "runtime" / "elasticrun"
        path = folder / f"{job.pid}.sock"
        wait_until(path.exists)
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        for nonsense in (b"x" * 20_000 + b"\n", b"[1]\n", b"{\n", b"[" * 5000 + b"\n"):
            with socket.socket(socket.AF_UNIX) as caller:
                connect(caller, path)
                caller.sendall(nonsense)
                assert "refused" in json.loads(caller.makefile().readline())["error"]
        for request, text in (
            ({"type": "exec"}, "no request"),
            ({"type": "scale", "replicas": "2"}, "no number"),
        ):
            with socket.socket(socket.AF_UNIX) as caller:
                connect(caller, path)
                caller.sendall(json.dumps(request).encode() + b"\n")
                assert text in json.loads(caller.makefile().readline())["error"]
        assert job.ask("status").returncode == 0
        with socket.socket(socket.AF_UNIX) as caller:
            connect(caller, path)
            caller.sendall(b'{"type": "status"}\n' * 33)
            assert "more than 32 requests" in caller.makefile().readline()
        shutil.rmtree(folder)  # As at a logout, or by a cleaner of temporary files.
        wait_until(path.exists)
        assert job.ask("status", job.pid).returncode == 0
        folder.chmod(0o755)
        refused = job.ask("status")
        assert refused.returncode == 4
        assert "must be yours with mode 700" in refused.stderr
    folder.chmod(0o700)
    path.touch()  # What a killed launcher leaves, or worse.
    assert elasticrun(stage, "status").stdout == "no job of this user is running\n"


def test_a_job_is_found_where_another_shell_would_have_put_it(stage: Stage) -> None:
    """One with XDG_RUNTIME_DIR, one without, and each is seen from both."""
    temporary = stage.root / "t"
    temporary.mkdir()
    script = stage.root / "script.py"
    script.write_text("import time; time.sleep(1000)")
    own = variables(stage, TMPDIR=temporary, XDG_RUNTIME_DIR="")
    with running(
        stage, "--replicas", 1, script=script, TMPDIR=temporary, XDG_RUNTIME_DIR=""
    ) as job:
        path = temporary / f"elasticrun-{os.getuid()}" / f"{job.pid}.sock"
        wait_until(path.exists)
        for environment in (own, variables(stage, TMPDIR=temporary)):
            shown = subprocess.run(
                [*ELASTICRUN, "status", str(job.pid), "--json"],
                env=environment,
                capture_output=True,
                check=True,
            )
            assert json.loads(shown.stdout)["pid"] == job.pid


@pytest.mark.parametrize("problem", ["mode 755", "a link"])
def test_a_place_without_sockets_is_refused_before_anything_starts(
    stage: Stage, problem: str
) -> None:
    runtime = stage.root / "runtime"
    runtime.mkdir()
    (runtime / "elasticrun").mkdir(mode=0o755)
    if problem == "a link":
        (runtime / "elasticrun").rmdir()
        (runtime / "elasticrun").symlink_to(runtime)
    with running(
        stage, "--replicas", 1, script=__file__, XDG_RUNTIME_DIR=runtime
    ) as job:
        assert job.wait() == 2
    line = job.events.splitlines()[-1]
    assert line.startswith(f"elasticrun: {runtime}/elasticrun ")
    assert "set XDG_RUNTIME_DIR" in line
    assert "Traceback" not in job.events


def test_on_one_machine_nothing_listens_but_on_loopback(stage: Stage) -> None:
    options = ["--replicas", 2, "--", "--hold", "0:9", "--workers", 1]
    with running(stage, *options) as job:
        job.wait_until_held(0, 2)
        listening = [
            ipaddress.ip_address(connection.laddr.ip)
            for pid in processes_of(stage)
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        stage.mark("go-0")
        assert job.wait() == 0
    assert listening  # The stores, and gloo.
    for address in listening:
        plain = getattr(address, "ipv4_mapped", None) or address
        assert plain.is_loopback, listening


def connect(caller: socket.socket, path: Path) -> None:
    """Connect by a short path: a socket takes no long one."""
    folder = os.open(path.parent, os.O_RDONLY)
    caller.connect(f"/proc/self/fd/{folder}/{path.name}")
    os.close(folder)


def test_the_launcher_is_small_and_hears_signals_before_requests(stage: Stage) -> None:
    with running(stage, "--replicas", 2, "--", "--hold", "0:9") as job:
        job.wait_until_held(0, 2)
        with open(f"/proc/{job.pid}/status") as file:
            [resident] = [line for line in file if line.startswith("VmRSS:")]
        assert int(resident.split()[1]) < 60 * 1024
        with open(f"/proc/{job.pid}/maps") as file:
            assert "libtorch" not in file.read()
        with socket.socket(socket.AF_UNIX) as caller:
            connect(caller, stage.root / "runtime" / "elasticrun" / f"{job.pid}.sock")
            freeze(job.pid)
            caller.sendall(b'{"type": "status"}\n' * 32)
            os.kill(job.pid, signal.SIGTERM)
            os.kill(job.pid, signal.SIGCONT)
            answers = caller.makefile()
            for _ in range(32):  # The signal comes before the first of them.
                assert json.loads(answers.readline())["state"] == "stopping"
        stage.mark("stop-0")
        assert job.wait() == 143
