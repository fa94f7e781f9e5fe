"""Measure restarts of the digits example; JSON lines.

    python benchmarks/rescale.py [--rounds 2] [--only NAME ...]

The example runs as people's scripts do: one that sets a variable, imports scikit-learn
and a module of its own, and prepares itself for 0 or 3 s. Four things are measured,
of elasticrun, of elasticrun with `--spares`, and of torchrun:

- `scale`, as a command: the pause between the last old and the first new batch, of the
  first one after a start apart, whose old replicas have had none before them;
- the time from the start of that command to the first new batch;
- `kill -9` of a replica to the next batch;
- `kill -9` of everything, and the same command, to the next batch.

"First batch" is the first one that rank 0 of the new generation is given. Spares wait
before a replica is killed. What a kill costs is told in steps, too: those that were
trained again. torchrun restarts after a `kill -9` by itself; to rescale, it is stopped
and started again. With 2 rounds all of that takes about 8 minutes.

By name only: what the `launcher` itself costs; `rescue`, the same kill with one, where
checkpoints every 0.3 s, as all else has them, are not needed; and `state-MIB`, the
pause of a `scale` with so much state, a third in a module, the rest in its optimizer:
left in the system's memory, and beside it forced to the disk first. The largest one
needs 64 GiB.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from machine import report

from elasticrun.launcher.control.jobs import find_job

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
ELASTICRUN = [sys.executable, "-m", "elasticrun"]
SCRIPT = """
import os
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import sklearn.datasets
import own
own.prepare({preparation})
import runpy
runpy.run_path({digits!r}, run_name="__main__")
"""
OWN = """
import time

def prepare(seconds):
    time.sleep(seconds)
