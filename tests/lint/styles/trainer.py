"""A Trainer class with mixed precision, averaged weights and early stopping."""

from __future__ import annotations

import argparse
import logging
import time

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import elasticrun
from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    Variables,
    register,
)

logger = logging.getLogger(__name__)


class Trainer:
    def __init__(self, args, train_set, valid_set):
        self.args = args
        self.net = nn.Linear(32, 10)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=args.lr)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(
            self.optimizer, T_max=args.epochs
        )
        self.scaler = torch.amp.GradScaler()
        self.ema = AveragedModel(self.net)
        self.model = AdaptiveDataParallel(self.net, self.optimizer, self.scheduler)
        register(scaler=self.scaler, ema=self.ema)
        self.train_loader = AdaptiveDataLoader(train_set, args.batch_size, True)
        self.valid_loader = AdaptiveDataLoader(valid_set, args.batch_size)
        self.criterion = nn.CrossEntropyLoss()
        self.progress = Variables(
            steps=0, best_loss=float("inf"), bad_epochs=0, history=[]
        )
        self.sums = Accumulator()

    def train_epoch(self, epoch):
        self.model.train()
        start = time.time()
        for x, y in self.train_loader:
            self.optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda"):
                loss = self.criterion(self.model(x), y)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.ema.update_parameters(self.net)
            self.progress.steps += 1
            if self.progress.steps % 50 == 0:
                logger.info("epoch %d step %d %.4f", epoch, self.progress.steps, loss)
        logger.info("epoch %d took %.1f s", epoch, time.time() - start)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        for x, y in self.valid_loader:
            n = self.valid_loader.num_valid
            loss = self.criterion(self.ema(x)[:n], y[:n])
            self.sums["loss"] += loss.item() * n
        with self.sums.synchronized():
            mean = self.sums["loss"] / self.valid_loader.num_samples
            self.sums.clear()
        return mean

    def fit(self):
        for epoch in elasticrun.remaining_epochs_until(self.args.epochs):
            if self.progress.bad_epochs > self.args.patience:
                break
            self.train_epoch(epoch)
            loss = self.validate()
            self.finish_epoch(epoch, loss)

    def finish_epoch(self, epoch, loss):
        self.scheduler.step()
        self.progress.history.append(loss)
        if loss < self.progress.best_loss:
            self.progress.best_loss, self.progress.bad_epochs = loss, 0
            self.save("best.pt")
        else:
            self.progress.bad_epochs += 1
        logger.info("epoch %d: %.4f", epoch, loss)

    def save(self, path):
        if elasticrun.rank() == 0:
            torch.save({"ema": self.ema.state_dict()}, path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=128)
    args = parser.parse_args()
    torch.manual_seed(0)
    x, y = torch.randn(1000, 32), torch.randint(10, (1000,))
    data = torch.utils.data.TensorDataset(x, y)
    train_set, valid_set = torch.utils.data.random_split(data, [900, 100])
    Trainer(args, train_set, valid_set).fit()


if __name__ == "__main__":
    main()
