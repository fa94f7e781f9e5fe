"""Stop signals are bytes, programs keep their handlers, workers leave them alone."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import psutil
import pytest

from elasticrun.replicas.signals import (
    STOP_SIGNALS,
    SignalPipe,
)
from tests.replicas.workers import serve_pings, wait_for_ever
from tests.support.stage import DEADLINE, wait_until


@pytest.fixture(autouse=True)
def _handlers_stay_as_they_were() -> Iterator[None]:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    yield
    after = [signal.getsignal(number) for number in STOP_SIGNALS]
    assert after == before
    wakeup_fd = signal.set_wakeup_fd(-1)
    assert wakeup_fd == -1


@pytest.fixture
def pipe() -> Iterator[SignalPipe]:
    pipe = SignalPipe()
    pipe.install()
    yield pipe
    pipe.close()


def wait_for_signals(pipe: SignalPipe) -> list[int]:
    ready, _, _ = select.select([pipe], [], [], DEADLINE)
    assert ready
    return pipe.read()


def run_python(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )


# In the replica


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_stop_signal_is_a_byte_and_interrupts_nothing(
    pipe: SignalPipe, number: int
) -> None:
    os.kill(os.getpid(), number)
    assert wait_for_signals(pipe) == [number]
    assert pipe.read() == []


def test_other_signals_and_wakes_are_not_stops(pipe: SignalPipe) -> None:
    previous = signal.signal(signal.SIGALRM, lambda *_: None)
    os.kill(os.getpid(), signal.SIGALRM)
    pipe.wake()
    assert wait_for_signals(pipe) == []
    signal.signal(signal.SIGALRM, previous)


@pytest.mark.parametrize(
    "keep",
    [
        "",
        "signal.signal(signal.SIGUSR1, lambda *_: print('own', flush=True))",
        "signal.signal(signal.SIGUSR1, signal.SIG_IGN)",
        "faulthandler.register(signal.SIGUSR1, file=2)",
    ],
)
@pytest.mark.parametrize("is_later", [False, True])
def test_a_signal_that_the_program_uses_is_no_stop(keep: str, is_later: bool) -> None:
    """But SIGTERM, which always is."""
    lines = [keep, "pipe.install()"]
    script = f"""
import faulthandler, os, select, signal
from elasticrun.replicas.signals import SignalPipe
pipe = SignalPipe()
{chr(10).join(reversed(lines) if is_later else lines)}
os.kill(os.getpid(), signal.SIGUSR1)
os.kill(os.getpid(), signal.SIGTERM)
seen = []
while 15 not in seen:
    select.select([pipe], [], [])
    seen += pipe.read()
print(seen)
"""
    result = run_python(script)
    assert result.stdout.splitlines()[-1] == ("[15]" if keep else "[10, 15]")
    assert ("own" in result.stdout) == ("own" in keep)
    assert ("most recent call" in result.stderr) == ("faulthandler" in keep)


def test_a_wake_of_a_full_pipe_does_not_wait(pipe: SignalPipe) -> None:
    for _ in range(200_000):
        pipe.wake()
    assert wait_for_signals(pipe) == []


def test_the_handler_that_the_program_had_runs_too() -> None:
    calls: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    previous = signal.signal(signal.SIGTERM, handler)
    pipe = SignalPipe()
    pipe.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_signals(pipe) == [signal.SIGTERM]
    wait_until(lambda: bool(calls))
    pipe.close()
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, previous)
    assert calls == [signal.SIGTERM]


def test_an_interrupt_that_is_ignored_stays_so() -> None:
    previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe = SignalPipe()
    try:
        pipe.install()
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait_for_signals(pipe) == [signal.SIGTERM]
        pipe.close()
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, previous)


def test_a_handler_that_the_program_sets_later_runs_and_stays(
    pipe: SignalPipe,
) -> None:
    calls: list[int] = []
    before = signal.getsignal(signal.SIGTERM)

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    signal.signal(signal.SIGTERM, handler)
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_signals(pipe) == [signal.SIGTERM]
    wait_until(lambda: bool(calls))
    pipe.uninstall()
    assert signal.getsignal(signal.SIGTERM) is handler
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    assert before is not handler


def test_outside_the_main_thread_the_signals_stay_where_they_are() -> None:
    pipe = SignalPipe()
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=pipe.install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
    pipe.close()


@pytest.mark.parametrize("closed_first", ["inner", "outer"])
def test_pipes_one_over_another_give_everything_back(closed_first: str) -> None:
    outer, inner = SignalPipe(), SignalPipe()
    outer.install()
    inner.install()
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_signals(inner) == [signal.SIGTERM]
    first, second = (inner, outer) if closed_first == "inner" else (outer, inner)
    first.close()
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_signals(second) == [signal.SIGTERM]
    second.close()


def test_a_fork_does_not_steal_the_signals_of_the_replica() -> None:
    script = """
