"""A little Keras-like Trainer with callbacks; trains a CNN on CIFAR-10."""
import csv
import os

import torch
import torch.nn.functional as F
from torch import nn
from torchvision import datasets
from torchvision import transforms as T

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until


class Callback:
    trainer = None

    def on_train_begin(self): ...
    def on_epoch_begin(self, epoch): ...
    def on_epoch_end(self, epoch, logs): ...
    def on_train_end(self): ...


class EarlyStopping(Callback):
    def __init__(self, monitor="val_loss", patience=5, min_delta=1e-4):
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.best, self.wait = float("inf"), 0

    def on_epoch_end(self, epoch, logs):
        if logs[self.monitor] < self.best - self.min_delta:
            self.best = logs[self.monitor]  # MISTAKE: lost: inf again after a restart (or line with: self.best, self.wait = float("inf"), 0) (or line with: if logs[self.monitor] < self.best - self.min_delta)
            self.wait = 0
        else:
            self.wait += 1  # MISTAKE: lost: patience counts from 0 again after a restart (or line with: self.best, self.wait = float("inf"), 0) (or line with: if self.wait >= self.patience)
            if self.wait >= self.patience:
                self.trainer.stop = True


class ModelCheckpoint(Callback):
    def __init__(self, path, monitor="val_acc"):
        self.path, self.monitor, self.best = path, monitor, 0.0

    def on_epoch_end(self, epoch, logs):
        if logs[self.monitor] > self.best:
            self.best = logs[self.monitor]  # MISTAKE: lost: 0 again after a restart, so that worse weights replace the best (or line with: self.path, self.monitor, self.best = path) (or line with: if logs[self.monitor] > self.best)
            if rank() == 0:
                torch.save(self.trainer.net.state_dict(), self.path)


class CSVLogger(Callback):
    def __init__(self, path):
        self.path, self.writer = path, None

    def on_train_begin(self):
        self.file = open(self.path, "w", newline="")  # MISTAKE: zoneP: each restart, and each replica, empties the log (or line with: self.writer.writerow) (or line with: self.writer.writeheader())

    def on_epoch_end(self, epoch, logs):
        if self.writer is None:
            self.writer = csv.DictWriter(self.file, ["epoch", *logs])
            self.writer.writeheader()
        self.writer.writerow({"epoch": epoch, **logs})
        self.file.flush()

    def on_train_end(self):
        self.file.close()


class Progress(Callback):
    def on_epoch_end(self, epoch, logs):
        if rank() == 0:
            print(f"epoch {epoch}  " + "  ".join(f"{k} {v:.4f}" for k, v in logs.items()))


class Trainer:
    def __init__(self, net, optimizer, scheduler=None, callbacks=()):
        self.net, self.optimizer, self.scheduler = net, optimizer, scheduler
        self.model = AdaptiveDataParallel(net, optimizer, scheduler)
        self.callbacks, self.stop = list(callbacks), False
        for callback in self.callbacks:
            callback.trainer = self

    def emit(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event)(*args)

    def train_epoch(self, loader):
        self.model.train()
        running, seen = 0.0, 0
        for x, y in loader:
            loss = F.cross_entropy(self.model(x), y)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            running += loss.item() * len(x)  # MISTAKE: sum: this replica's share only, lost by a restart (or line with: running, seen = 0.0, 0) (or line with: seen += len(x)) (or line with: return {"loss": running / seen})
            seen += len(x)
        return {"loss": running / seen}

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        total = Accumulator()
        for x, y in loader:
            n = loader.num_valid
            logits = self.model(x)
            total["loss"] += F.cross_entropy(logits, y, reduction="none")[:n].sum()
            total["hits"] += (logits.argmax(1) == y)[:n].sum()
        with total.synchronized():
            return {"val_loss": total["loss"] / loader.num_samples, "val_acc": total["hits"] / loader.num_samples}

    def fit(self, train, valid, epochs):
        self.emit("on_train_begin")
        for epoch in remaining_epochs_until(epochs):
            self.emit("on_epoch_begin", epoch)
            logs = {**self.train_epoch(train), **self.evaluate(valid)}
            if self.scheduler is not None:
                self.scheduler.step()
            self.emit("on_epoch_end", epoch, logs)
            if self.stop:
                break
        self.emit("on_train_end")


def conv(a, b):
    return nn.Sequential(nn.Conv2d(a, b, 3, padding=1, bias=False), nn.GroupNorm(8, b), nn.ReLU(), nn.MaxPool2d(2))


if __name__ == "__main__":
    augment = T.Compose([T.RandomCrop(32, 4), T.RandomHorizontalFlip(), T.ToTensor()])
    root = os.environ.get("DATA", "data")
    train = AdaptiveDataLoader(
        datasets.CIFAR10(root, True, augment), batch_size=128, shuffle=True, num_workers=4, device=device(), name="train"
    )
    valid = AdaptiveDataLoader(
        datasets.CIFAR10(root, False, T.ToTensor()), batch_size=500, num_workers=4, device=device(), name="valid"
    )
    net = nn.Sequential(conv(3, 64), conv(64, 128), conv(128, 256), nn.Flatten(), nn.Linear(4096, 10)).to(device())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 45], 0.2)
    callbacks = [EarlyStopping(patience=8), ModelCheckpoint("cifar_best.pt"), CSVLogger("cifar_log.csv"), Progress()]
    Trainer(net, optimizer, scheduler, callbacks).fit(train, valid, 60)
