"""A small framework: callbacks, configuration in a data class, several evaluations."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from elasticrun import (
    AdaptiveDataLoader,
    Variables,
    rank,
    register,
    remaining_epochs_until,
)


@dataclass
class Config:
    lr: float = 0.1
    epochs: int = 10
    sizes: list = field(default_factory=lambda: [32, 64])
    use_ema: bool = True


class Callback:
    def on_epoch_begin(self, epoch):
        pass

    def on_epoch_end(self, epoch, metrics):
        pass


class Logger(Callback):
    def __init__(self, directory):
        self.writer = SummaryWriter(directory)

    def on_epoch_end(self, epoch, metrics):
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, epoch)


class Schedule(Callback):
    def __init__(self, scheduler):
        self.scheduler = scheduler

    def on_epoch_end(self, epoch, metrics):
        self.scheduler.step()


class Learner:
    def __init__(self, config, net, loaders, callbacks):
        self.config = config
        self.net = net
        self.loaders = loaders
        self.callbacks = callbacks
        self.sums = Variables(name="sums", clean=0.0, noisy=0.0)

    def call(self, event, *args):
        for callback in self.callbacks:
            getattr(callback, event)(*args)

    def fit(self, optimizer):
        for epoch in remaining_epochs_until(self.config.epochs):
            for callback in self.callbacks:
                callback.on_epoch_begin(epoch)
            self.net.train()
            for x, y in self.loaders["train"]:
                optimizer.zero_grad()
                nn.functional.mse_loss(self.net(x), y).backward()
                optimizer.step()
            metrics = {}
            for name in ("clean", "noisy"):
                self.evaluate(name)
            for name in ("clean", "noisy"):
                metrics[name] = getattr(self.sums, name)
                setattr(self.sums, name, 0.0)
            for callback in self.callbacks:
                callback.on_epoch_end(epoch, metrics)

    @torch.no_grad()
    def evaluate(self, name):
        self.net.eval()
        for x, y in self.loaders[name]:
            loss = nn.functional.mse_loss(self.net(x), y).item()
            setattr(self.sums, name, getattr(self.sums, name) + loss)


def main(train_set, clean_set, noisy_set):
    config = Config()
    net = nn.Linear(3, 1)
    optimizer = torch.optim.RMSprop(net.parameters(), lr=config.lr)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [5, 8])
    register(net=net, optimizer=optimizer, scheduler=scheduler)
    loaders = {
        "train": AdaptiveDataLoader(train_set, config.sizes[0], shuffle=True),
        "clean": AdaptiveDataLoader(clean_set, config.sizes[1]),
        "noisy": AdaptiveDataLoader(noisy_set, config.sizes[1]),
    }
    callbacks = [Schedule(scheduler)]
    if rank() == 0:
        callbacks.append(Logger("runs/one"))
    Learner(config, net, loaders, callbacks).fit(optimizer)
