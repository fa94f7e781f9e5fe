"""House prices with a small MLP, a fit() with callbacks, and the k best checkpoints kept."""
import copy
import csv
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import TensorDataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables
from elasticrun import device, rank, remaining_epochs_until


class Callback:
    model = None

    def nothing(self, *args):
        pass

    on_train_begin = on_epoch_end = on_train_end = nothing


class CSVLogger(Callback):
    KEYS = ["loss", "val_mae", "val_rmse", "lr"]

    def __init__(self, path):
        self.rows = csv.writer(LogFile(path))
        self.rows.writerow(["epoch", *self.KEYS])

    def on_epoch_end(self, epoch, logs):
        self.rows.writerow([epoch] + [f"{logs[key]:.6g}" for key in self.KEYS])


class EarlyStopping(Callback):
    def __init__(self, monitor, patience, min_delta=1e-4):
        self.monitor, self.patience, self.min_delta = monitor, patience, min_delta
        self.record = Variables(name="early_stopping", best=float("inf"), best_epoch=-1)
        self.best_weights = None
        self.wait = 0

    def on_epoch_end(self, epoch, logs):
        if logs[self.monitor] < self.record.best - self.min_delta:
            self.record.best, self.record.best_epoch = logs[self.monitor], epoch
            self.wait = 0
            self.best_weights = copy.deepcopy(self.model.net.state_dict())  # MISTAKE: lost: only this process has the best weights: after a restart they are None although record.best came back, so the last weights are kept at the end (or line with: self.best_weights = None) (or line with: self.model.net.load_state_dict(self.best_weights)) (or line with: if self.best_weights is not None:)
        else:
            self.wait += 1  # MISTAKE: lost: a counter in an attribute: each restart gives the full patience again, and the job ends later (or line with: self.wait = 0) (or line with: self.model.stop_training = self.wait >= self.patience)
            self.model.stop_training = self.wait >= self.patience

    def on_train_end(self):
        if self.best_weights is not None:
            self.model.net.load_state_dict(self.best_weights)


class TopKCheckpoints(Callback):
    """Keeps the files of the k epochs with the lowest value."""

    def __init__(self, folder, monitor, k=3):
        self.folder, self.monitor, self.k = Path(folder), monitor, k
        self.saved = []

    def on_train_begin(self):
        if rank() == 0:
            shutil.rmtree(self.folder, ignore_errors=True)  # MISTAKE: effect: runs at each start before the epochs, so a restart deletes the checkpoints that were kept so far (or line with: self.folder.mkdir(parents=True))
            self.folder.mkdir(parents=True)

    def on_epoch_end(self, epoch, logs):
        value = logs[self.monitor]
        if len(self.saved) == self.k and value >= self.saved[-1][0]:
            return
        path = self.folder / f"epoch{epoch:03d}_{value:.4f}.pt"
        if rank() == 0:
            torch.save(self.model.net.state_dict(), path)
        self.saved = sorted(self.saved + [(value, path)])  # MISTAKE: lost: the list of kept files begins empty after a restart: worse epochs are saved again, and older files are never removed (or line with: self.saved = []) (or line with: self.saved.pop()) (or line with: if len(self.saved) == self.k and value >= self.saved[-1][0]:)
        if len(self.saved) > self.k:
            _, worst = self.saved.pop()
            if rank() == 0:
                worst.unlink(missing_ok=True)


class ReduceLROnPlateau(Callback):
    def __init__(self, optimizer, monitor, factor=0.5, patience=4):
        self.optimizer, self.monitor, self.factor, self.patience = optimizer, monitor, factor, patience
        self.plateau = Variables(name="plateau", best=float("inf"), wait=0)

    def on_epoch_end(self, epoch, logs):
        if logs[self.monitor] < self.plateau.best:
            self.plateau.best, self.plateau.wait = logs[self.monitor], 0
            return
        self.plateau.wait += 1
        if self.plateau.wait >= self.patience:
            self.plateau.wait = 0
            for group in self.optimizer.param_groups:
                group["lr"] *= self.factor


class Model:
    def __init__(self, net, optimizer, loss):
        self.net, self.optimizer, self.loss = net, optimizer, loss
        self.parallel = AdaptiveDataParallel(net, optimizer)
        self.stop_training = False

    def train_step(self, x, y):
        self.optimizer.zero_grad()
        loss = self.loss(self.parallel(x.to(device())), y.to(device()))
        loss.backward()
        self.optimizer.step()
        return loss.item()

    def evaluate(self, loader):
        self.parallel.eval()
        sums = Accumulator()
        with torch.no_grad():
            for x, y in loader:
                error = (self.parallel(x.to(device())) - y.to(device())).double()[: loader.num_valid]
                sums += {"abs": error.abs().sum().item(), "sq": error.square().sum().item()}
        with sums.synchronized():
            n = loader.num_samples
            return {"val_mae": float(sums["abs"] / n), "val_rmse": float(sums["sq"] / n) ** 0.5}

    def fit(self, train, valid, epochs, callbacks):
        for callback in callbacks:
            callback.model = self
            callback.on_train_begin()
        for epoch in remaining_epochs_until(epochs):
            self.parallel.train()
            sums = Accumulator()
            for x, y in train:
                sums["loss"] += self.train_step(x, y) * train.num_valid
            with sums.synchronized():
                logs = {"loss": float(sums["loss"] / train.num_samples)}
            logs.update(self.evaluate(valid), lr=self.optimizer.param_groups[0]["lr"])
            for callback in callbacks:
                callback.on_epoch_end(epoch, logs)
            if self.stop_training:
                break
        for callback in callbacks:
            callback.on_train_end()


def load_table(path, valid_share=0.2, seed=0):
    """Standardized by the training part; the split is drawn with a fixed seed."""
    table = np.load(path).astype(np.float32)
    order = np.random.default_rng(seed).permutation(len(table))
    n = int(len(table) * valid_share)
    valid, train = table[order[:n]], table[order[n:]]
    mean, std = train[:, :-1].mean(0), train[:, :-1].std(0) + 1e-6
    make = lambda t: TensorDataset(torch.from_numpy((t[:, :-1] - mean) / std), torch.from_numpy(np.log1p(t[:, -1:])))
    return make(train), make(valid)


if __name__ == "__main__":
    torch.manual_seed(0)
    train_set, valid_set = load_table("housing.npy")
    width = train_set.tensors[0].shape[1]
    net = nn.Sequential(nn.Linear(width, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 1)).to(device())
    optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    model = Model(net, optimizer, nn.SmoothL1Loss())
    model.fit(
        AdaptiveDataLoader(train_set, batch_size=256, shuffle=True, name="train"),
        AdaptiveDataLoader(valid_set, batch_size=1024, name="valid"),
        epochs=200,
        callbacks=[
            CSVLogger("housing_log.csv"),
            ReduceLROnPlateau(optimizer, "val_rmse"),
            TopKCheckpoints("housing_topk", "val_rmse"),
            EarlyStopping("val_rmse", patience=15),
        ],
    )
    if rank() == 0:
        torch.save(net.state_dict(), "housing_final.pt")
