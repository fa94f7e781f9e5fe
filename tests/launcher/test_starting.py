"""What happens when no replica can be started any more."""

from __future__ import annotations

import contextlib
import os
import select
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from subprocess import CompletedProcess

import psutil
import pytest

from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.forks import starter as starter_module
from elasticrun.launcher.forks.starter import ForkserverClient
from elasticrun.launcher.forks.waiting import ForkedReplica
from tests.launcher.program import NUM_EPOCHS, NUM_SAMPLES
from tests.launcher.running import (
    REPOSITORY,
    forkserver_of,
    running,
)
from tests.support.stage import DEADLINE, Stage, freeze, wait_until
from tests.support.variants import in_wide

pytestmark = pytest.mark.slow

Answer = Future[CompletedProcess[str]]

# Once there is a mark, the forkserver ends at an import, or can fork no more: at all,
# or for a while after some forks, and only once there is another mark.
SITE = """
import errno, os, sys, time
if "forkserver" in "".join(sys.orig_argv):
    marks, breaks_at = os.environ["MARKS"], os.environ["BREAKS_AT"]
    fork = os.fork

    def is_broken():
        return os.path.exists(os.path.join(marks, "broken"))

    def fork_if_possible():
        is_possible = breaks_at != "fork"
        if breaks_at.isdecimal() and is_broken():
            with open(os.path.join(marks, "forks"), "a+") as forks:
                is_possible = not int(breaks_at) <= forks.tell() < int(breaks_at) + 4
                forks.write(".")
            while not is_possible and not os.path.exists(os.path.join(marks, "fail")):
                time.sleep(0.005)
        if is_broken() and not is_possible:
            raise BlockingIOError(errno.EAGAIN, "no more processes")
        return fork()

    class Broken:
        @staticmethod
        def find_spec(name, path=None, target=None):
            if name == breaks_at and is_broken():
                os._exit(1)

    os.fork = fork_if_possible
    sys.meta_path.insert(0, Broken)
"""


def breaking(stage: Stage, breaks_at: str) -> dict[str, str]:
    site = stage.root / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    return {
        "PYTHONPATH": f"{site}{os.pathsep}{REPOSITORY}",
        "MARKS": str(stage.root / "marks"),
        "BREAKS_AT": breaks_at,
    }


def test_a_job_that_trains_is_not_ended_by_that(stage: Stage) -> None:
    options = ["--replicas", 1, "--start", "exec", "--", "--hold", "0:9"]
    where = "elasticrun.launcher.forks.forkserver"
    with running(stage, *options, **breaking(stage, where)) as job:
        job.wait_until_held(0, 1)
        stage.mark("broken")
        os.kill(forkserver_of(job.pid), signal.SIGKILL)
        job.wait_until_said("The job goes on with 1 replica")
        stage.mark("go-0")
        assert job.wait() == 0, job.events
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


def test_forks_that_fail_are_not_tried_for_ever(stage: Stage) -> None:
    options = ["--replicas", 1, "--start", "exec", "--", "--hold", "0:9"]
    with running(stage, *options, **breaking(stage, "fork")) as job:
        job.wait_until_held(0, 1)
        stage.mark("broken")
        answer = job.ask("scale", 2)
        assert answer.returncode == 4
        assert "ended 3 times before it forked a replica" in answer.stderr
        assert "The job goes on with 1 replica" in answer.stderr
        status = job.status()
        assert (status["state"], status["target"]) == ("training", 1)
        stage.mark("go-0")
        assert job.wait() == 0, job.events
    assert "generation 1" not in job.events
    stage.check_exactly_once(NUM_SAMPLES, num_epochs=NUM_EPOCHS)


# Each replica is forked from a process that is forked for that.
@pytest.mark.parametrize(
    ("size", "num_forks", "has_ended"),
    [(2, 2, True), *in_wide((5, 5, False))],
)
def test_a_rescaling_that_fails_halfway_goes_on_with_the_old_size(
    stage: Stage, size: int, num_forks: int, has_ended: bool
) -> None:
    options = ["--replicas", 1, "--start", "exec", "--", "--hold", "0:9"]
    with running(stage, *options, **breaking(stage, str(num_forks))) as job:
        job.wait_until_held(0, 1)
        pid = job.pid_of(0, 0)
        stage.mark("broken")
        forks = stage.root / "marks" / "forks"
        with ThreadPoolExecutor() as pool:
            answer = pool.submit(job.ask, "scale", "--force", size)
            wait_until(lambda: forks.exists() and len(forks.read_text()) > num_forks)
            if has_ended:
                os.kill(pid, signal.SIGKILL)
                wait_until(lambda: not psutil.pid_exists(pid))
            stage.mark("fail")
            assert answer.result().returncode == 4
        assert "The job goes on with 1 replica" in answer.result().stderr
        stage.mark("go-0")
        assert job.wait() == 0, job.events
    assert ("generation 1: 1 replica started" in job.events) == has_ended
    for epoch in range(NUM_EPOCHS):
        assert stage.delivered(epoch=epoch) == list(range(NUM_SAMPLES))


