"""Whatever happens at a rescaling: each sample once, and nothing is left behind."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import signal
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from subprocess import CompletedProcess
from typing import Any

import psutil
import pytest

from elasticrun.testing import read_trace, samples_of_loop
from tests.launcher.running import Running, running, wait_until_nothing_is_left
from tests.support.stage import Stage, wait_until

NUM_SAMPLES = 120
FORKSERVER = "launcher.forks.forkserver"

SCRIPT = f"""
import os, time
from pathlib import Path
from tests.support.stage import Stage

stage = Stage(Path(os.environ["LAUNCHER_TEST"]))
with (stage.root / "begun").open("a") as file:
    file.write(f"{{os.getpid()}}\\n")
stage.wait_for("prepare")
import elasticrun

loader = elasticrun.AdaptiveDataLoader(range({NUM_SAMPLES}), 6, shuffle=True)
seen = elasticrun.Variables(number=0)
for epoch in elasticrun.remaining_epochs_until(1_000_000):
    for batch in loader:
        seen.number += loader.global_batch_size
        time.sleep(0.01)  # Or the trace of it would be endless.
    assert seen.number == {NUM_SAMPLES} * (epoch + 1)
"""


class Shaken:
    """A job to which things happen while it is rescaled."""

    def __init__(
        self, stage: Stage, pool: ThreadPoolExecutor, seed: int, *options: str
    ) -> None:
        self._options = options
        self.stage = stage
        self.random = random.Random(seed)
        self._pool = pool
        self._stack = ExitStack()
        self._num_launched = 0
        self.size = 2
        stage.mark("prepare")
        (stage.root / "script.py").write_text(SCRIPT)

    def launch(self) -> None:
        self._stack.close()
        self._num_launched += 1
        options = ["--replicas", self.size, "--max-restarts", 1000, *self._options]
        self.job: Running = self._stack.enter_context(
            running(
                self.stage,
                *options,
                script=self.stage.root / "script.py",
                name=str(self._num_launched),
            )
        )

    def close(self) -> None:
        self._stack.close()

    def begun(self) -> list[int]:
        path = self.stage.root / "begun"
        return [int(pid) for pid in path.read_text().split()] if path.exists() else []

    def wait_until_trains(self) -> None:
        def trains() -> bool:
            answer = self.job.ask("status", self.job.pid, "--json")
            assert self.job.process.poll() is None, self.job.events
            if answer.returncode:  # It does not listen yet.
                return False
            (status,) = json.loads(answer.stdout)
            self.size = status["target"]
            return status["replicas"] == self.size and status["state"] == "training"

        wait_until(trains, "training")
        before = self.num_batches()
        wait_until(lambda: self.num_batches() > before, "a batch")

    def num_batches(self) -> int:
        return sum(p.read_bytes().count(b"\n") for p in self.stage.trace.iterdir())

    def rescale(self) -> None:
        """Rescale, let something else happen meanwhile, and wait for what follows."""
        if self.random.random() < 0.5:
            (self.stage.root / "marks" / "prepare").unlink()
        before = len(self.begun())
        old = [member["pid"] for member in self.job.status()["members"]]
        self.size = self.random.choice([n for n in (1, 2, 3) if n != len(old)])
        asked = self.scale(self.size)
        wait_until(
            lambda: len(self.begun()) >= before + self.size or asked.done(),
            "successors",
        )
        new = self.begun()[before:] or old
        event = self.random.choice(EVENTS)
        event(self, old, new)
        self.stage.mark("prepare")
        asked.result()
        if self.job.process.poll() is not None:
            self.launch()
        self.wait_until_trains()

    def scale(self, size: int) -> Future[CompletedProcess[str]]:
        return self._pool.submit(self.job.ask, "scale", size)


def nothing(shaken: Shaken, old: list[int], new: list[int]) -> None:
    pass


def kill_old(shaken: Shaken, old: list[int], new: list[int]) -> None:
    kill(shaken.random.choice(old))


def kill_new(shaken: Shaken, old: list[int], new: list[int]) -> None:
    kill(shaken.random.choice(new))


def kill_both(shaken: Shaken, old: list[int], new: list[int]) -> None:
    kill(shaken.random.choice(old), shaken.random.choice(new))


def kill_forkserver(shaken: Shaken, old: list[int], new: list[int]) -> None:
    for child in psutil.Process(shaken.job.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if child.pid not in {*old, *new} and FORKSERVER in " ".join(
                child.cmdline()
            ):
                kill(child.pid)


def kill_launcher(shaken: Shaken, old: list[int], new: list[int]) -> None:
    kill(shaken.job.pid)
    shaken.job.wait()
    wait_until_nothing_is_left(shaken.stage)


def scale_otherwise(shaken: Shaken, old: list[int], new: list[int]) -> None:
    size = shaken.random.choice((1, 2, 3, 4))
    asked = shaken.scale(size)
    wait_until(lambda: shaken.job.status()["target"] == size or asked.done())


def stop(shaken: Shaken, old: list[int], new: list[int]) -> None:
    """The job may stand in its script's top, which a stop does not wait for."""
    assert shaken.job.ask("stop").returncode == 0
    assert shaken.job.wait() == 75, shaken.job.events
    wait_until_nothing_is_left(shaken.stage)


def kill(*pids: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


EVENTS: list[Callable[[Shaken, list[int], list[int]], None]] = [
    nothing, kill_old, kill_new, kill_both, kill_forkserver, kill_launcher,
    scale_otherwise, stop,
]  # fmt: skip


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize(
    ("seed", "num_rounds"),
    [
        pytest.param(1, 3, marks=pytest.mark.slow),
        *(pytest.param(n, 20, marks=pytest.mark.soak) for n in range(2, 22)),
    ],
)
@pytest.mark.wide
def test_samples_come_once_whatever_happens_at_a_rescaling(
    stage: Stage, pool: ThreadPoolExecutor, seed: int, num_rounds: int
) -> None:
    shaken = Shaken(stage, pool, seed, *["--spares"] * (seed % 2))
    shaken.launch()
    try:
        shaken.wait_until_trains()
        for _ in range(num_rounds):
            shaken.rescale()
        assert shaken.job.ask("stop").returncode == 0
        assert shaken.job.wait() == 75, shaken.job.events
        wait_until_nothing_is_left(stage)
    finally:
        shaken.close()
    # Of later ones, what came before a crash may not have come again so far.
    num_epochs = stage.committed()[-1]["position"]["finished_epochs"]
    by_epoch: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for line in read_trace(stage.trace):
        by_epoch[line["epoch"]].append(line)
    for epoch in range(num_epochs):
        batches = samples_of_loop(by_epoch[epoch], epoch=epoch, loop=0).values()
        assert sorted(itertools.chain(*batches)) == list(range(NUM_SAMPLES))
