"""Measure restarts of the digits example: request or death to first batch; JSON lines.

    python benchmarks/rescale.py [--rounds 10] \
        [--only elasticrun|prepared|torchrun|launcher]

"First batch" is the first one that rank 0 of the new generation is given. A request to
scale is timed from the call in a program that is connected to the launcher, and as the
command `elasticrun scale`, whose interpreter starts first. torchrun restarts after a
`kill -9` by itself; to rescale, it is stopped and started again. A pause is from the
last batch of the old generation to the first one of the new, of a script that prepares
itself for some seconds before that, or compiles a model.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
from machine import report

from elasticrun.launcher.talk.client import find_job

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
ELASTICRUN = [sys.executable, "-m", "elasticrun"]
SLEEPING = "import time; time.sleep({})"
COMPILING = """
import torch
compiled = torch.compile(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()))
compiled(torch.randn(8, 64)).sum().backward()
"""
PREPARATIONS = {
    **{
        f"{seconds} s of preparation": SLEEPING.format(seconds)
        for seconds in (0, 3, 10)
    },
    "a compiled model": COMPILING,
}
DEADLINE = 120.0
EPOCHS = 100_000


class Job:
    """The example under a launcher, in a folder of its own."""

    def __init__(self, folder: Path, preparation: str = "") -> None:
        self.folder = folder
        self.script = DIGITS
        if preparation:
            self.script = folder / "script.py"
            run = f"import runpy; runpy.run_path({str(DIGITS)!r}, run_name='__main__')"
            self.script.write_text(f"{preparation}\n{run}\n")
        self.variables = {
            **os.environ,
            "ELASTICRUN_CHECKPOINT_DIR": str(folder / "checkpoints"),
            "ELASTICRUN_TRACE": str(folder / "trace"),
            "ELASTICRUN_SAVE_INTERVAL": "0.3",
            "XDG_RUNTIME_DIR": str(folder),
        }

    def start(self, command: list[str]) -> psutil.Popen:
        with open(self.folder / "log", "ab") as log:
            return psutil.Popen(
                [*command, str(self.script), "--epochs", str(EPOCHS)],
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def newest(self) -> int:
        """The newest generation that has been given a batch, -1 before the first."""
        names = [path.stem.split("-") for path in (self.folder / "trace").glob("*-0.*")]
        return max((int(generation) for generation, _ in names), default=-1)

    def begun(self, generation: int) -> bool:
        path = self.folder / "trace" / f"{generation}-0.jsonl"
        return path.exists() and path.stat().st_size > 0

    def checkpoint(self) -> str:
        found = sorted((self.folder / "checkpoints").glob("checkpoint-*/manifest.json"))
        return str(found[-1]) if found else ""

    def wait_until_steady(self) -> None:
        """Wait for a checkpoint, which refills the crash budget, and a second more.

        The launcher then has done what it does after a start, beside the training.
        """
        before = self.checkpoint()
        wait_until(lambda: self.checkpoint() != before)
        time.sleep(1.0)

    def seconds_to_next(self, request: Callable[[], object]) -> tuple[float, bool]:
        """Return the seconds to the next first batch, and whether no start failed."""
        generation = self.newest + 1
        begin = time.perf_counter()
        request()
        wait_until(lambda: self.newest >= generation and self.begun(self.newest))
        return time.perf_counter() - begin, self.newest == generation

    def pause(self, request: Callable[[], object]) -> tuple[float, bool]:
        """Return the seconds without a batch, and whether no start failed."""
        before = self.newest
        request()
        wait_until(lambda: self.newest > before and self.begun(self.newest))
        first = time.time()
        last = max(
            path.stat().st_mtime
            for path in (self.folder / "trace").glob(f"{before}-*.jsonl")
        )
        return first - last, self.newest == before + 1

    def ask(self, *arguments: str) -> None:
        subprocess.Popen(
            [*ELASTICRUN, *arguments], env=self.variables, stdout=subprocess.DEVNULL
        )


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("it did not happen; is the machine very busy?")
        time.sleep(0.001)


@contextlib.contextmanager
def job_of(
    command: list[str], preparation: str = ""
) -> Iterator[tuple[Job, psutil.Popen]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = Job(Path(folder), preparation)
        process = job.start(command)
        try:
            wait_until(lambda: job.begun(0))
            yield job, process
        finally:
            kill_tree(process)


def kill_tree(process: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def kill_a_rank(process: psutil.Popen) -> None:
    """Kill the newest child: a replica, for the forkserver is older."""
    children = sorted(
        process.children(), key=lambda each: (each.create_time(), each.pid)
    )
    children[-1].send_signal(signal.SIGKILL)


def measure_elasticrun(rounds: int) -> None:
    command = [*ELASTICRUN, "run", "--replicas", "2", "--max-restarts", "1"]
    with job_of(command) as (job, process):
        requested, typed, killed = [], [], []
        os.environ["XDG_RUNTIME_DIR"] = job.variables["XDG_RUNTIME_DIR"]
        for _ in range(rounds):
            job.wait_until_steady()
            with find_job(None) as launcher:
                request = launcher.scale(3)
                requested.append(job.seconds_to_next(lambda: next(request)))  # noqa: B023
            job.wait_until_steady()
            typed.append(job.seconds_to_next(lambda: job.ask("scale", "2")))
            job.wait_until_steady()
            killed.append(job.seconds_to_next(lambda: kill_a_rank(process)))
        tell("scale, requested", "elasticrun", requested)
        tell("scale, typed", "elasticrun", typed)
        tell("kill -9", "elasticrun", killed)


def measure_prepared(rounds: int) -> None:
    command = [*ELASTICRUN, "run", "--replicas", "2"]
    for what, preparation in PREPARATIONS.items():
        with job_of(command, preparation) as (job, process):
            os.environ["XDG_RUNTIME_DIR"] = job.variables["XDG_RUNTIME_DIR"]
            scaled = []
            for number in range(rounds):
                job.wait_until_steady()
                with find_job(str(process.pid)) as launcher:
                    request = launcher.scale((3, 2)[number % 2])
                    scaled.append(job.pause(lambda: next(request)))  # noqa: B023
        tell(f"pause at scale, {what}", "elasticrun", scaled)
        with job_of([*command, "--spares"], preparation) as (job, process):
            os.environ["XDG_RUNTIME_DIR"] = job.variables["XDG_RUNTIME_DIR"]
            killed = []
            for _ in range(rounds):
                job.wait_until_steady()
                wait_until(lambda: status_of(process)["spares"] == 2)
                pid = status_of(process)["members"][1]["pid"]
                killed.append(job.pause(lambda: os.kill(pid, signal.SIGKILL)))  # noqa: B023
        tell(f"pause at kill -9 with spares, {what}", "elasticrun", killed)


def status_of(process: psutil.Popen) -> dict[str, Any]:
    with find_job(str(process.pid)) as launcher:
        return launcher.status


def measure_torchrun(rounds: int) -> None:
    def command(size: int) -> list[str]:
        options = ["--standalone", "--max-restarts=1000", f"--nproc-per-node={size}"]
        return [sys.executable, "-m", "torch.distributed.run", *options]

    with job_of(command(2)) as (job, process):
        killed = []
        for _ in range(rounds):
            job.wait_until_steady()
            killed.append(job.seconds_to_next(lambda: kill_a_rank(process)))
        tell("kill -9", "torchrun", killed)
    with job_of(command(2)) as (job, process):
        scaled = []
        for number in range(rounds):
            job.wait_until_steady()

            def relaunch() -> None:
                nonlocal process
                process.terminate()
                process.wait()
                process = job.start(command((3, 2)[number % 2]))  # noqa: B023

            scaled.append(job.seconds_to_next(relaunch))
        kill_tree(process)
        tell("scale", "torchrun stopped and started", scaled)


def tell(what: str, launcher: str, runs: list[tuple[float, bool]]) -> None:
    seconds = [run[0] for run in runs]
    report(
        "restart_to_first_batch",
        what=what,
        launcher=launcher,
        median_seconds=round(statistics.median(seconds), 3),
        worst_seconds=round(max(seconds), 3),
        rounds=len(runs),
        first_generation_worked=sum(run[1] for run in runs),
    )


def measure_launcher(rounds: int) -> None:
    """What the launcher itself costs, and how long the command line takes."""
    with job_of([*ELASTICRUN, "run", "--replicas", "2"]) as (job, process):
        before, begin = sum(process.cpu_times()[:2]), time.perf_counter()
        time.sleep(10.0)
        used = sum(process.cpu_times()[:2]) - before
        share = used / (time.perf_counter() - begin)
        script = Path(sys.executable).with_name("elasticrun")
        report(
            "launcher",
            memory_mib=round(process.memory_info().rss / 2**20, 1),
            forkserver_mib=round(forkserver_of(process).memory_info().rss / 2**20, 1),
            cpu_percent_of_a_core=round(100 * share, 2),
            seconds={
                name: statistics.median(
                    seconds_of([str(script), name], job) for _ in range(rounds)
                )
                for name in ("--help", "status")
            },
        )


def forkserver_of(process: psutil.Process) -> psutil.Process:
    """Return the launcher's oldest child; replicas share most of its pages."""
    return min(process.children(), key=lambda child: child.create_time())


def seconds_of(command: list[str], job: Job) -> float:
    begin = time.perf_counter()
    subprocess.run(command, env=job.variables, capture_output=True, check=True)
    return round(time.perf_counter() - begin, 3)


MEASURES = {
    "launcher": measure_launcher,
    "elasticrun": measure_elasticrun,
    "prepared": measure_prepared,
    "torchrun": measure_torchrun,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", choices=MEASURES)
    options = parser.parse_args()
    for name, measure in MEASURES.items():
        if options.only in (None, name):
            measure(options.rounds)


if __name__ == "__main__":
    main()
