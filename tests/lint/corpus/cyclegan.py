"""CycleGAN: two domains, image pools, linear decay."""
import random

import torch
import torch.nn as nn
from torchvision import datasets
from torchvision import transforms as T

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

EPOCHS, DECAY = 200, 100


class ImagePool:
    def __init__(self, size=50):
        self.size = size
        self.images = []

    def query(self, batch):
        out = []
        for image in batch.detach():
            if len(self.images) < self.size:
                self.images.append(image)  # MISTAKE: lost: the pool of old images is empty after a restart (or line with: self.images = []) (or line with: pool_a, pool_b = ImagePool(), ImagePool()) (or line with: self.images[k] = image)
                out.append(image)
            elif random.random() > 0.5:
                k = random.randrange(self.size)
                out.append(self.images[k])
                self.images[k] = image
            else:
                out.append(image)
        return torch.stack(out)


def c(i, o, s=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, s, 1), nn.InstanceNorm2d(o), nn.ReLU(True))


def generator():
    return nn.Sequential(c(3, 32), c(32, 64, 2), c(64, 64), c(64, 64), nn.Upsample(scale_factor=2), c(64, 32), nn.Conv2d(32, 3, 3, 1, 1), nn.Tanh())


def discriminator():
    return nn.Sequential(c(3, 64, 2), c(64, 128, 2), nn.Conv2d(128, 1, 3, 1, 1))


class Both(nn.Module):
    def __init__(self, make):
        super().__init__()
        self.a, self.b = make(), make()

    def forward(self, a, b):
        return self.a(a), self.b(b)


random.seed(1)
torch.manual_seed(1)
dev = device()
t = T.Compose([T.Resize(143), T.RandomCrop(128), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize((0.5,) * 3, (0.5,) * 3)])
set_a, set_b = datasets.ImageFolder("horse2zebra/A", t), datasets.ImageFolder("horse2zebra/B", t)
loader_a = AdaptiveDataLoader(set_a, batch_size=1, shuffle=True, name="A")  # ARGUABLE: a global batch of one sample cannot be shared among replicas
loader_b = AdaptiveDataLoader(set_b, batch_size=1, shuffle=True, name="B")  # ARGUABLE: the same
gen, dis = Both(generator).to(dev), Both(discriminator).to(dev)
opt_g = torch.optim.Adam(gen.parameters(), 2e-4, betas=(0.5, 0.999))
opt_d = torch.optim.Adam(dis.parameters(), 2e-4, betas=(0.5, 0.999))
sched_g = torch.optim.lr_scheduler.LambdaLR(opt_g, lambda e: 1 - max(0, e - DECAY) / (EPOCHS - DECAY + 1))
sched_d = torch.optim.lr_scheduler.LambdaLR(opt_d, lambda e: 1 - max(0, e - DECAY) / (EPOCHS - DECAY + 1))
G = AdaptiveDataParallel(gen, opt_g, sched_g, name="gen")
D = AdaptiveDataParallel(dis, opt_d, sched_d, name="dis")
pool_a, pool_b = ImagePool(), ImagePool()
mse, l1 = nn.MSELoss(), nn.L1Loss()


def gan(outs, real):
    return sum(mse(o, torch.full_like(o, float(real))) for o in outs)


for epoch in remaining_epochs_until(EPOCHS):
    for (a, _), (b, _) in zip(loader_a, loader_b):  # MISTAKE: loop: two loops that overlap; LoopOrderError, use CombinedLoader
        a, b = a.to(dev), b.to(dev)
        fake_b, fake_a = G(a, b)
        rec_b, rec_a = G(fake_a, fake_b)
        loss_g = gan(dis(fake_a, fake_b), 1) + 10 * (l1(rec_a, a) + l1(rec_b, b))
        opt_g.zero_grad()
        loss_g.backward()
        opt_g.step()
        loss_d = gan(D(a, b), 1) + gan(D(pool_a.query(fake_a), pool_b.query(fake_b)), 0)
        opt_d.zero_grad()
        loss_d.backward()
        opt_d.step()
    sched_g.step()
    sched_d.step()
    if rank() == 0:
        print(f"epoch {epoch} G {loss_g.item():.3f} D {loss_d.item():.3f}")  # MISTAKE: leftover: the losses do not exist if the restart came at the end of the loop
        torch.save(gen.state_dict(), "cyclegan.pt")
