"""Self-supervised: online and target networks, momentum schedule, linear probe."""
import copy
import math

import torch
import torch.nn.functional as F
from torch import nn

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, Variables, register
from elasticrun import init, rank, remaining_epochs_until


class BYOL(nn.Module):
    def __init__(self, backbone, dim=256):
        super().__init__()
        self.online = nn.Sequential(backbone, nn.Linear(512, dim))
        self.predictor = nn.Linear(dim, dim)
        self.target = copy.deepcopy(self.online)
        for p in self.target.parameters():
            p.requires_grad_(False)

    def forward(self, v1, v2):
        p1, p2 = self.predictor(self.online(v1)), self.predictor(self.online(v2))
        with torch.no_grad():
            z1, z2 = self.target(v1), self.target(v2)
        return 4 - 2 * (F.cosine_similarity(p1, z2).mean() + F.cosine_similarity(p2, z1).mean())

    @torch.no_grad()
    def update_target(self, m):
        for po, pt in zip(self.online.parameters(), self.target.parameters()):
            pt.data.mul_(m).add_(po.data, alpha=1 - m)


def cosine_momentum(step, total, base=0.996):
    return 1 - (1 - base) * (math.cos(math.pi * step / total) + 1) / 2


def pretrain(cfg, pairs, labelled):
    init()
    torch.manual_seed(cfg["seed"])
    net = BYOL(torch.hub.load("pytorch/vision", "resnet18"))
    opt = torch.optim.SGD(net.parameters(), lr=cfg["lr"], momentum=0.9)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, cfg["lr"], total_steps=cfg["steps"])
    model = AdaptiveDataParallel(net, opt, sched)
    probe = nn.Linear(512, 10)
    probe_opt = torch.optim.Adam(probe.parameters())
    register(probe=probe, probe_opt=probe_opt)
    loader = AdaptiveDataLoader(pairs, cfg["batch"], shuffle=True, drop_last=True)
    probe_loader = AdaptiveDataLoader(labelled, cfg["batch"], shuffle=True)
    v = Variables(step=0)
    for epoch in remaining_epochs_until(cfg["epochs"]):
        model.train()
        for v1, v2 in loader:
            loss = model(v1, v2)
            opt.zero_grad()
            loss.backward()
            opt.step()
            sched.step()
            model.module.update_target(cosine_momentum(v.step, cfg["steps"]))
            v.step += 1
        net.eval()
        for x, y in probe_loader:
            with torch.no_grad():
                features = net.online[0](x)
            probe_loss = F.cross_entropy(probe(features), y)
            probe_opt.zero_grad()
            probe_loss.backward()
            probe_opt.step()
        if rank() == 0 and epoch % 10 == 9:
            torch.save(net.online.state_dict(), f"byol-{epoch}.pt")
