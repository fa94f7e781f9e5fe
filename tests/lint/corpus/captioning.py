"""Show, attend and tell: captions of images with attention."""
import argparse
import json
import os
from typing import List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from nltk.translate.bleu_score import corpus_bleu
from PIL import Image
from torch.utils.data import Dataset
from torchvision import models, transforms

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

PAD, START, END = 0, 1, 2


class CaptionDataset(Dataset):
    def __init__(self, folder: str, split: str):
        with open(os.path.join(folder, f"{split}.json")) as f:
            self.rows = json.load(f)
        self.folder = folder
        self.transform = transforms.Compose([transforms.Resize((256, 256)), transforms.ToTensor(), transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))])

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tuple[torch.Tensor, torch.Tensor]:
        row = self.rows[i]
        image = self.transform(Image.open(os.path.join(self.folder, row["image"])).convert("RGB"))
        return image, torch.tensor(row["caption"])


class Captioner(nn.Module):
    def __init__(self, vocab: int, dim: int = 512):
        super().__init__()
        self.cnn = nn.Sequential(*list(models.resnet50(weights="DEFAULT").children())[:-2])
        self.embedding = nn.Embedding(vocab, dim, padding_idx=PAD)
        self.query, self.key = nn.Linear(dim, dim), nn.Linear(2048, dim)
        self.cell = nn.LSTMCell(dim + 2048, dim)
        self.fc = nn.Linear(dim, vocab)
        self.dim = dim

    def forward(self, images: torch.Tensor, captions: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        pixels = self.cnn(images).flatten(2).transpose(1, 2)
        keys = self.key(pixels)
        h = c = images.new_zeros(len(images), self.dim)
        scores, alphas = [], []
        for t in range(captions.shape[1] - 1):
            alpha = (keys * self.query(h)[:, None]).sum(-1).softmax(1)
            context = (alpha[:, :, None] * pixels).sum(1)
            h, c = self.cell(torch.cat([self.embedding(captions[:, t]), context], 1), (h, c))
            scores.append(self.fc(F.dropout(h, 0.5, self.training)))
            alphas.append(alpha)
        return torch.stack(scores, 1), torch.stack(alphas, 1)


def adjust_learning_rate(optimizer: torch.optim.Optimizer, shrink_factor: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * shrink_factor  # ARGUABLE: in front of the loops, but states come back where the replay ends
    if rank() == 0:
        print(f"DECAYING learning rate, the new one is {optimizer.param_groups[0]['lr']:f}")  # ARGUABLE: a print in front of a loop is repeated


def save_checkpoint(epoch: int, net: nn.Module, bleu4: float, is_best: bool) -> None:
    state = {"epoch": epoch, "bleu-4": bleu4, "net": net.state_dict()}
    torch.save(state, "checkpoint_coco.pth.tar")  # MISTAKE: everyrank: all replicas write one file at once (or line with: torch.save(state, "BEST_checkpoint) (or line with: save_checkpoint(epoch, net, bleu4, is_best))
    if is_best:
        torch.save(state, "BEST_checkpoint_coco.pth.tar")  # ARGUABLE: the same, marked above


def train(model, optimizer, loader, dev) -> None:
    model.train()
    for images, captions in loader:
        images, captions = images.to(dev), captions.to(dev)
        scores, alphas = model(images, captions)
        targets = captions[:, 1:]
        count = (targets != PAD).sum()
        loss = F.cross_entropy(scores.flatten(0, 1), targets.flatten(), ignore_index=PAD, reduction="sum") / count.clamp(min=1)
        regularization = ((1.0 - alphas.sum(1)) ** 2).mean()
        optimizer.zero_grad()
        (model.weigh(loss, count=count) + model.weigh(regularization)).backward()
        nn.utils.clip_grad_value_(model.parameters(), 5.0)
        optimizer.step()


@torch.no_grad()
def validate(net, loader, dev) -> Tuple[float, float]:
    net.eval()
    total = Accumulator()
    references: List[list] = []
    hypotheses: List[list] = []
    for images, captions in loader:
        scores, _ = net(images.to(dev), captions.to(dev))
        scores, gold = scores[: loader.num_valid].cpu(), captions[: loader.num_valid, 1:]
        total["right"] += ((scores.argmax(2) == gold) & (gold != PAD)).sum()
        total["tokens"] += (gold != PAD).sum()
        for row, words in zip(scores.argmax(2).tolist(), gold.tolist()):
            length = words.index(END) if END in words else len(words)
            references.append([words[:length]])  # MISTAKE: sum: lists over a loop that may be continued, of one replica's samples; BLEU is not that of all (or line with: references: List) (or line with: hypotheses.append) (or line with: hypotheses: List) (or line with: bleu4 = corpus_bleu)
            hypotheses.append(row[:length])
    with total.synchronized():
        accuracy = total["right"] / total["tokens"]
    bleu4 = corpus_bleu(references, hypotheses)
    return accuracy, bleu4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-folder", default="caption_data")
    parser.add_argument("--epochs", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--fine-tune-from", type=int, default=20)
    args = parser.parse_args()
    torch.manual_seed(0)
    dev = device()
    with open(os.path.join(args.data_folder, "WORDMAP.json")) as f:
        word_map = json.load(f)
    train_loader = AdaptiveDataLoader(CaptionDataset(args.data_folder, "TRAIN"), batch_size=args.batch_size, shuffle=True, num_workers=4)
    val_loader = AdaptiveDataLoader(CaptionDataset(args.data_folder, "VAL"), batch_size=args.batch_size, num_workers=4)
    net = Captioner(len(word_map)).to(dev)
    optimizer = torch.optim.Adam(net.parameters(), lr=4e-4)
    model = AdaptiveDataParallel(net, optimizer)
    epochs_since_improvement = 0
    best_bleu4 = 0.0
    for epoch in remaining_epochs_until(args.epochs):
        net.cnn.requires_grad_(epoch >= args.fine_tune_from)
        if epochs_since_improvement == 20:  # ARGUABLE: the count is marked below
            break  # ARGUABLE: the count, which is marked below, decides whether the epoch's loops come
        if epochs_since_improvement > 0 and epochs_since_improvement % 8 == 0:  # ARGUABLE: the count is marked below
            adjust_learning_rate(optimizer, 0.8)  # ARGUABLE: in front of the loops, but states come back where the replay ends
        train(model, optimizer, train_loader, dev)
        accuracy, bleu4 = validate(net, val_loader, dev)
        is_best = bleu4 > best_bleu4
        best_bleu4 = max(bleu4, best_bleu4)  # MISTAKE: lost: 0 after a restart, so the next model counts as the best (or line with: best_bleu4 = 0.0) (or line with: is_best = bleu4)
        if not is_best:
            epochs_since_improvement += 1  # MISTAKE: lost: 0 again after a restart, so the learning rate falls later and training ends later (or line with: epochs_since_improvement = 0)
        else:
            epochs_since_improvement = 0
        if rank() == 0:
            print(f"epoch {epoch}: accuracy {accuracy:.3f}, BLEU-4 {bleu4:.4f}, {epochs_since_improvement} epochs since improvement")  # ARGUABLE: marked where lists are filled
        save_checkpoint(epoch, net, bleu4, is_best)


if __name__ == "__main__":
    main()
