"""Contrastive training of images and captions, with negatives of all replicas."""
import argparse
import json
import math
from pathlib import Path
from typing import List, Tuple

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset
from torchvision import models, transforms

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, device, init, rank, remaining_epochs_until, world_size


class Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows):
        parts = [torch.empty_like(rows) for _ in range(world_size())]
        dist.all_gather(parts, rows.contiguous())
        return torch.stack(parts)

    @staticmethod
    def backward(ctx, gradient):
        total = gradient.contiguous()
        dist.all_reduce(total)
        return total[dist.get_rank()]


def gather(rows: torch.Tensor, num_valid: int) -> Tuple[torch.Tensor, int]:
    """Return the real rows of all replicas, and where those of this one begin."""
    if world_size() == 1:
        return rows, 0
    lengths = [None] * world_size()
    dist.all_gather_object(lengths, num_valid)
    padding = rows.new_zeros(max(lengths) + 1 - len(rows), *rows.shape[1:])
    parts = Gather.apply(torch.cat([rows, padding]))
    real = torch.cat([part[:n] for part, n in zip(parts, lengths)])
    return real, sum(lengths[: dist.get_rank()])


class Captions(Dataset):
    def __init__(self, root: Path, words: dict, train: bool, length: int = 32):
        self.root, self.words, self.length, self.train = root, words, length, train
        self.rows = json.loads((root / ("train.json" if train else "val.json")).read_text())
        crop = transforms.RandomResizedCrop(224, (0.9, 1.0)) if train else transforms.CenterCrop(224)
        self.transform = transforms.Compose([transforms.Resize(256), crop, transforms.ToTensor(), transforms.Normalize((0.48, 0.46, 0.41), (0.27, 0.26, 0.28))])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tuple[torch.Tensor, torch.Tensor]:
        row = self.rows[i]
        image = self.transform(Image.open(self.root / row["file"]).convert("RGB"))
        choice = int(torch.randint(len(row["captions"]), ())) if self.train else 0
        ids = [self.words.get(w, 1) for w in row["captions"][choice].lower().split()][: self.length]
        return image, torch.tensor(ids + [0] * (self.length - len(ids)))


class CLIP(nn.Module):
    def __init__(self, num_words: int, dim: int = 256):
        super().__init__()
        self.visual = models.vit_b_16(num_classes=dim)
        self.embedding = nn.Embedding(num_words, dim, padding_idx=0)
        layer = nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True)
        self.text = nn.TransformerEncoder(layer, 4)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, images: torch.Tensor, ids: torch.Tensor):
        words = self.text(self.embedding(ids), src_key_padding_mask=ids == 0)
        text = (words * (ids != 0)[..., None]).sum(1) / (ids != 0).sum(1, keepdim=True).clamp(min=1)
        return F.normalize(self.visual(images), dim=-1), F.normalize(text, dim=-1), self.logit_scale.exp()


def build_words(captions: List[str]) -> dict:
    words = sorted(set(w for caption in captions for w in caption.lower().split()))
    return {w: i + 2 for i, w in enumerate(words)}


@torch.no_grad()
def validate(net: CLIP, loader: AdaptiveDataLoader, dev: torch.device) -> float:
    """The mean cosine of pairs that belong together."""
    net.eval()
    total = Accumulator()
    for images, ids in loader:
        image, text, _ = net(images.to(dev), ids.to(dev))
        total["cosine"] += (image * text).sum(-1)[: loader.num_valid].sum()
        total["n"] += loader.num_valid
    with total.synchronized():
        return total["cosine"] / total["n"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("coco"))
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=1024)
    parser.add_argument("--lr", type=float, default=5e-4)
    args = parser.parse_args()
    init()
    torch.manual_seed(0)
    dev = device()
    texts = [c for row in json.loads((args.root / "train.json").read_text()) for c in row["captions"]]
    words = build_words(texts)
    train = AdaptiveDataLoader(Captions(args.root, words, True), batch_size=args.batch_size, shuffle=True, drop_last=True, num_workers=8)
    valid = AdaptiveDataLoader(Captions(args.root, words, False), batch_size=256, num_workers=4)
    net = CLIP(len(words) + 2).to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(train))
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    log = LogFile("clip.log")
    for epoch in remaining_epochs_until(args.epochs):
        model.train()
        for images, ids in train:
            image, text, scale = model(images.to(dev), ids.to(dev))
            images_of_all, begin = gather(image, train.num_valid)
            texts_of_all, _ = gather(text, train.num_valid)
            own = torch.arange(len(image), device=dev) + begin
            loss = (F.cross_entropy(scale * image @ texts_of_all.T, own) + F.cross_entropy(scale * text @ images_of_all.T, own)) / 2
            optimizer.zero_grad()
            model.weigh(loss).backward()
            optimizer.step()
            scheduler.step()
            with torch.no_grad():
                net.logit_scale.clamp_(0, math.log(100))
        cosine = validate(net, valid, dev)
        log.write(f"{epoch} {cosine:.4f} {net.logit_scale.exp().item():.2f}\n")
        if rank() == 0:
            torch.save(net.state_dict(), f"clip_{epoch:02d}.pt")


if __name__ == "__main__":
    main()
