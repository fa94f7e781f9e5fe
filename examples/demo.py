"""Show that a training that is interrupted again and again ends like one that is not.

Runs examples/digits.py once in peace, then once more through three stops and a kill -9,
going on each time with another number of replicas. Then compares what both delivered,
batch by batch, and the parameters that both ended with.
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

import psutil
import torch

SCRIPT = Path(__file__).with_name("digits.py")
SAVE_INTERVAL = 2  # seconds; what a kill -9 costs at most
PATIENCE = 120  # seconds for anything that the demo waits for
TOLERANCE = 1e-4  # rounding, after 460 steps on parameters of up to about 1

Key = tuple[int, int, int]  # epoch, loop, batch
Deliveries = dict[
    Key, dict[int, list[int]]
]  # by generation, a batch's samples in order


class DemoError(Exception):
    """The demo cannot go on; the text says where, and what the replicas said."""


@dataclass(frozen=True)
class Part:
    """One generation of the job.

    Attributes:
        until: Share of all batches to deliver before the signal; None for no signal.
        target: "launcher", or the rank that gets the signal.
    """

    num_replicas: int
    until: float | None = None
    number: signal.Signals = signal.SIGTERM
    target: int | str = "launcher"

    @property
    def is_killed(self) -> bool:
        return self.until is not None and self.number == signal.SIGKILL

    @property
    def end(self) -> str:
        if self.until is None:
            return "end of the training"
        verb = "kill -9" if self.is_killed else "SIGTERM"
        return f"{verb} to {f'rank {self.target}' if self.is_rank else 'the launcher'}"

    @property
    def is_rank(self) -> bool:
        return isinstance(self.target, int)


CALM = (Part(1),)
STORMY = (
    Part(4, until=0.20, target=2),
    Part(2, until=0.45, target=1, number=signal.SIGKILL),
    Part(3, until=0.65, target="launcher"),
    Part(1, until=0.85, target=0),
    Part(2),
)


@dataclass
class Comparison:
    """What the interrupted job delivered, against the uninterrupted one."""

    num_batches: int = 0
    num_samples: int = 0
    num_redone: int = 0
    differences: list[str] = field(default_factory=list)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="elasticrun-demo-") as name:
        calm, stormy = Path(name, "calm"), Path(name, "stormy")
        print("uninterrupted", flush=True)
        run_job(calm, CALM, num_batches=0)
        expected = read_deliveries(calm / "trace")
        print("interrupted", flush=True)
        run_job(stormy, STORMY, num_batches=len(expected))
        actual = read_deliveries(stormy / "trace")
        killed = {number for number, part in enumerate(STORMY) if part.is_killed}
        return report(
            compare(expected, expected, killed=set()),
            compare(expected, actual, killed=killed),
            torch.load(calm / "result.pt"),
            torch.load(stormy / "result.pt"),
        )


def run_job(directory: Path, parts: tuple[Part, ...], *, num_batches: int) -> None:
    """Run the script through every part, with all that it writes in `directory`."""
    trace = directory / "trace"
    trace.mkdir(parents=True)
    for generation, part in enumerate(parts):
        began = time.monotonic()
        log = directory / f"{generation}.log"
        with launched(part, directory, log) as launcher:
            if part.until is not None:
                await_batches(trace, int(part.until * num_batches), launcher, log)
                find_target(part, launcher).send_signal(part.number)
            status = await_exit(launcher, log)
        if (status == 0) != (part.until is None):
            raise DemoError(f"exit status {status} after {part.end}\n{tail(log)}")
        epoch, _, batch = max(read_deliveries(trace))
        print(
            f"  {part.num_replicas} replica{'s' if part.num_replicas > 1 else ' '}"
            f"  to epoch {epoch:2}, batch {batch:2}"
            f"  {time.monotonic() - began:5.1f} s  {part.end}",
            flush=True,
        )


@contextlib.contextmanager
def launched(
    part: Part, directory: Path, log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start the replicas; leave none behind, whatever happens."""
    command = [sys.executable]
    if part.num_replicas > 1:
        command += ["-m", "torch.distributed.run", "--max-restarts", "0"]
        command += ["--nproc-per-node", str(part.num_replicas)]
        command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
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
    if part.num_replicas == 1 or not part.is_rank:
        return process
    for child in process.children():
        if child.environ().get("RANK") == str(part.target):
            return child
    raise DemoError(f"no replica of rank {part.target} is running")


def await_batches(
    trace: Path, num_batches: int, launcher: subprocess.Popen[bytes], log: Path
) -> None:
    """Wait until the job, over all generations, has delivered so many batches."""
    deadline = time.monotonic() + PATIENCE
    while len(read_deliveries(trace)) < num_batches:
        if launcher.poll() is not None or time.monotonic() > deadline:
            raise DemoError(f"never came to batch {num_batches}\n{tail(log)}")
        time.sleep(0.1)


def await_exit(launcher: subprocess.Popen[bytes], log: Path) -> int:
    """Return the exit status."""
    try:
        return launcher.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        raise DemoError(f"still running after {PATIENCE} s\n{tail(log)}") from None


def tail(log: Path) -> str:
    """Return the last lines that the replicas wrote."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-60:])


def read_deliveries(trace: Path) -> Deliveries:
    """Return what the replicas noted, each global batch put together from its ranks."""
    pieces: dict[Key, dict[int, list[tuple[int, int, list[int]]]]] = {}
    for file in trace.glob("*.jsonl"):
        for text in file.read_text().splitlines(keepends=True):
            if not text.endswith("\n"):
                continue  # being written, or cut off by the kill -9
            line = json.loads(text)
            key = (line["epoch"], line["loop"], line["batch"])
            real = line["indices"][: line["num_valid"]]
            by_generation = pieces.setdefault(key, defaultdict(list))
            by_generation[line["generation"]].append(
                (line["rank"], line["micro"], real)
            )
    return {
        key: {
            generation: [index for _, _, real in sorted(parts) for index in real]
            for generation, parts in by_generation.items()
        }
        for key, by_generation in pieces.items()
    }


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
) -> int:
    """Print both runs side by side; return the exit status."""
    ours, theirs = stormy_result["parameters"], calm_result["parameters"]
    largest = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
    rows = [
        ("", "uninterrupted", "interrupted", ""),
        (
            "samples seen",
            f"{calm.num_samples:,}",
            f"{stormy.num_samples:,}",
            f"and {stormy.num_redone:,} again after kill -9",
        ),
        (
            "batches compared",
            f"{calm.num_batches:,}",
            f"{stormy.num_batches:,}",
            f"{len(stormy.differences)} differ",
        ),
    ]
    for name in ("final", "best"):
        left, right = f"{calm_result[name]:.2%}", f"{stormy_result[name]:.2%}"
        rows.append((f"{name} accuracy", left, right, ""))
    rows.append(("largest parameter difference", "", f"{largest:.1e}", ""))
    print()
    for title, left, right, remark in rows:
        print(f"{title:28}  {left:>13}  {right:>13}  {remark}".rstrip())
    print()
    for difference in stormy.differences[:10]:
        print(difference)
    is_same = not stormy.differences and largest <= TOLERANCE
    print("The same samples, batches and model." if is_same else "The runs DIFFER.")
    return 0 if is_same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except DemoError as error:
        sys.exit(f"demo: {error}")