import os, select, signal
from elasticrun.replicas.signals import SignalPipe
pipe = SignalPipe()
pipe.install()
child = os.fork()
if child == 0:
    signal.pause()
    os._exit(0)
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.WTERMSIG(status), select.select([pipe], [], [], 0)[0], flush=True)
os.kill(os.getpid(), signal.SIGTERM)
select.select([pipe], [], [])
print(pipe.read())
"""
    assert run_python(script).stdout.splitlines() == ["15 []", "[15]"]


def test_leaving_at_once_still_prints() -> None:
    script = """
from elasticrun.replicas.process_end import exit_at_once
print("last words", end="")
try:
    exit_at_once(143)
finally:
    print("never")
"""
    result = run_python(script)
    assert (result.returncode, result.stdout) == (143, "last words")


def test_leaving_at_once_does_not_wait_for_who_reads_the_output() -> None:
    script = """
import sys, threading, time
from elasticrun.replicas.process_end import exit_at_once
def print_for_ever():
    while True:
        print("x" * 4096)
threading.Thread(target=print_for_ever, daemon=True).start()
sys.stdin.readline()  # Until the pipe is full.
exit_at_once(143)
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        status = psutil.Process(process.pid)
        wait_until(lambda: _is_writing(status))
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
        assert process.wait(DEADLINE) == 143


def _is_writing(process: psutil.Process) -> bool:
    threads = Path(f"/proc/{process.pid}/task").glob("*/wchan")
    return any("pipe_w" in path.read_text() for path in threads)


# In a DataLoader worker


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def context(request: pytest.FixtureRequest) -> multiprocessing.context.BaseContext:
    if request.param == "fork" and sys.version_info >= (3, 12):
        pytest.skip("forking with threads is a warning from Python 3.12 on")
    return multiprocessing.get_context(request.param)


@pytest.mark.slow
def test_a_worker_outlives_the_signals_of_its_group(
    context: multiprocessing.context.BaseContext,
) -> None:
    here, there = context.Pipe()
    worker = context.Process(target=serve_pings, args=(there,), daemon=True)
    worker.start()
    here.send("ready")
    assert here.recv() == "ready"
    for ping in range(20):
        # By another process than its parent, which may end it.
        command = "kill -TERM $0 && kill -INT $0 && kill -USR1 $0"
        subprocess.run(["sh", "-c", command, str(worker.pid)], check=True)
        here.send(ping)
        assert here.recv() == ping
    worker.kill()
    worker.join()


def test_a_worker_ends_when_its_parent_terminates_it(
    context: multiprocessing.context.BaseContext,
) -> None:
    here, there = context.Pipe()
    worker = context.Process(target=wait_for_ever, args=(there,), daemon=True)
    worker.start()
    assert here.recv() == worker.pid
    worker.terminate()
    worker.join(DEADLINE)
    assert worker.exitcode == 0


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_stalled_worker_ends_with_a_killed_parent(method: str) -> None:
    script = f"""
import multiprocessing, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from workers import wait_for_ever
if __name__ == "__main__":
    context = multiprocessing.get_context({method!r})
    here, there = context.Pipe()
    context.Process(target=wait_for_ever, args=(there,), daemon=True).start()
    print(here.recv(), flush=True)
    sys.stdin.readline()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
        wait_until(lambda: _has_ended(worker))


def _has_ended(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_signal_comes_once_also_when_the_wake_up_descriptor_was_taken(
    pipe: SignalPipe,
) -> None:
    async def serve() -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGUSR1, lambda: None)
        loop.remove_signal_handler(signal.SIGUSR1)

    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_signals(pipe) == [signal.SIGTERM]
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    asyncio.run(serve())
    os.kill(os.getpid(), signal.SIGTERM)
    assert wait_for_signals(pipe) == [signal.SIGTERM]
    signal.set_wakeup_fd(before)
