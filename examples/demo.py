"""Show that a training that is interrupted again and again ends like one that is not.

Runs examples/digits.py once in peace, then once more through three stops and a kill -9,
going on each time with another number of replicas. Then compares what both delivered,
sample by sample, and the parameters that both ended with.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

from elasticrun.testing import read_trace

SCRIPT = Path(__file__).with_name("digits.py")
NUM_SAMPLES = (1439, 358)  # in an epoch's two loops: training digits, held-out digits
SAVE_INTERVAL = 2  # seconds; what a kill -9 costs at most
PATIENCE = 240  # seconds for anything that the demo waits for
ACCURACY = 0.97
TOLERANCE = 1e-4  # rounding, after 460 steps, on parameters of up to about 1

Key = tuple[int, int, int]  # epoch, loop, batch
Deliveries = dict[Key, dict[int, list[int]]]  # a batch's samples, by generation


class DemoError(Exception):
    """The demo cannot go on; the text says where, and what the replicas said."""


@dataclass(frozen=True)
class Part:
    """One generation of the job.

    Attributes:
        until: Share of all batches to deliver before the signal; None for no signal.
        target: The rank that gets the signal; None for the launcher.
    """

    num_replicas: int
    until: float | None = None
    number: signal.Signals = signal.SIGTERM
    target: int | None = None

    @property
    def is_killed(self) -> bool:
        return self.until is not None and self.number == signal.SIGKILL

    @property
    def end(self) -> str:
        if self.until is None:
            return "ran to the end"
        verb = "kill -9" if self.is_killed else "SIGTERM"
        return f"{verb} to " + (
            "the launcher" if self.target is None else f"rank {self.target}"
        )


CALM = (Part(1),)
STORMY = (
    Part(4, until=0.22, target=2),
    Part(2, until=0.46, target=1, number=signal.SIGKILL),
    Part(3, until=0.67),
    Part(1, until=0.86, target=0),
    Part(2),
)


@dataclass
class Comparison:
    """What a job delivered, against the uninterrupted one."""

    num_batches: int = 0
    num_samples: int = 0
    num_redone: int = 0
    differences: list[str] = field(default_factory=list)


def main() -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elasticrun-demo-") as name:
        calm, stormy = Path(name, "calm"), Path(name, "stormy")
        print("1. Uninterrupted", flush=True)
        run_job(calm, CALM, num_batches=0)
        expected = read_deliveries(calm)
        print("2. The same training, interrupted", flush=True)
        run_job(stormy, STORMY, num_batches=len(expected))
        killed = {number for number, part in enumerate(STORMY) if part.is_killed}
        status = report(
            compare(expected, expected, killed=set()),
            compare(expected, read_deliveries(stormy), killed=killed),
            torch.load(calm / "result.pt"),
            torch.load(stormy / "result.pt"),
            repeated=repeated_samples(expected),
        )
    print(f"({time.monotonic() - began:.0f} s)")
    return status


def run_job(directory: Path, parts: tuple[Part, ...], *, num_batches: int) -> None:
    """Run the script through every part, with all that it writes in `directory`."""
    (directory / "trace").mkdir(parents=True)
    for generation, part in enumerate(parts):
        began = time.monotonic()
        log = directory / f"{generation}.log"
        with launched(part, directory, log) as launcher:
            if part.until is not None:
                await_batches(directory, int(part.until * num_batches), launcher, log)
                find_target(part, launcher).send_signal(part.number)
            status = await_exit(launcher, log)
        if (status == 0) != (part.until is None):
            raise DemoError(f"exit status {status} after {part.end}\n{tail(log)}")
        own = [
            key for key, by in read_deliveries(directory).items() if generation in by
        ]
        first, last = min(own), max(own)
        replicas = f"{part.num_replicas} replica{'s' if part.num_replicas > 1 else ''}"
        print(
            f"   {replicas:10}  {place(first)} to {place(last)}"
            f"  {time.monotonic() - began:5.1f} s  {part.end}",
            flush=True,
        )


def place(key: Key) -> str:
    """Return where a batch stands: each epoch has two loops, over train and valid."""
    epoch, loop, batch = key
    return f"epoch {epoch:2} {('train', 'valid')[loop]} batch {batch:2}"


@contextlib.contextmanager
def launched(
    part: Part, directory: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the replicas; leave none behind, whatever happens."""
    command = [sys.executable]
    if part.num_replicas > 1:
        command += ["-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", str(part.num_replicas)]
    command += [str(SCRIPT), "--checkpoint-dir", str(directory / "checkpoints")]
    command += ["--output", str(directory / "result.pt")]
    environment = {
        **os.environ,
        "ELASTICRUN_TRACE": str(directory / "trace"),
        "ELASTICRUN_SAVE_INTERVAL": str(SAVE_INTERVAL),
        "OMP_NUM_THREADS": "1",
    }
    with log.open("wb") as output:
        launcher = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT
        )
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            for process in psutil.Process(launcher.pid).children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            launcher.kill()
            launcher.wait()


