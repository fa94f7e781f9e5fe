"""Validations of Lightning's stop between batches, unless something would be lost."""

from __future__ import annotations

import io
import itertools
import logging
import random
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric

from elasticrun import init, rank, world_size
from elasticrun.integrations.lightning import Elastic
from elasticrun.integrations.lightning.fields import Fields
from elasticrun.testing import run_generation
from tests.integrations.lightning.fitting import SILENT, Net, datasets, nothing
from tests.support.generations import run_once
from tests.support.programs import StopOnce

# Lightning warns of small loaders, and deprecations of torch's.
pytestmark = pytest.mark.filterwarnings("ignore")

TIMEOUT = 600.0
NUM_BATCHES = 5  # Of a validation.


class Filling(Net):
    """Fills a list in each validation, of which it logs the mean at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[torch.Tensor] = []

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        super().validation_step(batch, batch_idx)
        self.outputs.append(self.loss(batch[0]))

    def on_validation_epoch_end(self) -> None:
        self.log("mean", torch.stack(self.outputs).mean(), sync_dist=True)
        self.outputs.clear()


class FillsLast(Net):
    """Fills a list on the last of two replicas alone."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[int] = []

    def validation_step(
        self, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        super().validation_step(batch, batch_idx)
        if rank() == 1:
            self.outputs.append(batch_idx)


class Counting(Callback):
    """Counts batches of a validation, in no state."""

    count = 0

    def on_validation_batch_end(self, *args: Any) -> None:
        self.count += 1


@dataclass
class Fit:
    """A fit of two epochs, each with a validation.

    Attributes:
        asks: Whether a stop is asked for in the first batch of the first validation.
    """

    directory: Path
    net: type[Net] = Net
    others: tuple[type[Callback], ...] = ()
    asks: bool = False
    saves: bool | None = None

    def __call__(self) -> dict[str, float]:
        """Run in a replica of its own."""
        init(str(self.directory / "job"), save_interval="off", async_save=False)
        return self.run()

    def run(self) -> dict[str, float]:
        path = self.directory / f"validated-{rank()}"
        act = StopOnce() if self.asks else nothing

        class Noting(Callback):
            """Notes which batches of a validation come, in no attribute."""

            def on_validation_batch_end(
                self,
                trainer: Trainer,
                module: Any,
                outputs: Any,
                batch: Any,
                number: int,
            ) -> None:
                with path.open("a") as file:
                    file.write(f"{number} ")
                act(trainer)
                if world_size() > 1 and number < NUM_BATCHES - 1:
                    dist.barrier()  # Or the others would be through before the stop.

        torch.set_num_threads(1)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        data, valid = datasets()
        elastic = Elastic("global", saves_in_validation=self.saves)
        trainer = Trainer(
            max_epochs=2,
            callbacks=[elastic, Noting(), *(each() for each in self.others)],
            **SILENT,
            **Elastic.devices(),
        )
        trainer.fit(self.net(), DataLoader(data, 6), DataLoader(valid, 4))
        return {name: float(value) for name, value in trainer.callback_metrics.items()}

    def numbers(self, replica: int = 0) -> list[int]:
        """Return the batches of all validations so far."""
        text = (self.directory / f"validated-{replica}").read_text()
        return [int(number) for number in text.split()]


def in_turn(fit: Fit, num_replicas: int) -> tuple[int, dict[str, float]]:
    """Return how many batches were validated before the stop, and what is logged.

    With one replica, all is in this process.
    """
    stopping = replace(fit, asks=True)
    if num_replicas == 1:
        assert run_once(stopping.run, fit.directory / "job") is None
        return len(fit.numbers()), run_once(fit.run, fit.directory / "job")
    left = run_generation(stopping, num_replicas, timeout=TIMEOUT)
    assert left == [None] * num_replicas
    num_validated = len(fit.numbers())
    (ended,) = run_generation(fit, 1, timeout=TIMEOUT)
    return num_validated, ended


@pytest.mark.parametrize("num_replicas", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_validation_stops_between_two_batches(
    tmp_path: Path, num_replicas: int
) -> None:
    fit, calm = Fit(tmp_path / "cut"), Fit(tmp_path / "calm")
    for each in (fit, calm):
        each.directory.mkdir()
    expected = run_once(calm.run, tmp_path / "calm" / "job")
    num_validated, ended = in_turn(fit, num_replicas)
    assert num_validated <= 3  # At two replicas, the last one asks in its first batch.
    assert ended == pytest.approx(expected, abs=1e-5)
    assert fit.numbers() == calm.numbers()  # Each batch once.
    assert len(calm.numbers()) == 2 * NUM_BATCHES


@pytest.mark.parametrize(
    ("net", "others", "name", "num_replicas"),
    [
        (Filling, (), "Filling.outputs", 1),
        (Net, (Counting,), "Counting.count", 1),
        pytest.param(Filling, (), "Filling.outputs", 2, marks=pytest.mark.slow),
        pytest.param(FillsLast, (), "FillsLast.outputs", 2, marks=pytest.mark.slow),
    ],
)
def test_where_something_would_be_lost_it_ends_first(
    tmp_path: Path,
    net: type[Net],
    others: Any,
    name: str,
    num_replicas: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fit, calm = Fit(tmp_path / "cut", net, others), Fit(tmp_path / "calm", net, others)
    for each in (fit, calm):
        each.directory.mkdir()
    expected = run_once(calm.run, tmp_path / "calm" / "job")
    num_validated, ended = in_turn(fit, num_replicas)
    assert num_validated == NUM_BATCHES
    assert ended == pytest.approx(expected, abs=1e-5)
    assert fit.numbers() == calm.numbers()
    if num_replicas == 1:
        (said,) = (each for each in caplog.messages if "has changed" in each)
        assert f"`{name}` has changed in the validation" in said


# What is found of attributes.


class Slots:
    """Has no dictionary."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


class Owner(LightningModule):
    """Has all kinds of attributes."""

    of_class: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.BatchNorm1d(2)
        self.mean = MeanMetric()
        self.items: list[Any] = [float("nan"), {"a": deque([1, 2])}]
        self.tensor = torch.zeros(2)
        self.array = np.zeros(2)
        self.random = random.Random(0)
        self.numpy = np.random.default_rng(0)
        self.torch = torch.Generator()
        self.record = SimpleNamespace(number=1, around=self.items)
        self.items.append(self.items)  # In itself.
        self.many = list(range(10_000))
        self.scores = dict.fromkeys(range(200_000), 0.0)
        self.large = np.zeros(2_000_000)
        self.objects = np.array([None, "a"], dtype=object)
        self.slots = Slots()
        self.count = itertools.count()
        self.text = io.StringIO()
        self.hidden = [MeanMetric()]
        self.lock = threading.Lock()
        self.data = TensorDataset(torch.zeros(3))
        self.around = self.many_around()
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def many_around(self) -> Callable[[], object]:
        values = [1]
        return lambda: values.append(len(self.many))


CHANGES: dict[str, Callable[[Owner], object]] = {
    "Owner.items": lambda owner: owner.items[1]["a"].append(3),
    "Owner.tensor": lambda owner: owner.tensor.add_(1),
    "Owner.array": lambda owner: owner.array.__iadd__(1),
    "Owner.random": lambda owner: owner.random.random(),
    "Owner.numpy": lambda owner: owner.numpy.random(),
    "Owner.torch": lambda owner: torch.rand(1, generator=owner.torch),
    "Owner.record": lambda owner: setattr(owner.record, "number", 2),
    "Owner.many": lambda owner: owner.many.append(0),
    "Owner.scores": lambda owner: owner.scores.update({3: 1.0}),
    "Owner.large": lambda owner: owner.large.__setitem__(5, 1),
    "Owner.objects": lambda owner: owner.objects.__setitem__(0, 1),
    "Owner.slots": lambda owner: setattr(owner.slots, "number", 1),
    "Owner.count": lambda owner: next(owner.count),
    "Owner.text": lambda owner: owner.text.write("a"),
    "Owner.hidden": lambda owner: owner.hidden[0].update(1.0),
    "Owner.data": lambda owner: setattr(owner, "data", TensorDataset(torch.zeros(3))),
    "Owner.around": lambda owner: owner.around(),
    "Owner.passing": lambda owner: owner.passing.add_(1),
    "Owner.of_class": lambda owner: owner.of_class.append(1),
    "Owner.new": lambda owner: setattr(owner, "new", 0),
    "Owner.part.seen": lambda owner: setattr(owner.part, "seen", 0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_an_attribute_that_changes_is_named(name: str) -> None:
    owner = Owner()
    with torch.inference_mode():  # As a validation is.
        fields = Fields(Trainer(**SILENT), owner)
        assert fields.find_change() is None
        CHANGES[name](owner)
        assert fields.find_change() == name


def test_what_is_made_in_a_validation_may_change_there() -> None:
    owner = Owner()
    with torch.inference_mode():
        owner.made = torch.zeros(2)
        fields = Fields(Trainer(**SILENT), owner)
        assert fields.find_change() is None
        owner.made += 1
        assert fields.find_change() == "Owner.made"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(np.zeros(10_000_000), id="too large"),
        pytest.param((each for each in ()), id="a generator"),
        pytest.param(torch.zeros(2).to_sparse(), id="sparse"),
    ],
)
def test_what_cannot_be_compared_counts_as_changed(value: Any) -> None:
    owner = Owner()
    owner.value = value
    assert Fields(Trainer(**SILENT), owner).find_change() == "Owner.value"


class Bar(ProgressBar):
    """Shows how often it was asked."""

    num_shown = 0


class Remembering(Counting):
    """Has its count in its state."""

    lost = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}


def test_what_checkpoints_have_and_what_is_shown_may_change() -> None:
    owner = Owner()
    bar, counting = Bar(), Remembering()
    trainer = Trainer(**{**SILENT, "enable_progress_bar": True})
    trainer.callbacks += [bar, counting]  # type: ignore[attr-defined]
    fields = Fields(trainer, owner)
    bar.num_shown = counting.count = 1
    owner.part(torch.randn(4, 2))  # Its averages.
    owner.mean.update(1.0)
    owner.eval()
    assert fields.find_change() is None
    counting.lost = 1
    assert fields.find_change() == "Remembering.lost"
