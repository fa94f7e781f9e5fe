"""TrainerBase and its hooks, cut down from detectron2."""
import torch

from elasticrun import AdaptiveDataParallel, device, remaining_epochs_until


class HookBase:
    trainer = None

    def before_train(self):
        pass

    def after_train(self):
        pass

    def before_epoch(self):
        pass

    def after_step(self):
        pass

    def after_epoch(self):
        pass


class SimpleTrainer:
    def __init__(self, net, optimizer, scheduler, data_loader):
        self.net = net.to(device())
        self.optimizer, self.scheduler = optimizer, scheduler
        self.model = AdaptiveDataParallel(self.net, optimizer, scheduler)
        self.data_loader = data_loader
        self.hooks = []
        self.epoch = None
        self.loss_dict = {}

    def register_hooks(self, hooks):
        for hook in hooks:
            hook.trainer = self
        self.hooks.extend(hooks)

    def call(self, event):
        for hook in self.hooks:
            getattr(hook, event)()

    def train(self, max_epoch):
        self.call("before_train")
        for self.epoch in remaining_epochs_until(max_epoch):
            self.call("before_epoch")
            self.model.train()
            for images, targets in self.data_loader:
                self.run_step(images.to(device()), targets)
                self.call("after_step")
            self.scheduler.step()
            self.call("after_epoch")
        self.call("after_train")

    def run_step(self, images, targets):
        targets = {name: value.to(device()) for name, value in targets.items()}
        self.loss_dict = self.model(images, targets)
        losses = sum(self.loss_dict.values())
        self.optimizer.zero_grad()
        losses.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 10.0)
        self.optimizer.step()
