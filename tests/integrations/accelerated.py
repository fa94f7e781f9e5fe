"""A script that trains with Accelerate, bare and elastic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, TensorDataset

from elasticrun import AdaptiveDataLoader, Variables, init, remaining_epochs_until
from elasticrun.integrations.accelerate import prepare
from tests.support.foreign import Batches

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 23, 6, 2
NUM_BATCHES = 4  # In an epoch: of 6, 6, 6 and 5 samples.
ACCUMULATED = 3  # And the fourth by itself.


def nothing(count: Any) -> None:
    """Let the batch be."""


def unchanged(data: Any) -> Any:
    return data


@dataclass
class Script:
    """Trains with accumulation, clipping and a schedule.

    Attributes:
        on_batch: Called in each batch with the `Variables`.
        data: What is made of the data.
        init_first: Whether the job starts before the Accelerator is made.
    """

    directory: str = ""
    on_batch: Callable[[Any], None] = nothing
    save_interval: float | str = "off"
    accumulated: int = ACCUMULATED
    precision: str = "no"
    max_local_batch_size: int | None = None
    data: Callable[[Any], Any] = unchanged
    init_first: bool = True

    def __call__(self) -> dict[str, Any]:
        """Run in a replica of its own."""
        if self.init_first:
            init(self.directory, save_interval=self.save_interval, async_save=False)
        return self.run()

    def run(self) -> dict[str, Any]:
        self._make()
        train = AdaptiveDataLoader(
            self.data(TensorDataset(self.x)),
            BATCH_SIZE,
            shuffle=True,
            max_local_batch_size=self.max_local_batch_size,
        )
        self.model, self.optimizer, self.scheduler = prepare(
            self.accelerator, self.net, self.optimizer, self.scheduler
        )
        count = Variables(batches=0, log=[])
        for _ in remaining_epochs_until(NUM_EPOCHS):
            for (x,) in train:
                self._train(x, count)
                count.batches += train.is_step
                self.on_batch(count)
        return self._result(count)

    def run_bare(self, batches: Batches) -> dict[str, Any]:
        """Train with these batches as scripts without elasticrun do."""
        self._make()
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(
            self.net, self.optimizer, self.scheduler
        )
        count = _Count()
        for epoch in range(NUM_EPOCHS):
            order = [batches[epoch, number] for number in range(NUM_BATCHES)]
            loader = DataLoader(TensorDataset(self.x), batch_sampler=order)
            for (x,) in self.accelerator.prepare_data_loader(loader):
                self._train(x, count)
                count.batches += 1
        return self._result(count)

    def _make(self) -> None:
        torch.set_num_threads(1)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=self.accumulated,
            mixed_precision=self.precision,
        )
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(NUM_SAMPLES, 4, generator=generator)
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), 0.2, 0.9)
        self.scheduler: Any = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)

    def _train(self, x: torch.Tensor, count: Any) -> None:
        accelerator = self.accelerator
        with accelerator.accumulate(self.model):
            loss = mse_loss(self.model(x), x.sum(1, keepdim=True))
            accelerator.backward(loss)
            of_each = accelerator.gather_for_metrics(loss.detach().reshape(1))
            assert len(of_each) == accelerator.num_processes
            if accelerator.sync_gradients:
                norm = accelerator.clip_grad_norm_(self.model.parameters(), 0.4)
                lr = self.scheduler.get_last_lr()[0]
                if not count.log or count.log[-1][0] != count.batches:
                    count.log.append((count.batches, lr, float(norm)))
                else:  # The last of several micro-batches.
                    count.log[-1] = (count.batches, lr, float(norm))
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()

    def _result(self, count: Any) -> dict[str, Any]:
        values = [each.detach().flatten() for each in self.net.parameters()]
        return {
            "parameters": torch.cat(values).tolist(),
            "log": [number for line in count.log for number in line],
            "batches": count.batches,
        }


class _Count:
    """What `Variables` is to the elastic script."""

    def __init__(self) -> None:
        self.batches = 0
        self.log: list[tuple[int, float, float]] = []


def forget_accelerator() -> Iterator[None]:
    """Let each Accelerator of a process begin as the first one, a Trainer's too."""
    _reset()
    yield
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
