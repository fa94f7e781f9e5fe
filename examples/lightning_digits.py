"""Train a Lightning module on handwritten digits, through any restarts.

python examples/lightning_digits.py --checkpoint-dir /tmp/l
elasticrun run --replicas 4 --checkpoint-dir /tmp/l examples/lightning_digits.py
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import elasticrun
from elasticrun import AdaptiveDataLoader
from elasticrun.integrations.lightning import Elastic


class Classifier(LightningModule):
    """A small net for images of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10)
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, labels = batch
        hits = self.net(images).argmax(1) == labels
        self.log("accuracy", hits.float().mean(), sync_dist=True)

    def on_train_epoch_end(self) -> None:
        metrics = self.trainer.callback_metrics
        if self.trainer.is_global_zero:
            print(
                f"epoch {self.current_epoch:2}  accuracy {metrics['accuracy']:.2%}  "
                f"loss {metrics['loss']:.4f}",
                flush=True,
            )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), 1e-2)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Return digits to train with, and others."""
    loaded = load_digits()
    images = torch.tensor(loaded.images, dtype=torch.float32).div(16)
    labels = torch.tensor(loaded.target)
    chosen = torch.randperm(1797, generator=torch.Generator().manual_seed(0))
    parts = (chosen[:1439], chosen[1439:])
    train, held_out = (TensorDataset(images[part], labels[part]) for part in parts)
    return train, held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--checkpoint-dir", help="where the job goes on from")
    args = parser.parse_args()

    torch.set_num_threads(1)  # several replicas may share the machine
    torch.manual_seed(0)
    elasticrun.init(args.checkpoint_dir)
    train_set, valid_set = digits()
    train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
    valid = AdaptiveDataLoader(valid_set, batch_size=128, even_batches=False)
    best = ModelCheckpoint(
        str(Path(args.checkpoint_dir or ".", "best")), monitor="accuracy", mode="max"
    )
    trainer = Trainer(
        max_epochs=args.epochs,
        callbacks=[Elastic(), best, EarlyStopping("accuracy", mode="max", patience=5)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **Elastic.devices(),
    )
    trainer.fit(Classifier(), train, valid)


if __name__ == "__main__":
    main()
