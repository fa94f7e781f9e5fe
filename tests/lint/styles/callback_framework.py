"""A keras-like Model.fit with callback lists."""
import abc
import time
from typing import List, Optional

import torch
from torch import nn

from elasticrun import (
    Accumulator,
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    State,
    Variables,
    rank,
    remaining_epochs_until,
)


class Callback(abc.ABC):
    trainer: "Trainer"

    def set_trainer(self, trainer):
        self.trainer = trainer

    def on_train_begin(self): ...
    def on_epoch_begin(self, epoch): ...
    def on_batch_end(self, loss): ...
    def on_epoch_end(self, epoch, logs): ...
    def on_train_end(self): ...


class EarlyStopping(Callback):
    def __init__(self, monitor="val_loss", patience=3, min_delta=0.0):
        self.monitor = monitor
        self.patience = patience
        self.min_delta = min_delta
        self.state = Variables(name="early_stopping", best=float("inf"), wait=0)

    def on_epoch_end(self, epoch, logs):
        current = logs[self.monitor]
        if current < self.state.best - self.min_delta:
            self.state.best = current
            self.state.wait = 0
        else:
            self.state.wait += 1

    @property
    def should_stop(self):
        return self.state.wait >= self.patience


class Timer(Callback):
    def on_epoch_begin(self, epoch):
        self.t0 = time.perf_counter()

    def on_epoch_end(self, epoch, logs):
        print(f"epoch {epoch}: {time.perf_counter() - self.t0:.1f} s")


class LRSchedulerCallback(Callback):
    def __init__(self, scheduler, per_batch=False):
        self.scheduler = scheduler
        self.per_batch = per_batch

    def on_batch_end(self, loss):
        if self.per_batch:
            self.scheduler.step()

    def on_epoch_end(self, epoch, logs):
        if not self.per_batch:
            self.scheduler.step()


class CallbackList:
    def __init__(self, callbacks: List[Callback]):
        self.callbacks = callbacks

    def __iter__(self):
        return iter(self.callbacks)

    def fire(self, hook, *args):
        for cb in self.callbacks:
            getattr(cb, hook)(*args)


class Trainer:
    def __init__(self, net, optimizer, scheduler, callbacks: Optional[List[Callback]] = None):
        self.optimizer = optimizer
        self.model = AdaptiveDataParallel(net, optimizer, scheduler)
        self.stopping = EarlyStopping()
        self.callbacks = CallbackList([*(callbacks or []), self.stopping])
        self.sums = Accumulator()
        for cb in self.callbacks:
            cb.set_trainer(self)

    def fit(self, train, valid, epochs):
        self.callbacks.fire("on_train_begin")
        for epoch in remaining_epochs_until(epochs):
            if self.stopping.should_stop:
                break
            self.callbacks.fire("on_epoch_begin", epoch)
            self._train(train)
            logs = self._evaluate(valid)
            self.callbacks.fire("on_epoch_end", epoch, logs)
        self.callbacks.fire("on_train_end")

    def _train(self, loader):
        self.model.train()
        for x, y in loader:
            self.optimizer.zero_grad()
            loss = nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            self.callbacks.fire("on_batch_end", loss.item())

    @torch.no_grad()
    def _evaluate(self, loader):
        self.model.eval()
        for x, y in loader:
            loss = nn.functional.mse_loss(self.model(x), y, reduction="sum")
            self.sums["loss"] += loss.item() * loader.loss_weight
            self.sums["count"] += loader.num_valid
        with self.sums.synchronized():
            logs = {"val_loss": self.sums["loss"] / self.sums["count"]}
            self.sums.clear()
        return logs


if __name__ == "__main__":
    torch.manual_seed(0)
    g = torch.Generator().manual_seed(1)
    x = torch.randn(512, 8, generator=g)
    data = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True))
    net = nn.Linear(8, 1)
    opt = torch.optim.SGD(net.parameters(), 0.01)
    sch = torch.optim.lr_scheduler.StepLR(opt, 5)
    trainer = Trainer(net, opt, sch, [Timer(), LRSchedulerCallback(sch)])
    trainer.fit(AdaptiveDataLoader(data, 32, True), AdaptiveDataLoader(data, 32), 20)
