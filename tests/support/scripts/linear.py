"""Train a small linear model, and be held, slow or dead where a test wants it.

    python linear.py STAGE [--own-group] [--hold GENERATION:BATCH] ...
                  [--kill GENERATION:RANK:BATCH] ...

A held replica waits for the marks that `hold` in tests/support/loops.py names. All
write `pid-GENERATION-RANK` when they train, and rank 0 the trained `parameters.pt`.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    generation,
    rank,
    remaining_epochs_until,
    world_size,
)
from elasticrun.replicas import stop_clock
from tests.support.loops import hold
from tests.support.stage import DEADLINE, Stage

NUM_SAMPLES = 303
BATCH_SIZE = 6
NUM_EPOCHS = 2


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("stage", type=lambda text: Stage(Path(text)))
    parser.add_argument("--own-group", action="store_true")
    parser.add_argument("--hold", action="append", default=[])
    parser.add_argument("--kill", action="append", default=[])
    return parser.parse_args()


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(NUM_SAMPLES, 4, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def main() -> None:
    options = arguments()
    stage = options.stage
    stop_clock.REPEAT_SECONDS = DEADLINE  # However late an agent passes a signal on.
    stage.keep_log(f"rank-{os.environ.get('RANK', 0)}")
    torch.manual_seed(0)
    if options.own_group:
        dist.init_process_group("gloo")
    net = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    model = AdaptiveDataParallel(net, optimizer)
    loader = AdaptiveDataLoader(data(), BATCH_SIZE, shuffle=True)
    (stage.root / f"pid-{generation()}-{rank()}").write_text(str(os.getpid()))
    for _ in remaining_epochs_until(NUM_EPOCHS):
        for inputs, targets in loader:
            if f"{generation()}:{rank()}:{loader.batch_index}" in options.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if f"{generation()}:{loader.batch_index}" in options.hold:
                hold(stage)
    if rank() == 0:
        torch.save(net.state_dict(), stage.root / "parameters.pt")
    stage.mark(f"finished-{rank()}-of-{world_size()}")
    if options.own_group:
        dist.barrier()  # The group is still the program's own.
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
