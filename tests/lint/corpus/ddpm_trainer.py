"""Denoising diffusion with a Trainer class, after lucidrains' denoising-diffusion-pytorch."""
import json
import math
from copy import deepcopy
from pathlib import Path

import torch
import torch.nn.functional as F
from denoising_diffusion_pytorch import Unet
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import transforms as T
from torchvision import utils

from elasticrun import AdaptiveDataLoader, AdaptiveDataParallel, device, rank, register


class Images(Dataset):
    def __init__(self, folder, size, exts=("jpg", "png")):
        self.paths = sorted(p for ext in exts for p in Path(folder).rglob(f"*.{ext}"))
        self.transform = T.Compose([T.Resize(size), T.RandomHorizontalFlip(), T.CenterCrop(size), T.ToTensor()])

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        return self.transform(Image.open(self.paths[index]).convert("RGB"))


class GaussianDiffusion(nn.Module):
    def __init__(self, net, image_size, timesteps=1000):
        super().__init__()
        self.net, self.image_size, self.timesteps = net, image_size, timesteps
        betas = torch.linspace(1e-4, 0.02, timesteps)
        self.register_buffer("betas", betas)
        self.register_buffer("bar", torch.cumprod(1 - betas, 0))

    def forward(self, img):
        img = img * 2 - 1
        t = torch.randint(0, self.timesteps, (len(img),), device=img.device)
        noise = torch.randn_like(img)
        bar = self.bar[t].view(-1, 1, 1, 1)
        return F.mse_loss(self.net(bar.sqrt() * img + (1 - bar).sqrt() * noise, t), noise)

    @torch.no_grad()
    def sample(self, n):
        x = torch.randn(n, 3, self.image_size, self.image_size, device=self.betas.device)
        for t in reversed(range(self.timesteps)):
            eps = self.net(x, torch.full((n,), t, device=x.device))
            beta, bar = self.betas[t], self.bar[t]
            x = (x - beta / (1 - bar).sqrt() * eps) / (1 - beta).sqrt()
            if t:
                x = x + beta.sqrt() * torch.randn_like(x)
        return (x.clamp(-1, 1) + 1) / 2


class EMA(nn.Module):
    def __init__(self, model, decay=0.995, update_every=10):
        super().__init__()
        self.decay, self.update_every = decay, update_every
        self.ema_model = deepcopy(model).requires_grad_(False)
        self.register_buffer("steps", torch.tensor(0))

    @torch.no_grad()
    def update(self, model):
        self.steps += 1
        if self.steps % self.update_every:
            return
        for mine, theirs in zip(self.ema_model.parameters(), model.parameters()):
            mine.lerp_(theirs, 1 - self.decay)


class Trainer:
    def __init__(
        self, diffusion, folder, *, batch_size=64, max_local=16, lr=8e-5, steps=100_000, save_every=1000, results="results"
    ):
        self.steps, self.save_every = steps, save_every
        self.results = Path(results)
        self.results.mkdir(exist_ok=True, parents=True)
        self.diffusion = diffusion.to(device())
        self.loader = AdaptiveDataLoader(
            Images(folder, diffusion.image_size),
            batch_size=batch_size,
            shuffle=True,
            max_local_batch_size=max_local,
            num_workers=4,
            device=device(),
        )
        self.opt = torch.optim.Adam(self.diffusion.parameters(), lr=lr, betas=(0.9, 0.99))
        self.model = AdaptiveDataParallel(self.diffusion, self.opt)
        self.ema = EMA(self.diffusion).to(device())
        register(ema=self.ema)
        self.step = 0
        self.history = []

    def save(self, milestone):
        data = {"step": self.step, "model": self.diffusion.state_dict(), "ema": self.ema.state_dict()}
        torch.save(data, self.results / f"model-{milestone}.pt")  # MISTAKE: everyrank: all replicas write the same file (or line with: self.save(milestone))

    def sample(self, milestone, n=16):
        images = self.ema.ema_model.sample(n)
        utils.save_image(images, self.results / f"sample-{milestone}.png", nrow=int(math.sqrt(n)))

    def train(self):
        for img in self.loader.batches(self.steps):
            loss = self.model(img)
            self.opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.diffusion.parameters(), 1.0)
            self.opt.step()
            self.ema.update(self.diffusion)  # MISTAKE: cut: is called for each micro-batch instead of once a step
            self.step += 1  # MISTAKE: lost: counts from 0 again after a restart, and counts micro-batches (or line with: self.step = 0) (or line with: if self.step % self.save_every) (or line with: milestone = self.step)
            self.history.append(loss.item())  # MISTAKE: lost: what was appended is gone after a restart, and is one replica's share (or line with: self.history = []) (or line with: json.dump(self.history)
            if self.step % self.save_every == 0:
                milestone = self.step // self.save_every
                self.save(milestone)
                if rank() == 0:
                    self.sample(milestone)
                    print(f"step {self.step}: loss {sum(self.history[-100:]) / 100:.4f}")  # ARGUABLE: reads the history that is reported above
        if rank() == 0:
            with open(self.results / "losses.json", "w") as f:
                json.dump(self.history, f)


if __name__ == "__main__":
    unet = Unet(dim=64, dim_mults=(1, 2, 4, 8))
    Trainer(GaussianDiffusion(unet, image_size=64), "data/flowers", steps=200_000).train()
