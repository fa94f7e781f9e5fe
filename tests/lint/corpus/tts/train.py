"""A small text-to-speech model: mels from letters, without attention over mels."""
import argparse
import csv
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F
from data import SYMBOLS, TextMelDataset, collate
from utils import Checkpointer, NoamLR, get_logger, lengths_to_mask

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, LogFile, Variables, device, once, rank, remaining_epochs_until


class TextToMel(nn.Module):
    def __init__(self, dim: int = 256, mels: int = 80):
        super().__init__()
        self.embedding = nn.Embedding(len(SYMBOLS), dim, padding_idx=0)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True), 4)
        self.decoder = nn.GRU(dim + mels, dim, num_layers=2, batch_first=True)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.prenet = nn.Linear(mels, dim)
        self.out = nn.Linear(dim, mels)

    def forward(self, texts: torch.Tensor, mels: torch.Tensor) -> torch.Tensor:
        memory = self.encoder(self.embedding(texts), src_key_padding_mask=texts == 0)
        before = F.pad(mels, (0, 0, 1, 0))[:, :-1]
        context, _ = self.attention(self.prenet(before), memory, memory, key_padding_mask=texts == 0)
        hidden, _ = self.decoder(torch.cat([context, before], -1))
        return self.out(hidden)


def masked_l1(predicted: torch.Tensor, mels: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The sum of the frames' mean errors."""
    mask = lengths_to_mask(lengths, mels.shape[1])
    return ((predicted - mels).abs().mean(-1) * mask).sum()


class Trainer:
    def __init__(self, args: argparse.Namespace):
        self.args, self.device = args, device()
        self.logger = get_logger("tts")
        self.checkpointer = Checkpointer(args.out)
        self.train_loader = AdaptiveDataLoader(TextMelDataset(args.root, True), batch_size=args.batch_size, shuffle=True, drop_last=True, collate_fn=collate, num_workers=4, name="train")
        self.valid_loader = AdaptiveDataLoader(TextMelDataset(args.root, False), batch_size=32, collate_fn=collate, name="valid")
        self.net = TextToMel().to(self.device)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=args.lr, betas=(0.9, 0.98))
        self.scheduler = NoamLR(self.optimizer, args.warmup)
        self.model = AdaptiveDataParallel(self.net, self.optimizer, self.scheduler)
        self.state = Variables(best=float("inf"), bad_epochs=0, steps=0)
        self.rows = csv.writer(LogFile(args.out / "log.csv"))
        self.rows.writerow(["step", "train", "valid"])

    def train_epoch(self) -> float:
        self.model.train()
        total = Accumulator()
        for texts, mels, lengths in self.train_loader:
            texts, mels, lengths = texts.to(self.device), mels.to(self.device), lengths.to(self.device)
            frames = lengths.sum()
            loss = masked_l1(self.model(texts, mels), mels, lengths) / frames
            self.optimizer.zero_grad()
            self.model.weigh(loss, count=frames).backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.state.steps += 1
            total["loss"] += loss.detach() * frames
            total["frames"] += frames
        with total.synchronized():
            return total["loss"] / total["frames"]

    @torch.no_grad()
    def validate(self) -> float:
        self.net.eval()
        total = Accumulator()
        for texts, mels, lengths in self.valid_loader:
            n = self.valid_loader.num_valid
            if n == 0:
                continue
            texts, mels, lengths = texts[:n].to(self.device), mels[:n].to(self.device), lengths[:n].to(self.device)
            total["loss"] += masked_l1(self.net(texts, mels), mels, lengths)
            total["frames"] += lengths.sum()
        with total.synchronized():
            return total["loss"] / total["frames"]

    def fit(self) -> None:
        for epoch in remaining_epochs_until(self.args.epochs):
            if once("epoch") and rank() == 0:
                print(f"epoch {epoch} begins at step {self.state.steps}")
            train_loss = self.train_epoch()
            valid_loss = self.validate()
            improved = valid_loss < self.state.best
            self.state.bad_epochs = 0 if improved else self.state.bad_epochs + 1
            if improved:
                self.state.best = valid_loss
                self.checkpointer.save(self.net, "best", epoch=epoch, loss=valid_loss)
            self.checkpointer.save(self.net, "last", epoch=epoch, loss=valid_loss)
            self.rows.writerow([self.state.steps, f"{train_loss:.4f}", f"{valid_loss:.4f}"])
            self.logger.info("epoch %d train %.4f valid %.4f (%d bad)", epoch, train_loss, valid_loss, self.state.bad_epochs)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", type=Path, default=Path("LJSpeech-1.1"))
    parser.add_argument("--out", type=Path, default=Path("tts-out"))
    parser.add_argument("--epochs", type=int, default=500)
    parser.add_argument("--batch-size", type=int, default=48)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=4000)
    args = parser.parse_args()
    torch.manual_seed(0)
    Trainer(args).fit()


if __name__ == "__main__":
    main()
