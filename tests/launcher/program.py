"""A training program that does what a test wants, at the batch where it wants it.

    program.py STAGE [--hold GENERATION:BATCH] [--at GENERATION:RANK:BATCH:ACTION] ...

A held replica waits for the marks that `hold` in tests/support/loops.py names.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

import elasticrun
from tests.support.full_disk import fail_for_space
from tests.support.loops import hold, is_stop_due
from tests.support.stage import Stage, wait_until

NUM_SAMPLES = 240
BATCH_SIZE = 6
NUM_EPOCHS = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=lambda text: Stage(Path(text)))
    parser.add_argument("--hold", action="append", default=[])
    parser.add_argument("--at", action="append", default=[])
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--pace", type=float, default=0.0)
    parser.add_argument("--elsewhere", action="store_true")
    return parser.parse_args()


def act(action: str, stage: Stage) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise ValueError("the loss is not a number")
    elif action == "exit":
        sys.exit(3)
    elif action == "leave":
        sys.exit(0)
    elif action == "hang":
        stage.mark(f"hangs-{elasticrun.generation()}-{elasticrun.rank()}")
        threading.Event().wait()
    elif action == "spawn":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    elif action == "fill":
        os.fsync = fail_for_space
    elif action == "stop":
        elasticrun.request_stop()
        wait_until(is_stop_due, "the agreement to stop")
    elif action == "await":
        wait_until(is_stop_due, "a stop")


def main() -> None:
    options = arguments()
    stage = options.stage
    if options.elsewhere:  # Not where the launcher says.
        elasticrun.init(stage.root / "own")
    data = TensorDataset(torch.arange(NUM_SAMPLES))
    loader = elasticrun.AdaptiveDataLoader(
        data, BATCH_SIZE, shuffle=True, num_workers=options.workers
    )
    here = f"{elasticrun.generation()}:{elasticrun.rank()}"
    mark = here.replace(":", "-")
    (stage.root / f"pid-{mark}").write_text(str(os.getpid()))
    for _ in elasticrun.remaining_epochs_until(NUM_EPOCHS):
        for (batch,) in loader:
            if elasticrun.world_size() > 1:
                dist.all_reduce(batch.sum())
            time.sleep(options.pace)
            for place in options.at:
                where, _, action = place.rpartition(":")
                if where == f"{here}:{loader.batch_index}":
                    act(action, stage)
            if f"{elasticrun.generation()}:{loader.batch_index}" in options.hold:
                hold(stage)
    print(f"finished with {elasticrun.world_size()}")


if __name__ == "__main__":
    main()