def find_target(part: Part, launcher: subprocess.Popen[bytes]) -> psutil.Process:
    """Return the process that gets the signal; one replica alone has no launcher."""
    process = psutil.Process(launcher.pid)
    if part.num_replicas == 1 or part.target is None:
        return process
    for child in process.children():
        if child.environ().get("RANK") == str(part.target):
            return child
    raise DemoError(f"no replica of rank {part.target} is running")


def await_batches(
    directory: Path, num_batches: int, launcher: subprocess.Popen[bytes], log: Path
) -> None:
    """Wait until the job, over all generations, has delivered so many batches."""
    deadline = time.monotonic() + PATIENCE
    while len(read_deliveries(directory)) < num_batches:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise DemoError(f"never came to batch {num_batches}\n{tail(log)}")
        time.sleep(0.2)


def await_exit(launcher: subprocess.Popen[bytes], log: Path) -> int:
    """Return the exit status."""
    try:
        return launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise DemoError(f"still running after {PATIENCE} s\n{tail(log)}") from None


def tail(log: Path) -> str:
    """Return the last lines that the replicas wrote."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-60:])


def read_deliveries(directory: Path) -> Deliveries:
    """Return what the replicas noted, each global batch put together from its ranks."""
    lines = read_trace(directory / "trace")
    result: Deliveries = defaultdict(lambda: defaultdict(list))
    for line in sorted(lines, key=lambda line: (line["rank"], line["micro"])):
        key = (line["epoch"], line["loop"], line["batch"])
        real = line["indices"][: line["num_valid"]]
        result[key][line["generation"]] += real
    return result


def repeated_samples(deliveries: Deliveries) -> list[str]:
    """Return the loops that did not deliver each sample of their data set once."""
    loops: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (epoch, loop, _), by_generation in deliveries.items():
        for samples in by_generation.values():
            loops[epoch, loop] += samples
    return [
        f"epoch {epoch}, loop {loop}: not every sample once"
        for (epoch, loop), samples in loops.items()
        if sorted(samples) != list(range(NUM_SAMPLES[loop]))
    ]


def compare(
    expected: Deliveries, actual: Deliveries, *, killed: set[int]
) -> Comparison:
    """Compare every batch's last delivery; only a kill -9 excuses an earlier one."""
    result = Comparison(num_batches=len(actual))
    for key in sorted(expected.keys() | actual.keys()):
        name = "epoch {}, loop {}, batch {}".format(*key)
        *earlier, (_, last) = sorted(actual.get(key, {-1: []}).items())
        (wanted,) = expected.get(key, {0: []}).values()
        result.num_samples += len(last)
        result.num_redone += sum(len(samples) for _, samples in earlier)
        if last != wanted:
            result.differences.append(f"{name}: {last} instead of {wanted}")
        for generation, _ in earlier:
            if generation not in killed:
                result.differences.append(
                    f"{name}: again after generation {generation}"
                )
    return result


def report(
    calm: Comparison,
    stormy: Comparison,
    calm_result: dict[str, Any],
    stormy_result: dict[str, Any],
    *,
    repeated: list[str],
) -> int:
    """Print both runs side by side; return the exit status."""
    ours, theirs = stormy_result["parameters"], calm_result["parameters"]
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    accuracies = [result["final"] for result in (calm_result, stormy_result)]
    again = f"each once an epoch; {stormy.num_redone:,} again after the kill -9"
    differ = f"{len(stormy.differences)} differ in a sample or its place"
    rows = [
        ("", "uninterrupted", "interrupted", ""),
        ("samples seen", f"{calm.num_samples:,}", f"{stormy.num_samples:,}", again),
        ("batches compared", f"{calm.num_batches}", f"{stormy.num_batches}", differ),
        ("final accuracy", *(f"{a:.2%}" for a in accuracies), "on held-out digits"),
        ("largest parameter difference", "", f"{largest:.1e}", "rounding"),
    ]
    print()
    for title, left, right, remark in rows:
        print(f"{title:28}  {left:>13}  {right:>11}  {remark}".rstrip())
    print()
    problems = [*repeated, *stormy.differences]
    if largest > TOLERANCE:
        problems.append(f"the parameters differ by {largest:.1e}")
    if min(accuracies) < ACCURACY:
        problems.append(f"the accuracy is below {ACCURACY:.0%}")
    for problem in problems[:10]:
        print(problem)
    print("DIFFERENT." if problems else "The same samples, batches and model.")
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        sys.exit(f"demo: {error}")
