import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18


class SimCLR(nn.Module):
    def __init__(self, dim):
        super().__init__()
        backbone = resnet18()
        backbone.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        backbone.maxpool = nn.Identity()
        width = backbone.fc.in_features
        backbone.fc = nn.Identity()
        self.f = backbone
        self.g = nn.Sequential(nn.Linear(width, 512), nn.ReLU(inplace=True), nn.Linear(512, dim))

    def forward(self, x):
        feature = self.f(x)
        return F.normalize(feature, dim=-1), F.normalize(self.g(feature), dim=-1)


def nt_xent(z1, z2, temperature):
    z = torch.cat([z1, z2])
    n = len(z1)
    sim = z @ z.t() / temperature
    sim.fill_diagonal_(float("-inf"))
    target = torch.cat([torch.arange(n) + n, torch.arange(n)]).to(z.device)
    return F.cross_entropy(sim, target)  # ARGUABLE: labelled in main.py, where the loss is made
