"""A training program whose workers share tensors by files, or are spawned.

It is held in its third batch, until the marks of `hold` in tests/support/loops.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import multiprocessing
from torch.utils.data import Dataset

import elasticrun
from tests.support.loops import hold
from tests.support.stage import Stage


class Large(Dataset[torch.Tensor]):
    """Samples that are too large to be sent by value."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((100_000,), float(index))


def share_by_files(worker: int) -> None:
    multiprocessing.set_sharing_strategy("file_system")


def main() -> None:
    stage = Stage(Path(os.environ["LAUNCHER_TEST"]))
    generation = elasticrun.generation()
    loader = elasticrun.AdaptiveDataLoader(
        Large(),
        4,
        num_workers=1,
        worker_init_fn=None if generation == 0 else share_by_files,
        multiprocessing_context="spawn" if generation == 0 else "fork",
    )
    here = f"{generation}-{elasticrun.rank()}"
    (stage.root / f"pid-{here}").write_text(str(os.getpid()))
    for _ in elasticrun.remaining_epochs_until(1):
        for number, _batch in enumerate(loader):
            if number == 2:
                hold(stage)


if __name__ == "__main__":
    main()
