"""Show that a training that is interrupted again and again ends like one that is not.

Runs examples/digits.py once in peace, then once more while it is rescaled, killed with
-9, rescaled, stopped and started again. Then compares what both delivered, sample by
sample, and the parameters that both ended with.
"""

from __future__ import annotations

import contextlib
import json
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

import torch

from elasticrun.testing import read_trace

SCRIPT = Path(__file__).with_name("digits.py")
ELASTICRUN = [sys.executable, "-m", "elasticrun"]
EXIT_STOPPED = 75
NUM_SAMPLES = (1439, 358)  # in an epoch's two loops: training digits, held-out digits
SAVE_INTERVAL = 2  # seconds; what a kill -9 costs at most
PATIENCE = 240  # seconds for anything that the demo waits for
ACCURACY = 0.97
TOLERANCE = 1e-4  # rounding, after 460 steps, on parameters of up to about 1

Key = tuple[int, int, int]  # epoch, loop, batch
Deliveries = dict[Key, dict[int, list[int]]]  # a batch's samples, by generation


class DemoError(Exception):
    """The demo cannot go on; the text says where."""


@dataclass(frozen=True)
class Interruption:
    """What happens to the job, and when.

    Attributes:
        after: Share of all batches that is delivered first.
        kind: "scale", "kill" or "stop".
        number: Of replicas to scale to, of the rank to kill, of replicas to start with.
    """

    after: float
    kind: str
    number: int


NUM_REPLICAS = 4  # at the start
STORM = (
    Interruption(0.1, "scale", 2),
    Interruption(0.28, "kill", 1),
    Interruption(0.35, "scale", 3),
    Interruption(0.6, "stop", 1),
)
KILLED = {1}  # generations, by number


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
        print("1. Uninterrupted, 1 replica", flush=True)
        with launched(calm, 1, shown=False) as launcher:
            await_exit(launcher, 0)
        expected = read_deliveries(calm)
        print(f"2. The same training, {NUM_REPLICAS} replicas, interrupted", flush=True)
        run_through_storm(stormy, len(expected))
        actual = read_deliveries(stormy)
        print()
        print_generations(stormy)
        status = report(
            compare(expected, expected, killed=set()),
            compare(expected, actual, killed=KILLED),
            torch.load(calm / "result.pt"),
            torch.load(stormy / "result.pt"),
            repeated=repeated_samples(expected),
        )
    print(f"({time.monotonic() - began:.0f} s)")
    return status


def run_through_storm(directory: Path, num_batches: int) -> None:
    """Run the job to its end, with all interruptions on its way."""
    num_replicas, rest = NUM_REPLICAS, list(STORM)
    while True:
        with launched(directory, num_replicas, shown=True) as launcher:
            while rest:
                event = rest.pop(0)
                await_batches(directory, int(event.after * num_batches), launcher)
                if event.kind == "scale":
                    command(launcher, "scale", str(event.number))
                elif event.kind == "kill":
                    kill(launcher, rank=event.number)
                else:
                    command(launcher, "stop")
                    num_replicas = event.number
                    break
            else:
                await_exit(launcher, 0)
                return
            await_exit(launcher, EXIT_STOPPED)


@contextlib.contextmanager
def launched(
    directory: Path, num_replicas: int, *, shown: bool
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the job; leave nothing of it behind, whatever happens."""
    (directory / "trace").mkdir(parents=True, exist_ok=True)
    arguments = ["run", "--replicas", str(num_replicas), "--name", "digits"]
    arguments += ["--checkpoint-dir", str(directory / "checkpoints")]
    arguments += ["--save-interval", str(SAVE_INTERVAL)]
    arguments += [str(SCRIPT), "--output", str(directory / "result.pt")]
    if shown:
        say(f"elasticrun run --replicas {num_replicas} examples/digits.py")
    launcher = subprocess.Popen(
        [*ELASTICRUN, *arguments],
        env={
            **os.environ,
            "ELASTICRUN_TRACE": str(directory / "trace"),
            "ELASTICRUN_RESCUE": "off",  # Or it would hang on the machine's speed.
        },
        stdout=None if shown else subprocess.DEVNULL,
        stderr=None if shown else subprocess.DEVNULL,
    )
    try:
        yield launcher
    finally:
        launcher.kill()  # Nothing survives it.
        launcher.wait()


def command(launcher: subprocess.Popen[bytes], *arguments: str) -> None:
    """Give a command from "another shell"."""
    say(" ".join(["elasticrun", *arguments]))
    subprocess.run(
        [*ELASTICRUN, *arguments, str(launcher.pid)],
        stdout=subprocess.DEVNULL,
        timeout=PATIENCE,
        check=True,
    )


def kill(launcher: subprocess.Popen[bytes], *, rank: int) -> None:
    """Kill one replica."""
    shown = subprocess.run(
        [*ELASTICRUN, "status", "--json", str(launcher.pid)],
        stdout=subprocess.PIPE,
        check=True,
    )
    (job,) = json.loads(shown.stdout)
    (pid,) = [member["pid"] for member in job["members"] if member["rank"] == rank]
    say(f"kill -9 {pid}    # rank {rank}")
    os.kill(pid, signal.SIGKILL)


def say(line: str) -> None:
    """Show what is typed, on a line of its own even beside a live display."""
    print(f"\r\x1b[K$ {line}" if sys.stdout.isatty() else f"$ {line}", flush=True)


def await_batches(
    directory: Path, num_batches: int, launcher: subprocess.Popen[bytes]
) -> None:
    """Wait until the job, over all generations, has delivered so many batches."""
    deadline = time.monotonic() + PATIENCE
    while len(read_deliveries(directory)) < num_batches:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise DemoError(f"the job never came to batch {num_batches}")
        time.sleep(0.2)


def await_exit(launcher: subprocess.Popen[bytes], expected: int) -> None:
    """Wait for the job's end."""
    code = launcher.wait(PATIENCE)
    if code != expected:
        raise DemoError(f"exit code {code} instead of {expected}")


def print_generations(directory: Path) -> None:
    """Print what each generation did."""
    deliveries = read_deliveries(directory)
    sizes = {
        line["generation"]: line["world_size"]
        for line in read_trace(directory / "trace")
    }
    for number, size in sorted(sizes.items()):
        own = sorted(key for key, by in deliveries.items() if number in by)
        replicas = f"{size} replica{'s' if size > 1 else ''}"
        print(
            f"generation {number}  {replicas:10}  {place(own[0])} to {place(own[-1])}"
        )


def place(key: Key) -> str:
    """Return where a batch stands: each epoch has two loops, over train and valid."""
    epoch, loop, batch = key
    return f"epoch {epoch:2} {('train', 'valid')[loop]} batch {batch:2}"


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
