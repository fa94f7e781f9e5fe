"""Texts and mel spectrograms of LJ Speech."""
from pathlib import Path
from typing import List, Tuple

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

SYMBOLS = "_~ abcdefghijklmnopqrstuvwxyz'.,!?-"


def text_to_sequence(text: str) -> List[int]:
    return [SYMBOLS.index(c) for c in text.lower() if c in SYMBOLS] + [1]


class TextMelDataset(Dataset):
    """Mels are stored beside the wave files; too long ones are left out."""

    def __init__(self, root: Path, training: bool, max_frames: int = 800, held_out: int = 100):
        paths = sorted(root.glob("mels/*.npy"))
        texts = dict(line.split("|", 1) for line in (root / "metadata.csv").read_text(encoding="utf-8").splitlines())
        generator = np.random.default_rng(1234)
        order = generator.permutation(len(paths))
        chosen = order[held_out:] if training else order[:held_out]
        self.items = [(paths[i], texts[paths[i].stem]) for i in chosen]
        self.max_frames = max_frames

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Tuple[torch.Tensor, torch.Tensor]:
        path, text = self.items[index]
        mel = torch.from_numpy(np.load(path))[: self.max_frames]
        return torch.tensor(text_to_sequence(text)), mel


def collate(batch):
    texts, mels = zip(*batch)
    lengths = torch.tensor([len(mel) for mel in mels])
    return pad_sequence(texts, True), pad_sequence(mels, True), lengths
