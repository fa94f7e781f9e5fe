"""Helpers: meters, averaged weights, checkpoints of the best models."""
import copy
import os

import torch


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def update(self, value, n=1):
        self.sum += value * n  # ARGUABLE: marked where it is called
        self.count += n  # ARGUABLE: marked where it is called


class ModelEma:
    def __init__(self, model, decay=0.9998):
        self.module = copy.deepcopy(model).eval()  # ARGUABLE: marked where it is made
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for e, m in zip(self.module.state_dict().values(), model.state_dict().values()):
            if e.dtype.is_floating_point:
                e.mul_(self.decay).add_(m, alpha=1 - self.decay)
            else:
                e.copy_(m)


class CheckpointSaver:
    def __init__(self, folder, max_history=5):
        self.folder = folder
        self.max_history = max_history
        self.files = []

    def save(self, net, epoch, metric):
        path = os.path.join(self.folder, f"checkpoint-{epoch}.pth.tar")
        torch.save({"state_dict": net.state_dict(), "epoch": epoch, "metric": metric}, path)
        self.files.append((path, metric))  # MISTAKE: lost: the list of kept files is empty after a restart, so the best is forgotten and old ones stay (or line with: self.files = [])
        self.files.sort(key=lambda f: f[1], reverse=True)
        while len(self.files) > self.max_history:
            os.remove(self.files.pop()[0])
        return self.files[0]