@pytest.mark.parametrize("where", ["_START_SECONDS", "_FORK_SECONDS"])
def test_a_forkserver_that_does_not_answer_is_replaced(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """One that is stopped, as it starts or when it is asked for a replica."""
    loop, said, forked = EventLoop(), list[str](), list[ForkedReplica]()

    def set_patience(seconds: float) -> None:
        monkeypatch.setattr(starter_module, where, seconds)

    def say(text: str) -> None:
        said.append(text)
        set_patience(DEADLINE)  # Another one may take longer on a busy machine.

    for name in ("_START_SECONDS", "_FORK_SECONDS"):
        monkeypatch.setattr(starter_module, name, DEADLINE)
    starter = ForkserverClient(loop, is_exec=True, say=say, on_failure=say)

    def wait_for_replica() -> None:
        starter.fork(1, forked.extend)
        while not (forked or "no replica" in "".join(said)):
            loop.run_once()

    if where == "_FORK_SECONDS":
        starter.start()
        wait_for_replica()
        forked.pop().discard()
        set_patience(2.0)
    else:
        set_patience(2.0)
        starter.start()
    [first] = starter.pids
    freeze(first)
    wait_for_replica()
    forked.pop().discard()
    starter.close()
    [text] = said
    assert text.startswith("the forkserver has not answered for 2 s (stopped, or an")
    assert not psutil.pid_exists(first)


def held_by(pid: int) -> list[str]:
    """Return the pipes and sockets of a replica that waits, by their descriptors."""
    process = psutil.Process(pid)
    # Only its own are to have come into its interpreter, which imports modules by now.
    wait_until(lambda: "launcher.replica.main" in "".join(process.cmdline()))
    ports = {each.fd: each.laddr.port for each in process.net_connections("tcp")}
    held = []
    for descriptor in sorted(map(int, os.listdir(f"/proc/{pid}/fd"))):
        with contextlib.suppress(FileNotFoundError):  # A module's file.
            name = os.readlink(f"/proc/{pid}/fd/{descriptor}")
            port = ports.get(descriptor, "unix")
            held.append(f"port {port}" if name.startswith("socket:") else name)
    return [name for name in held if name.startswith(("pipe:", "port "))]


def test_each_of_many_replicas_has_ends_of_its_own() -> None:
    """Each is forked with its own, and ends when it is hung up on."""
    loop, forked, size = EventLoop(), list[ForkedReplica](), 3
    starter = ForkserverClient(loop, is_exec=True, say=print, on_failure=pytest.fail)
    starter.outward = "127.0.0.2"  # So that the first one listens twice.
    with contextlib.closing(starter):
        starter.start()
        starter.fork(size, forked.extend)
        while not forked:
            loop.run_once()
        assert [each.rank for each in forked] == list(range(size))
        assert [len(each.ports) for each in forked] == [2] + [0] * (size - 1)
        for each in forked:
            outputs = [f"pipe:[{os.fstat(output).st_ino}]" for output in each.outputs]
            ports = [f"port {port}" for port in ("unix", *each.ports)]
            assert held_by(each.pid) == [*outputs, *ports]
        running = [os.pidfd_open(each.pid) for each in forked]
        for each in reversed(forked):
            each.channel.close()
            ended, _, _ = select.select(running, [], [], DEADLINE)
            assert ended == [running.pop()]
            os.close(*ended)
            for output in each.outputs:
                os.set_blocking(output, False)
                assert os.read(output, 1) == b""  # No other replica has its end of it.
                os.close(output)


NO_FORKSERVER = """
import subprocess

class Popen(subprocess.Popen):
    def __init__(self, command, **options):
        if "forkserver" in "".join(map(str, command)):
            raise OSError("no more processes")
        super().__init__(command, **options)

subprocess.Popen = Popen
"""


def test_that_no_replica_can_be_started_is_said_once(stage: Stage) -> None:
    path = breaking(stage, "")["PYTHONPATH"]
    (stage.root / "site" / "sitecustomize.py").write_text(NO_FORKSERVER)
    with running(stage, "--replicas", 1, PYTHONPATH=path) as job:
        assert job.wait() == 1
    assert job.events.count("no replica can be started: no more processes") == 1
