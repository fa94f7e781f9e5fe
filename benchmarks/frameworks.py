"""What a training step of a framework costs with elasticrun, beside one without.

    python benchmarks/frameworks.py [accelerate] [lightning] [transformers]

Both train a net of the same size in turns, in one process on one thread; what counts is
the processor's time, so other programs on the machine matter little.
"""

from __future__ import annotations

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from accelerate import Accelerator
from lightning.pytorch import Callback, LightningModule, Trainer
from machine import report
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, TensorDataset
from transformers import PrinterCallback, TrainerCallback, TrainingArguments
from transformers import Trainer as TrainerOfTransformers

from elasticrun import AdaptiveDataLoader
from elasticrun.integrations.accelerate import prepare
from elasticrun.integrations.lightning import Elastic
from elasticrun.integrations.transformers import ElasticTrainer
from elasticrun.testing import Job, Settings, use_job

NUM_ROUNDS, NUM_STEPS, BATCH_SIZE = 15, 40, 64
NUM_SAMPLES = NUM_STEPS * BATCH_SIZE
DATA = TensorDataset(torch.randn(NUM_SAMPLES, 64), torch.randint(10, (NUM_SAMPLES,)))
ACCELERATOR = Accelerator(cpu=True)  # A job has one.

# Train for some steps with elasticrun, and without; return the seconds of a step.
Pair = tuple[Callable[[], float], Callable[[], float]]


def net(width: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
        nn.Linear(width, 10),
    )  # fmt: skip


def accelerate(width: int) -> Pair:
    accelerator = ACCELERATOR

    def seconds(prepared: Any, batches: Iterable[Any]) -> float:
        model, optimizer, scheduler = prepared
        begun = time.process_time()
        for x, y in batches:
            with accelerator.accumulate(model):
                accelerator.backward(cross_entropy(model(x), y))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        return (time.process_time() - begun) / NUM_STEPS

    def trained() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        module = net(width)
        optimizer = torch.optim.AdamW(module.parameters(), 1e-3)
        return module, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10**6)

    bare = accelerator.prepare_data_loader(DataLoader(DATA, BATCH_SIZE, shuffle=True))
    ours = AdaptiveDataLoader(DATA, BATCH_SIZE, shuffle=True, name=f"train-{width}")
    without = accelerator.prepare(*trained())
    elastic = prepare(accelerator, *trained(), name=f"width-{width}")
    return lambda: seconds(elastic, ours), lambda: seconds(without, bare)


class Net(LightningModule):
    """Trains the net, and logs its loss."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = net(width)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        loss = cross_entropy(self.net(x), y)
        self.log("loss", loss, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), 1e-3)


class Clock(Callback):
    """Takes the time from the end of the first batch of an epoch to its last one's."""

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, *args: Any
    ) -> None:
        if trainer.fit_loop.batch_idx == 0:
            self.begun = time.process_time()
        self.ended = time.process_time()


def lightning(width: int) -> Pair:
    for name in ("lightning.pytorch", "elasticrun"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")

    def seconds(callbacks: list[Callback], loader: Any, **options: Any) -> float:
        clock = Clock()
        Trainer(
            max_epochs=1,
            callbacks=[*callbacks, clock],
            gradient_clip_val=1.0,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        ).fit(Net(width), loader)
        return (clock.ended - clock.begun) / (NUM_STEPS - 1)

    def ours() -> float:
        with use_job(Job(settings=Settings.read({}, job="benchmark"))):
            loader = AdaptiveDataLoader(DATA, BATCH_SIZE, shuffle=True)
            return seconds([Elastic()], loader, **Elastic.devices())

    def bare() -> float:
        return seconds([], DataLoader(DATA, BATCH_SIZE, shuffle=True), devices=1)

    return ours, bare


class NetWithLoss(nn.Module):
    """The net as the Trainer of transformers wants it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.net = net(width)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": cross_entropy(self.net(x), labels)}


class Named(Dataset[dict[str, Tensor]]):
    """The same samples by name."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, labels = DATA[index]
        return {"x": x, "labels": labels}


class ClockOfSteps(TrainerCallback):
    """Takes the time from the end of the first step to that of the last."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 1:
            self.begun = time.process_time()
        self.ended = time.process_time()


def transformers(width: int) -> Pair:
    logging.getLogger("elasticrun").setLevel(logging.ERROR)

    def seconds(kind: Any, directory: str) -> float:
        clock = ClockOfSteps()
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=1,
            per_device_train_batch_size=BATCH_SIZE,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        trainer = kind(
            model=NetWithLoss(width),
            args=arguments,
            train_dataset=Named(),
            callbacks=[clock],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return (clock.ended - clock.begun) / (NUM_STEPS - 1)

    def ours() -> float:
        with (
            tempfile.TemporaryDirectory() as directory,
            use_job(Job(settings=Settings.read({}, job="benchmark"))),
        ):
            return seconds(ElasticTrainer, directory)

    def bare() -> float:
        with tempfile.TemporaryDirectory() as directory:
            return seconds(TrainerOfTransformers, directory)

    return ours, bare


FRAMEWORKS = (accelerate, lightning, transformers)


def main() -> None:
    torch.set_num_threads(1)
    for framework in FRAMEWORKS:
        if framework.__name__ not in (sys.argv[1:] or [framework.__name__]):
            continue
        for width in (128, 1024):
            elastic, bare = framework(width)
            pairs = [(elastic(), bare()) for _ in range(NUM_ROUNDS)][1:]
            medians = [statistics.median(each) for each in zip(*pairs, strict=True)]
            report(
                framework.__name__,
                width=width,
                milliseconds=round(medians[0] * 1e3, 3),
                bare_milliseconds=round(medians[1] * 1e3, 3),
                ratio=round(statistics.median(one / other for one, other in pairs), 3),
            )


if __name__ == "__main__":
    main()