"""
STATE = """
import torch
from torch.utils.data import TensorDataset
import elasticrun
large = torch.nn.ParameterList(
    torch.ones({mebibytes} * 2**18 // 3 // 16) for _ in range(16)
)
adam = torch.optim.Adam(large.parameters(), lr=0.0)
for each in large:
    each.grad = torch.zeros_like(each)
adam.step()
adam.zero_grad()
if {is_forced}:
    from elasticrun.checkpoint.storage.local import LocalStorage
    LocalStorage.unforced = lambda self: self
elasticrun.init(save_interval="off")
net = torch.nn.Linear(8, 1)
sgd = torch.optim.SGD(net.parameters(), lr=0.01)
model = elasticrun.AdaptiveDataParallel(net, sgd)
elasticrun.register(large=large, adam=adam)
data = TensorDataset(torch.ones(4096, 8), torch.ones(4096, 1))
loader = elasticrun.AdaptiveDataLoader(data, batch_size=8)
for _ in elasticrun.remaining_epochs_until(100_000):
    for x, y in loader:
        sgd.zero_grad()
        (model(x) - y).square().mean().backward()
        sgd.step()
"""
CALM_SECONDS = 8.0
KILL_ALL = "kill -9 of everything, and the same command"
DEADLINE = 120.0
EPOCHS = 100_000


class Restart(NamedTuple):
    """One restart.

    Attributes:
        seconds: From the request, or the death, to the first batch.
        pause: From the last batch before it.
        is_first_try: Whether no generation in between came to no batch.
        steps_lost: Trained before it, and again after it.
    """

    seconds: float
    pause: float
    is_first_try: bool
    steps_lost: int


class Job:
    """The example under a launcher, in a folder of its own."""

    def __init__(
        self, folder: Path, preparation: int, rescue: str, train: str | None
    ) -> None:
        self.folder = folder
        self.script = folder / "script.py"
        text = SCRIPT.format(preparation=preparation, digits=str(DIGITS))
        self.script.write_text(train or text)
        (folder / "own.py").write_text(OWN)
        self.variables = {
            **os.environ,
            "ELASTICRUN_CHECKPOINT_DIR": str(folder / "checkpoints"),
            "ELASTICRUN_TRACE": str(folder / "trace"),
            "ELASTICRUN_SAVE_INTERVAL": "0.3",
            "ELASTICRUN_RESCUE": rescue,
            "TMPDIR": str(folder),
        }

    def start(self, command: list[str]) -> psutil.Popen:
        with open(self.folder / "log", "ab") as log:
            self.process = psutil.Popen(
                [*command, str(self.script), "--epochs", str(EPOCHS)],
                env=self.variables,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        return self.process

    def start_again(
        self, command: list[str], end: Callable[[psutil.Popen], object]
    ) -> None:
        end(self.process)
        self.start(command)

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

    def restart(self, request: Callable[[], object]) -> Restart:
        before, begin = self.newest, time.time()
        request()
        wait_until(lambda: self.newest > before and self.begun(self.newest))
        first = time.time()
        last = max(
            path.stat().st_mtime
            for path in (self.folder / "trace").glob(f"{before}-*.jsonl")
        )
        is_first_try = self.newest == before + 1
        lost = self.steps_lost(before, self.newest)
        return Restart(first - begin, first - last, is_first_try, lost)

    def steps_lost(self, before: int, after: int) -> int:
        """Count the steps that ended in one generation and were made in another."""

        def steps(generation: int, rank: int) -> list[tuple[int, int, int]]:
            path = self.folder / "trace" / f"{generation}-{rank}.jsonl"
            if not path.exists():  # There was one replica.
                return []
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            return [(each["epoch"], each["loop"], each["batch"]) for each in lines]

        first = steps(after, 0)[0]
        begun = max((steps(before, rank) for rank in (0, 1)), key=len)
        return max(0, sum(each >= first for each in begun) - 1)  # One was under way.

    def status(self, process: psutil.Popen) -> dict[str, Any]:
        os.environ["TMPDIR"] = self.variables["TMPDIR"]
        with find_job(str(process.pid)) as launcher:
            return launcher.status

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
    command: list[str], preparation: int, rescue: str = "off", train: str | None = None
) -> Iterator[tuple[Job, psutil.Popen]]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        job = Job(Path(folder), preparation, rescue, train)
        process = job.start(command)
        try:
            wait_until(lambda: job.begun(0))
            yield job, process
        finally:
            kill_tree(job.process)


def kill_tree(process: psutil.Popen) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        for each in [*process.children(recursive=True), process]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
    process.wait()


def kill_a_rank(process: psutil.Popen) -> None:
    """Kill the newest child of torchrun: a replica."""
    children = process.children()
    max(children, key=lambda each: (each.create_time(), each.pid)).kill()


def kill_with_spares(job: Job, process: psutil.Popen) -> Restart:
    job.wait_until_steady()
    status = job.status(process)
    wait_until(lambda: job.status(process)["spares"] == status["target"])
    pid = job.status(process)["members"][1]["pid"]
    return job.restart(functools.partial(os.kill, pid, signal.SIGKILL))


def elasticrun(size: int, *options: str) -> list[str]:
    return [*ELASTICRUN, "run", "--replicas", str(size), *options]


def torchrun(size: int) -> list[str]:
    options = ["--standalone", "--max-restarts=1000", f"--nproc-per-node={size}"]
    return [sys.executable, "-m", "torch.distributed.run", *options]


def measure(
    launcher: str, command: Callable[[int], list[str]], preparation: int, rounds: int
) -> None:
    """Measure all of one launcher, with one job."""
    is_torchs, sizes = launcher == "torchrun", itertools.cycle((3, 2))

    def scale() -> Restart:
        job.wait_until_steady()
        size = next(sizes)
        if is_torchs:
            return restart_all(command(size), terminate)
        return job.restart(functools.partial(job.ask, "scale", str(size)))

    def kill() -> Restart:
        if not is_torchs:
            return kill_with_spares(job, job.process)
        job.wait_until_steady()
        return job.restart(functools.partial(kill_a_rank, job.process))

    def kill_all() -> Restart:
        job.wait_until_steady()
        return restart_all(command(2), kill_tree)

    def restart_all(
        command: list[str], end: Callable[[psutil.Popen], object]
    ) -> Restart:
        return job.restart(functools.partial(job.start_again, command, end))

    with job_of(command(2), preparation) as (job, _):
        for what, restart, times in (
            ("scale, the first after a start", scale, 1),
            ("scale", scale, rounds),
            (KILL_ALL, kill_all, rounds),
            ("kill -9", kill, rounds),
        ):
            tell(what, launcher, [restart() for _ in range(times)], preparation)


def measure_state(mebibytes: int, rounds: int) -> None:
    """Measure the pause of a `scale` from two replicas to one, and back."""
    for is_forced in (False, True):
        train = STATE.format(mebibytes=mebibytes, is_forced=is_forced)
        restarts = []
        with job_of(elasticrun(2), 0, train=train) as (job, _):
            for size in itertools.islice(itertools.cycle((1, 2)), rounds):
                time.sleep(CALM_SECONDS)
                request = functools.partial(job.ask, "scale", str(size))
                restarts.append(job.restart(request))
        launcher = "elasticrun" + ", forced to the disk" * is_forced
        tell(f"scale, {mebibytes} MiB of state", launcher, restarts, 0)


def measure_rescue(rounds: int) -> None:
    with job_of(elasticrun(2), 0, "always") as (job, process):
        killed = [kill_with_spares(job, process) for _ in range(rounds)]
    tell("kill -9, rescued", "elasticrun", killed, 0)


def terminate(process: psutil.Popen) -> None:
    process.terminate()
    process.wait()


def tell(what: str, launcher: str, restarts: list[Restart], preparation: int) -> None:
    seconds = [restart.seconds for restart in restarts]
    pauses = [restart.pause for restart in restarts]
    lost = [restart.steps_lost for restart in restarts]
    report(
        "restart_to_first_batch",
        what=what,
        preparation=str(preparation),
        launcher=launcher,
        median_seconds=round(statistics.median(seconds), 3),
        worst_seconds=round(max(seconds), 3),
        median_pause=round(statistics.median(pauses), 3),
        worst_pause=round(max(pauses), 3),
        mean_steps_lost=round(statistics.mean(lost), 1),
        worst_steps_lost=max(lost),
        rounds=len(restarts),
        first_generation_worked=sum(restart.is_first_try for restart in restarts),
    )


def measure_launcher(rounds: int) -> None:
    """What the launcher itself costs, and how long the command line takes."""
    with job_of(elasticrun(2), 0) as (job, process):
        wait_until(lambda: job.status(process)["spares"] == 2)
        before, begin = sum(process.cpu_times()[:2]), time.perf_counter()
        time.sleep(10.0)
        used = sum(process.cpu_times()[:2]) - before
        share = used / (time.perf_counter() - begin)
        script = Path(sys.executable).with_name("elasticrun")
        report(
            "launcher",
            memory_mib=round(process.memory_info().rss / 2**20, 1),
            forkserver_mib=round(forkserver_of(process).memory_info().rss / 2**20, 1),
            spares_mib=round(job.status(process)["spare_memory"] / 2**20, 1),
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


FOUR: dict[str, Callable[[int], None]] = {
    f"{name}-{seconds}": functools.partial(measure, launcher, command, seconds)
    for seconds in (0, 3)
    for name, launcher, command in (
        ("elasticrun", "elasticrun", elasticrun),
        ("spares", "elasticrun --spares", lambda size: elasticrun(size, "--spares")),
        ("torchrun", "torchrun", torchrun),
    )
}
STATES = {
    f"state-{mebibytes}": functools.partial(measure_state, mebibytes)
    for mebibytes in (1, 1024, 8192)
}
MEASURES = {**FOUR, **STATES, "launcher": measure_launcher, "rescue": measure_rescue}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", nargs="+", choices=MEASURES, default=[*FOUR])
    options = parser.parse_args()
    for name in options.only:
        MEASURES[name](options.rounds)


if __name__ == "__main__":
    main()
