import numpy as np
import torch
import torch.nn.functional as F

from elasticrun import AdaptiveDataParallel, rank


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0.0

    def update(self, value, n=1):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1.0, self.count)


def mixup(x, y, alpha):
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1.0
    index = torch.randperm(len(x), device=x.device)
    return lam * x + (1 - lam) * x[index], y, y[index], lam


class Engine:
    def __init__(self, net, optimizer, scheduler, cfg):
        self.net, self.optimizer, self.scheduler, self.cfg = net, optimizer, scheduler, cfg
        self.model = AdaptiveDataParallel(net, optimizer, scheduler)

    def train_epoch(self, loader):
        self.model.train()
        meter = AverageMeter()
        for x, y in loader:
            x, a, b, lam = mixup(x, y, self.cfg["train"]["mixup"])
            logits = self.model(x)
            loss = lam * F.cross_entropy(logits, a) + (1 - lam) * F.cross_entropy(logits, b)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            meter.update(loss.item(), len(x))  # MISTAKE: sum: this replica's share only, lost by a restart (or line with: meter = AverageMeter()) (or line with: return meter.avg) (or line with: self.sum += value * n) (or line with: self.count += n)
        self.scheduler.step()
        return meter.avg

    @torch.no_grad()
    def validate(self, loader):
        self.net.eval()
        hits = seen = 0
        for x, y in loader:  # ARGUABLE: labelled in main.py, where only rank 0 calls it
            n = loader.num_valid
            hits += (self.net(x).argmax(1) == y)[:n].sum().item()  # MISTAKE: sum: this replica's share only, lost by a restart (or line with: hits = seen = 0) (or line with: seen += n) (or line with: return hits / seen)
            seen += n
        return hits / seen

    def export(self, path):
        if rank() == 0:
            torch.save(self.net.state_dict(), path)
