"""A Trainer with many parts: criterion, task, meters, lr by update, validation in the middle."""
import math
import sys
from collections import defaultdict

import torch
from torch import nn

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, State, rank
from elasticrun import remaining_epochs_until


class InverseSqrt:
    """The learning rate as a function of the number of updates."""

    def __init__(self, optimizer, peak, warmup):
        self.optimizer = optimizer
        self.peak, self.warmup = peak, warmup

    def set(self, num_updates):
        if num_updates < self.warmup:
            lr = self.peak * num_updates / self.warmup
        else:
            lr = self.peak * math.sqrt(self.warmup / num_updates)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return lr


class Progress(State):
    def __init__(self):
        self.num_updates = 0
        self.best_loss = math.inf
        self.nll = 0.0
        self.ntok = 0
        super().__init__("progress")

    def save(self, fileobj):
        torch.save([self.num_updates, self.best_loss, self.nll, self.ntok], fileobj)

    def load(self, fileobj):
        self.num_updates, self.best_loss, self.nll, self.ntok = torch.load(fileobj)


class Trainer:
    def __init__(self, cfg, task):
        self.cfg, self.task = cfg, task
        self._net = task.build_model(cfg)
        self._optimizer = torch.optim.Adam(self._net.parameters(), betas=(0.9, 0.98), eps=1e-9)
        self._model = AdaptiveDataParallel(self._net, self._optimizer)
        self._schedule = InverseSqrt(self._optimizer, cfg.lr, cfg.warmup)
        self.progress = Progress()

    @property
    def model(self):
        return self._model

    def get_num_updates(self):
        return self.progress.num_updates

    def train_step(self, sample):
        self._model.train()
        self._optimizer.zero_grad()
        logits = self._model(**sample["net_input"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), ignore_index=1)
        self._model.weigh(loss, count=sample["ntokens"]).backward()
        nn.utils.clip_grad_norm_(self._net.parameters(), self.cfg.clip_norm)
        self._schedule.set(self.get_num_updates() + 1)
        self._optimizer.step()
        self.progress.num_updates += 1
        return {"loss": loss.item(), "ntokens": sample["ntokens"]}

    @torch.no_grad()
    def valid_step(self, sample):
        self._model.eval()
        logits = self._model(**sample["net_input"])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), sample["target"].flatten(), reduction="sum")
        self.progress.nll += loss.item()
        self.progress.ntok += sample["ntokens"]


def train(cfg, trainer, loader):
    window = defaultdict(float)
    for i, sample in loader.enumerate():
        log = trainer.train_step(sample)
        window["loss"] += log["loss"]
        if i % cfg.log_interval == 0:
            print(f"update {trainer.get_num_updates()} loss {window['loss']:.3f}", file=sys.stderr)
            window.clear()


def validate(trainer, loaders):
    losses = []
    for subset, loader in loaders.items():
        for sample in loader:
            trainer.valid_step(sample)
    value = trainer.progress.nll / trainer.progress.ntok
    trainer.progress.nll, trainer.progress.ntok = 0.0, 0
    losses.append(value)
    return losses


def main(cfg, task):
    torch.manual_seed(cfg.seed)
    trainer = Trainer(cfg, task)
    itr = AdaptiveDataLoader(task.dataset("train"), cfg.batch, shuffle=True, collate_fn=task.collate)
    valid = {
        name: AdaptiveDataLoader(task.dataset(name), cfg.batch, collate_fn=task.collate, name=name)
        for name in cfg.valid_subset.split(",")
    }
    for epoch in remaining_epochs_until(cfg.max_epoch):
        train(cfg, trainer, itr)
        loss = validate(trainer, valid)[0]
        if loss < trainer.progress.best_loss:
            trainer.progress.best_loss = loss
            if rank() == 0:
                torch.save(trainer._net.state_dict(), cfg.save_dir + "/checkpoint_best.pt")
        print(f"epoch {epoch} | valid loss {loss:.3f} | best {trainer.progress.best_loss:.3f}")
