"""Separates voice from music with masks on spectrograms."""
import argparse
import copy
import json
import logging
import time
from pathlib import Path
from typing import Dict, List, Optional

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import Dataset

from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel, Variables, device, rank, remaining_epochs_until

logger = logging.getLogger("demix")


class StemDataset(Dataset):
    """Chunks of songs as (sources, samples); gains are random in training."""

    def __init__(self, root: Path, seconds: float = 4.0, rate: int = 44100, augment: bool = False, seed: int = 42):
        self.files = sorted(root.glob("*.npy"))
        self.length = int(seconds * rate)
        self.augment = augment
        self.rng = np.random.default_rng(seed)  # MISTAKE: rng: a generator of the data set's own, which begins anew with each start and in each worker; use the global ones (or line with: self.rng.integers) (or line with: self.rng.uniform)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> torch.Tensor:
        stems = np.load(self.files[index], mmap_mode="r")
        begin = 0
        if self.augment:
            begin = int(self.rng.integers(0, stems.shape[1] - self.length))
        chunk = torch.from_numpy(np.array(stems[:, begin : begin + self.length], dtype=np.float32))
        if self.augment:
            chunk *= torch.from_numpy(self.rng.uniform(0.25, 1.25, (len(chunk), 1)).astype(np.float32))
        return chunk


class MaskNet(nn.Module):
    def __init__(self, sources: int, n_fft: int = 2048, hidden: int = 256):
        super().__init__()
        self.n_fft, self.sources = n_fft, sources
        bins = n_fft // 2 + 1
        self.rnn = nn.LSTM(bins, hidden, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * hidden, sources * bins)
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, mix: torch.Tensor) -> torch.Tensor:
        spec = torch.stft(mix, self.n_fft, window=self.window, return_complex=True)
        hidden, _ = self.rnn(spec.abs().transpose(1, 2))
        masks = self.out(hidden).sigmoid().view(len(mix), -1, self.sources, spec.shape[1]).permute(0, 2, 3, 1)
        parts = (masks * spec[:, None]).flatten(0, 1)
        wave = torch.istft(parts, self.n_fft, window=self.window, length=mix.shape[-1])
        return wave.view(len(mix), self.sources, -1)


def sdr(reference: torch.Tensor, estimate: torch.Tensor) -> torch.Tensor:
    noise = (reference - estimate).square().sum(-1) + 1e-7
    return 10 * torch.log10(reference.square().sum(-1) / noise + 1e-7)


def remix(stems: torch.Tensor) -> torch.Tensor:
    """Takes each source from another song of the batch."""
    out = stems.clone()
    for source in range(stems.shape[1]):
        out[:, source] = stems[torch.randperm(len(stems)), source]  # ARGUABLE: partners come from the share, so it depends on the cut
    return out


class Solver:
    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.dev = device()
        self.exp_dir = Path(args.out) / time.strftime("%Y%m%d-%H%M%S")  # MISTAKE: name: another folder with each start, and perhaps on each replica (or line with: self.exp_dir.mkdir) (or line with: self.exp_dir / "config.json")
        self.exp_dir.mkdir(parents=True, exist_ok=True)
        if rank() == 0:
            (self.exp_dir / "config.json").write_text(json.dumps(vars(args)))
        root = Path(args.data)
        self.train = AdaptiveDataLoader(StemDataset(root / "train", augment=True), batch_size=args.batch_size, shuffle=True, num_workers=4, drop_last=True)
        self.valid = AdaptiveDataLoader(StemDataset(root / "valid"), batch_size=args.batch_size, even_batches=False)
        self.net = MaskNet(sources=4).to(self.dev)
        self.optimizer = torch.optim.Adam(self.net.parameters(), lr=args.lr)
        self.model = AdaptiveDataParallel(self.net, self.optimizer)
        self.score = Variables(best=float("inf"), epoch=-1)
        self.best_state: Optional[Dict[str, torch.Tensor]] = None

    def train_epoch(self) -> None:
        self.model.train()
        for stems in self.train:
            stems = remix(stems.to(self.dev))
            loss = F.l1_loss(self.model(stems.sum(1)), stems)
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.net.parameters(), 5.0)
            self.optimizer.step()

    @torch.no_grad()
    def valid_epoch(self) -> Dict[str, float]:
        self.net.eval()
        total = Accumulator()
        values: List[float] = []
        for stems in self.valid:
            stems = stems.to(self.dev)
            estimate = self.net(stems.sum(1))
            total["loss"] += F.l1_loss(estimate, stems, reduction="none").mean((1, 2)).sum()
            total["n"] += len(stems)
            values.extend(sdr(stems, estimate).mean(1).tolist())  # MISTAKE: sum: the median is over one replica's songs, and only over those since the restart (or line with: values: List[float] = []) (or line with: np.median(values))
        with total.synchronized():
            loss = total["loss"] / total["n"]
        return {"loss": loss, "sdr": float(np.median(values))}

    def run(self) -> None:
        for epoch in remaining_epochs_until(self.args.epochs):
            self.train_epoch()
            metrics = self.valid_epoch()
            if metrics["loss"] < self.score.best:
                self.score.best, self.score.epoch = metrics["loss"], epoch
                self.best_state = copy.deepcopy(self.net.state_dict())  # MISTAKE: lost: the best weights are kept in memory only, None after a restart (or line with: self.best_state: Optional) (or line with: self.net.load_state_dict(self.best_state))
            if rank() == 0:
                logger.info("epoch %d: loss %.4f, sdr %.2f dB", epoch, metrics["loss"], metrics["sdr"])  # ARGUABLE: marked where it is filled
        self.net.load_state_dict(self.best_state)
        if rank() == 0:
            torch.save(self.net.state_dict(), self.exp_dir / "best.th")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="musdb")
    parser.add_argument("--out", default="experiments")
    parser.add_argument("--epochs", type=int, default=180)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-4)
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.manual_seed(0)
    Solver(args).run()


if __name__ == "__main__":
    main()
