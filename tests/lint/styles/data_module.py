"""Lightning-like without lightning: module hooks, data module, a loop class."""
from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

import elasticrun


class Loaders(NamedTuple):
    train: elasticrun.AdaptiveDataLoader
    val: elasticrun.AdaptiveDataLoader


class DataModule:
    def __init__(self, root: str, batch_size: int = 64):
        self.root = root
        self.batch_size = batch_size
        self._train = None
        self._val = None

    def setup(self):
        from torchvision.datasets import FashionMNIST
        from torchvision.transforms import ToTensor
        full = FashionMNIST(self.root, train=True, transform=ToTensor())
        self._train, self._val = torch.utils.data.random_split(
            full, [55000, 5000], torch.Generator().manual_seed(42)
        )

    def train_dataloader(self):
        return elasticrun.AdaptiveDataLoader(self._train, self.batch_size, shuffle=True, name="train")

    def val_dataloader(self):
        return elasticrun.AdaptiveDataLoader(self._val, self.batch_size, name="val")

    def loaders(self) -> Loaders:
        return Loaders(self.train_dataloader(), self.val_dataloader())


class Classifier(nn.Module):
    def __init__(self, lr: float = 1e-3):
        super().__init__()
        self.lr = lr
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Dropout(0.1), nn.Linear(256, 10))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, forward, batch) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(forward(x), y)

    def validation_step(self, forward, batch, n) -> dict:
        x, y = batch
        return {"correct": int((forward(x)[:n].argmax(-1) == y[:n]).sum()), "n": n}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20)
        return [optimizer], [scheduler]


class Loop:
    def __init__(self, module: Classifier, max_epochs: int):
        self.module = module
        self.max_epochs = max_epochs
        optimizers, schedulers = module.configure_optimizers()
        self.optimizer = optimizers[0]
        self.scheduler = schedulers[0]
        self.parallel = elasticrun.AdaptiveDataParallel(module, self.optimizer, self.scheduler)
        self.outputs = elasticrun.Accumulator(name="val_outputs")

    def run(self, datamodule: DataModule):
        datamodule.setup()
        loaders = datamodule.loaders()
        for self.current_epoch in elasticrun.remaining_epochs_until(self.max_epochs):
            self.on_train_epoch_start()
            self.train_epoch(loaders.train)
            self.val_epoch(loaders.val)
            self.on_epoch_end()

    def on_train_epoch_start(self):
        self.module.train()

    def train_epoch(self, loader: Iterable):
        for batch in loader:
            loss = self.module.training_step(self.parallel, batch)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def val_epoch(self, loader):
        self.module.eval()
        for batch in loader:
            self.outputs.update(self.module.validation_step(self.parallel, batch, loader.num_valid))

    def on_epoch_end(self):
        self.scheduler.step()
        with self.outputs.synchronized():
            acc = self.outputs["correct"] / self.outputs["n"]
            self.outputs.clear()
        if elasticrun.rank() == 0:
            print(f"epoch {self.current_epoch}: {acc:.3f}")


if __name__ == "__main__":
    elasticrun.init()
    torch.manual_seed(0)
    assert inspect.isclass(Loop)
    Loop(Classifier(), max_epochs=20).run(DataModule("data"))
