"""Semi-supervised: unlabelled batches with a teacher; mixup; ramps by step."""
import math
import numpy as np
import torch
import torch.nn.functional as F

import elasticrun
from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Accumulator, Variables
from torch.utils.data import ConcatDataset, Dataset


class Tagged(Dataset):
    """Labelled and unlabelled samples in one set: label -1 for none."""

    def __init__(self, labelled, unlabelled):
        self.all = ConcatDataset([labelled, unlabelled])
        self.n = len(labelled)

    def __len__(self):
        return len(self.all)

    def __getitem__(self, i):
        x, y = self.all[i]
        return x, y if i < self.n else -1


def ramp(step, length):
    t = min(step / length, 1.0)
    return math.exp(-5 * (1 - t) ** 2)


def mix(x, y, alpha):
    lam = np.random.beta(alpha, alpha)
    perm = torch.randperm(len(x))
    return lam * x + (1 - lam) * x[perm], y, y[perm], lam


class EMATeacher:
    def __init__(self, net, decay):
        self.net = net
        self.shadow = {k: v.clone() for k, v in net.state_dict().items()}
        self.decay = decay

    @torch.no_grad()
    def update(self):
        for k, v in self.net.state_dict().items():
            self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)

    def state_dict(self):
        return self.shadow

    def load_state_dict(self, state):
        self.shadow = state


def main(labelled, unlabelled, test_set, cfg):
    elasticrun.init()
    torch.manual_seed(cfg.seed)
    np.random.seed(cfg.seed)
    net = cfg.make_net()
    opt = torch.optim.SGD(net.parameters(), cfg.lr, momentum=0.9)
    sch = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * min(s / cfg.steps, 1))))
    teacher = EMATeacher(net, 0.999)
    elasticrun.register(teacher=teacher)
    model = AdaptiveDataParallel(net, opt, sch)
    loader = AdaptiveDataLoader(Tagged(labelled, unlabelled), cfg.batch, shuffle=True, drop_last=True)
    test = AdaptiveDataLoader(test_set, cfg.batch, even_batches=False)
    v = Variables(step=0)
    seen = Accumulator()
    for epoch in elasticrun.remaining_epochs_until(cfg.epochs):
        net.train()
        for x, y in loader:
            xm, ya, yb, lam = mix(x, y, cfg.alpha)
            out = model(xm)
            keep_a, keep_b = ya >= 0, yb >= 0
            loss = lam * F.cross_entropy(out[keep_a], ya[keep_a]) + (1 - lam) * F.cross_entropy(out[keep_b], yb[keep_b])
            with torch.no_grad():
                target = net(x).softmax(-1)
            loss = loss + ramp(v.step, cfg.ramp) * F.mse_loss(out.softmax(-1), target)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sch.step()
            teacher.update()
            v.step += 1
        net.eval()
        with torch.no_grad():
            for x, y in test:
                seen["right"] += (net(x).argmax(-1) == y).sum()
                seen["all"] += len(y)
        with seen.synchronized():
            print(epoch, seen["right"] / seen["all"])
            seen.clear()
