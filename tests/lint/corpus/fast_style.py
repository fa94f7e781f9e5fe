"""Fast neural style (pytorch/examples/fast_neural_style), as one elastic script."""
import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, device, rank
from elasticrun import remaining_epochs_until


class Coco(Dataset):
    def __init__(self, root, size):
        self.paths = sorted(Path(root).rglob("*.pt"))
        self.size = size

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, index):
        image = torch.load(self.paths[index]).float()
        return F.interpolate(image[None], (self.size, self.size), mode="bilinear")[0]


class ConvLayer(nn.Module):
    def __init__(self, i, o, k, stride):
        super().__init__()
        self.pad = nn.ReflectionPad2d(k // 2)
        self.conv = nn.Conv2d(i, o, k, stride)

    def forward(self, x):
        return self.conv(self.pad(x))


class TransformerNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Sequential(
            ConvLayer(3, 32, 9, 1), nn.InstanceNorm2d(32, affine=True), nn.ReLU(),
            ConvLayer(32, 64, 3, 2), nn.InstanceNorm2d(64, affine=True), nn.ReLU(),
        )
        self.up = nn.Sequential(
            nn.Upsample(scale_factor=2), ConvLayer(64, 32, 3, 1),
            nn.InstanceNorm2d(32, affine=True), nn.ReLU(), ConvLayer(32, 3, 9, 1),
        )

    def forward(self, x):
        return self.up(self.down(x))


class Features(nn.Module):
    """The first blocks of a frozen VGG, from a file."""

    def __init__(self, path):
        super().__init__()
        self.relu1 = nn.Sequential(nn.Conv2d(3, 64, 3, 1, 1), nn.ReLU())
        self.relu2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(64, 128, 3, 1, 1), nn.ReLU())
        self.load_state_dict(torch.load(path, map_location="cpu"))
        self.requires_grad_(False)

    def forward(self, x):
        h1 = self.relu1(x)
        return h1, self.relu2(h1)


def gram_matrix(y):
    b, ch, h, w = y.size()
    features = y.view(b, ch, w * h)
    return features.bmm(features.transpose(1, 2)) / (ch * h * w)


def train(args):
    torch.manual_seed(args.seed)
    os.makedirs(args.checkpoint_dir, exist_ok=True)
    loader = AdaptiveDataLoader(
        Coco(args.dataset, args.image_size), batch_size=args.batch_size,
        shuffle=True, drop_last=True, num_workers=2, device=device(),
    )
    transformer = TransformerNet().to(device())
    optimizer = torch.optim.Adam(transformer.parameters(), args.lr)
    model = AdaptiveDataParallel(transformer, optimizer)
    if args.init_weights:
        transformer.load_state_dict(torch.load(args.init_weights, map_location=device()))  # MISTAKE: zoneP: runs after the model was registered, at every start, and wins over the checkpoint: each restart puts the initial weights back

    vgg = Features(args.vgg).to(device())
    style = torch.load(args.style_image).float().to(device())
    gram_style = [gram_matrix(y) for y in vgg(style[None])]
    log = LogFile(os.path.join(args.checkpoint_dir, "losses.txt"))
    agg = Accumulator(name="losses")
    start = time.time()

    for e in remaining_epochs_until(args.epochs):
        model.train()
        for batch_id, x in enumerate(loader):  # MISTAKE: enum: counts from 0 again where a restart continues in the epoch, so the style weight ramps up again and checkpoint files get other batches' names (or line with: ramp = min(1.0, (e * len(loader) + batch_id) / args.ramp)) (or line with: if (batch_id + 1) % args.checkpoint_interval == 0:)
            n_batch = len(x)
            y = model(x)
            features_y, features_x = vgg(y), vgg(x)
            content_loss = args.content_weight * F.mse_loss(features_y[1], features_x[1])
            style_loss = 0.0
            for ft_y, gm_s in zip(features_y, gram_style):
                style_loss += F.mse_loss(gram_matrix(ft_y), gm_s.expand(n_batch, -1, -1))
            ramp = min(1.0, (e * len(loader) + batch_id) / args.ramp)
            style_loss = style_loss * args.style_weight * ramp
            tv_loss = args.tv_weight * (
                torch.sum(torch.abs(y[..., :, :-1] - y[..., :, 1:]))
                + torch.sum(torch.abs(y[..., :-1, :] - y[..., 1:, :]))
            )
            total_loss = content_loss + style_loss + tv_loss
            optimizer.zero_grad()
            total_loss.backward()  # MISTAKE: weigh: the TV loss is a sum over the replica's images, so its weight against the two means falls with the number of replicas; needs model.weigh(tv_loss, reduction="sum") (or line with: tv_loss = args.tv_weight * () (or line with: torch.sum(torch.abs(y) (or line with: total_loss = content_loss + style_loss + tv_loss)
            optimizer.step()
            agg["content"] += content_loss.item() * loader.num_valid
            agg["style"] += style_loss.item() * loader.num_valid
            agg["n"] += loader.num_valid

            if (batch_id + 1) % args.checkpoint_interval == 0:
                if rank() == 0:
                    path = os.path.join(args.checkpoint_dir, f"ckpt_epoch_{e}_batch_id_{batch_id + 1}.pth")
                    torch.save(transformer.state_dict(), path)

        with agg.synchronized():
            log.write(f"{e}\t{agg['content'] / agg['n']:.6f}\t{agg['style'] / agg['n']:.6f}\n")
            agg.clear()
        if rank() == 0:
            print(f"{time.ctime()}\tEpoch {e + 1} done, {time.time() - start:.0f} s in this process")

    if rank() == 0:
        torch.save(transformer.state_dict(), os.path.join(args.checkpoint_dir, "style.model"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--style-image", default="images/mosaic.pt")
    parser.add_argument("--vgg", default="vgg.pt")
    parser.add_argument("--init-weights", default=None)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--image-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--content-weight", type=float, default=1e5)
    parser.add_argument("--style-weight", type=float, default=1e10)
    parser.add_argument("--tv-weight", type=float, default=1e-6)
    parser.add_argument("--ramp", type=int, default=1000)
    parser.add_argument("--checkpoint-interval", type=int, default=2000)
    parser.add_argument("--checkpoint-dir", default="checkpoints")
    parser.add_argument("--seed", type=int, default=42)
    sys.exit(train(parser.parse_args()))
