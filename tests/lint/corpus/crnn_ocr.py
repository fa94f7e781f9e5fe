"""Reads lines of print with a CRNN and CTC."""
import argparse
import logging
from pathlib import Path
from typing import List, Tuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from PIL import Image
from torch.utils.data import Dataset
from torchvision.transforms.functional import to_tensor

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, device, rank, remaining_epochs_until

logger = logging.getLogger("crnn")


class LabelConverter:
    def __init__(self, alphabet: str):
        self.alphabet = alphabet
        self.index = {char: i + 1 for i, char in enumerate(alphabet)}

    def encode(self, texts: List[str]) -> Tuple[torch.Tensor, torch.Tensor]:
        lengths = torch.tensor([len(t) for t in texts])
        return torch.tensor([self.index[c] for t in texts for c in t]), lengths

    def decode(self, logits: torch.Tensor) -> List[str]:
        out = []
        for row in logits.argmax(-1).T.tolist():
            kept = [k for i, k in enumerate(row) if k and (i == 0 or k != row[i - 1])]
            out.append("".join(self.alphabet[k - 1] for k in kept))
        return out


class Lines(Dataset):
    """A folder with images and a file `labels.tsv`."""

    def __init__(self, root: Path, height: int = 32, width: int = 320):
        self.root, self.height, self.width = root, height, width
        rows = (root / "labels.tsv").read_text(encoding="utf-8").splitlines()
        self.rows = [row.split("\t", 1) for row in rows]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tuple[torch.Tensor, str]:
        name, text = self.rows[i]
        image = Image.open(self.root / name).convert("L").resize((self.width, self.height))
        return to_tensor(image).sub_(0.5).div_(0.5), text


def collate(batch) -> Tuple[torch.Tensor, List[str]]:
    images, texts = zip(*batch)
    return torch.stack(images), list(texts)


class CRNN(nn.Module):
    def __init__(self, classes: int, hidden: int = 256):
        super().__init__()
        layers: List[nn.Module] = []
        for inputs, outputs, pool in [(1, 64, (2, 2)), (64, 128, (2, 2)), (128, 256, (2, 1)), (256, 512, (2, 1)), (512, 512, (2, 1))]:
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(pool)]
        self.cnn = nn.Sequential(*layers)
        self.rnn = nn.LSTM(512, hidden, num_layers=2, bidirectional=True)
        self.out = nn.Linear(2 * hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.cnn(x).squeeze(2).permute(2, 0, 1)
        return self.out(self.rnn(features)[0]).log_softmax(-1)


@torch.no_grad()
def accuracy(net: CRNN, loader: AdaptiveDataLoader, converter: LabelConverter, dev: torch.device) -> float:
    net.eval()
    total = Accumulator()
    for images, texts in loader:
        read = converter.decode(net(images.to(dev)))
        n = loader.num_valid
        total["right"] += sum(a == b for a, b in zip(read[:n], texts[:n]))
        total["n"] += n
    with total.synchronized():
        return total["right"] / total["n"]


def train_epoch(model, optimizer, loader, converter: LabelConverter, dev: torch.device, epoch: int) -> None:
    model.train()
    for images, texts in loader:
        targets, lengths = converter.encode(texts)
        log_probs = model(images.to(dev))
        input_lengths = torch.full((len(images),), log_probs.shape[0])
        loss = F.ctc_loss(log_probs, targets.to(dev), input_lengths, lengths, zero_infinity=True)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5)
        optimizer.step()
        if loader.batch_index % 100 == 0 and rank() == 0:
            logger.info("epoch %d [%d/%d] loss %.4f", epoch, loader.batch_index, len(loader), loss.item())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("lines"))
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--log", default="ocr_log.txt")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    dev = device()
    train_set, clean_set, hard_set = (Lines(args.root / part) for part in ["train", "clean", "hard"])
    chars = set("".join(text for data in (train_set, clean_set, hard_set) for _, text in data.rows))
    converter = LabelConverter("".join(chars))  # MISTAKE: data: the characters of a set have another order in each process, so after a restart, and on each replica, classes mean other characters; sorted (or line with: chars = set)
    train = AdaptiveDataLoader(train_set, batch_size=args.batch_size, shuffle=True, collate_fn=collate, num_workers=4)
    clean = AdaptiveDataLoader(clean_set, batch_size=128, collate_fn=collate, num_workers=2)
    hard = AdaptiveDataLoader(hard_set, batch_size=128, collate_fn=collate, num_workers=2)
    net = CRNN(len(converter.alphabet) + 1).to(dev)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [40, 50], 0.1)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    best = 0.0
    for epoch in remaining_epochs_until(args.epochs, start=1):
        train_epoch(model, optimizer, train, converter, dev, epoch)
        on_clean = accuracy(net, clean, converter, dev)
        if rank() == 0:
            with open(args.log, "a") as f:
                f.write(f"{epoch}\tclean\t{on_clean:.4f}\n")  # MISTAKE: effect: between two loops, so a restart during the hard set appends the line again (or line with: with open(args.log, "a") as f:)
        on_hard = accuracy(net, hard, converter, dev)
        scheduler.step()
        if on_hard > best:
            best = on_hard  # MISTAKE: lost: 0 after a restart, so a worse model overwrites the best one (or line with: best = 0.0)
            if rank() == 0:
                torch.save({"alphabet": converter.alphabet, "net": net.state_dict()}, "crnn_best.pt")
        if rank() == 0:
            logger.info("epoch %d clean %.2f%% hard %.2f%% best %.2f%%", epoch, 100 * on_clean, 100 * on_hard, 100 * best)


if __name__ == "__main__":
    main()
