"""Where a test and the replicas of a job meet: checkpoints, traces, marks and logs."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from elasticrun.checkpoint.storage.place import MANIFEST_NAME
from elasticrun.testing import read_trace, samples_of_loop

DEADLINE = 600.0


def wait_until(condition: Callable[[], Any], what: str = "it") -> None:
    """Wait for `condition`, for a time that only a hang takes.

    One that takes long itself is asked less often: who waits should not take the time
    of what is waited for.
    """
    deadline = time.monotonic() + DEADLINE
    asked = time.monotonic()
    while not condition():
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"{what} did not happen within {DEADLINE:.0f} s")
        time.sleep(min(max(0.005, 4 * (now - asked)), 0.2))
        asked = time.monotonic()


def freeze(pid: int) -> None:
    """Stop a process, and wait until it has: the signal alone may take a moment."""
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


class Stage:
    """A folder that the test and all replicas know.

    A mark is an empty file: how a script says where it is, and a test that it may go
    on.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.checkpoints = root / "checkpoints"
        self.trace = root / "trace"
        (root / "marks").mkdir(exist_ok=True)

    def variables(self, **more: object) -> dict[str, str]:
        """Return the environment of a replica that belongs here."""
        own = {
            "ELASTICRUN_CHECKPOINT_DIR": self.checkpoints,
            "ELASTICRUN_TRACE": self.trace,
            "ELASTICRUN_SAVE_INTERVAL": "off",
            "ELASTICRUN_RESCUE": "off",  # It depends on how fast the machine is.
            "ELASTICRUN_JOB": "test",
            "OMP_NUM_THREADS": "1",
        }
        return {key: str(value) for key, value in {**own, **more}.items()}

    # Marks

    def mark(self, name: str) -> None:
        (self.root / "marks" / name).touch()

    def has(self, *names: str) -> bool:
        return all((self.root / "marks" / name).exists() for name in names)

    def wait_for(self, *names: str) -> None:
        wait_until(lambda: self.has(*names), f"mark {names}")

    # What replicas print

    def keep_log(self, name: object) -> None:
        """Send what this process prints, logs and warns of to `log`; in a replica."""
        descriptor = os.open(
            self._log_path(name), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
        sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
        sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        logging.basicConfig(stream=sys.stderr, force=True)
        logger = logging.getLogger("elasticrun")
        logger.setLevel(logging.INFO)
        logger.addHandler(logging.NullHandler())  # So that they go to the root's.
        warnings.simplefilter("always")

    def log(self, name: object) -> str:
        path = self._log_path(name)
        return path.read_text() if path.exists() else ""

    def _log_path(self, name: object) -> Path:
        return self.root / f"{name}.log"

    # What became of the job

    def committed(self) -> list[dict[str, Any]]:
        """Return the manifests of the checkpoints, the oldest first."""
        paths = sorted(self.checkpoints.glob(f"checkpoint-*/{MANIFEST_NAME}"))
        return [json.loads(path.read_text()) for path in paths]

    def directories(self) -> list[str]:
        return sorted(path.name for path in self.checkpoints.glob("checkpoint-*"))

    def num_delivered(self, rank: int, *, generation: int = 0) -> int:
        """Return how many micro-batches a replica has been given."""
        path = self.trace / f"{generation}-{rank}.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0

    def samples(self, *, epoch: int = 0, loop: int = 0) -> dict[int, list[int]]:
        """Return each global batch of a loop, as it was delivered last."""
        return samples_of_loop(read_trace(self.trace), epoch=epoch, loop=loop)

    def delivered(self, *, epoch: int = 0, loop: int = 0) -> list[int]:
        """Return the samples of a loop in the order of their numbers."""
        batches = self.samples(epoch=epoch, loop=loop).values()
        return sorted(sample for batch in batches for sample in batch)

    def check_exactly_once(self, num_samples: int, *, num_epochs: int = 1) -> None:
        """Check that each epoch's one loop delivered each sample, and none again."""
        counts: list[Counter[int]] = [Counter() for _ in range(num_epochs)]
        for line in read_trace(self.trace):
            counts[line["epoch"]].update(line["indices"][: line["num_valid"]])
        assert counts == [Counter(range(num_samples))] * num_epochs
