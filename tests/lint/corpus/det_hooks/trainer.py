"""Trainer with hooks."""
import torch

from elasticrun import Accumulator, AdaptiveDataParallel, device, remaining_epochs_until


class Trainer:
    def __init__(self, net, train, valid, epochs, lr):
        self.dev = device()
        self.net = net.to(self.dev)
        self.optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [8, 11])
        self.model = AdaptiveDataParallel(self.net, self.optimizer, self.scheduler, find_unused_parameters=True)
        self.train_loader, self.valid_loader = train, valid
        self.epochs = epochs
        self.hooks = []
        self.ap = 0.0

    def register_hooks(self, hooks):
        for hook in hooks:
            hook.trainer = self
            self.hooks.append(hook)

    def call(self, name):
        for hook in self.hooks:
            getattr(hook, name)()

    def train(self):
        for hook in self.hooks:
            hook.before_train()
        for self.epoch in remaining_epochs_until(self.epochs):
            for hook in self.hooks:
                hook.before_epoch()
            self.run_epoch()
            self.ap = self.evaluate()
            self.scheduler.step()
            for hook in self.hooks:
                hook.after_epoch()
        for hook in self.hooks:
            hook.after_train()

    def run_epoch(self):
        self.model.train()
        for images, boxes in self.train_loader:
            out = self.model(images.to(self.dev))
            loss = torch.nn.functional.smooth_l1_loss(out, boxes.to(self.dev))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            for hook in self.hooks:
                hook.after_step()

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        total = Accumulator()
        for images, boxes in self.valid_loader:
            error = (self.model(images.to(self.dev)) - boxes.to(self.dev)).abs().mean(1)
            total["hits"] += (error < 0.1)[: self.valid_loader.num_valid].sum()
        with total.synchronized():
            return total["hits"] / self.valid_loader.num_samples
