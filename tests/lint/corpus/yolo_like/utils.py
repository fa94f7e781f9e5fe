"""Paths, fitness, averaged weights."""
import copy
import math
from pathlib import Path

import torch


def increment_path(path):
    """runs/exp, runs/exp2, runs/exp3, ..."""
    base, n = Path(path), 1
    while True:
        candidate = base if n == 1 else Path(f"{path}{n}")
        if not candidate.exists():
            candidate.mkdir(parents=True)  # MISTAKE: name: each start, and each replica, takes the next free folder, so a restart goes on in another one (or line with: if not candidate.exists())
            return candidate
        n += 1


def fitness(tp, fp, positives):
    precision, recall = tp / max(tp + fp, 1), tp / max(positives, 1)
    return 2 * precision * recall / max(precision + recall, 1e-9)


class ModelEMA:
    def __init__(self, model, decay=0.9999, tau=2000):
        self.ema = copy.deepcopy(model).eval().requires_grad_(False)
        self.updates = 0
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))

    @torch.no_grad()
    def update(self, model):
        self.updates += 1  # MISTAKE: unreg: state_dict leaves the counter out, so the decay begins small again after a restart (or line with: self.updates = 0) (or line with: return self.ema.state_dict())
        d = self.decay(self.updates)
        for v, m in zip(self.ema.state_dict().values(), model.state_dict().values()):
            if v.dtype.is_floating_point:
                v.mul_(d).add_(m, alpha=1 - d)

    def state_dict(self):
        return self.ema.state_dict()

    def load_state_dict(self, state):
        self.ema.load_state_dict(state)
