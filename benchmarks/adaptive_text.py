"""Train a small language model with batches of fixed and of growing sizes.

    python benchmarks/adaptive_text.py [--replicas N] [--seeds N]

It reads pieces of 32 characters of Python's standard library, and tells each character
from those before it: a convolutional net of 66 thousand parameters, trained by SGD with
momentum. The cases and figures are those of adaptive.py; the goal is a held-out loss of
1.77 nats a character.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path
from typing import Any

import torch
from adaptive import Look, Task, main
from torch import Tensor, nn
from torch.nn.functional import gelu, pad
from torch.utils.data import Dataset, TensorDataset

LENGTH, WIDTH, NUM_LETTERS = 32, 64, 128
NUM_HELD_OUT, NUM_TRAIN = 1024, 5000


class Net(nn.Module):
    """Sees the 9 characters before each one."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(NUM_LETTERS, WIDTH)
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 4) for _ in range(3))
        self.output = nn.Linear(WIDTH, NUM_LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        x = self.letters(x).transpose(1, 2)
        for layer in self.layers:
            x = x + gelu(layer(pad(x, (3, 0))))
        output: Tensor = self.output(x.transpose(1, 2))
        return output


def make_text() -> tuple[Dataset[Any], Tensor, Tensor, nn.Module]:
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "".join(path.read_text(errors="replace") for path in paths)
    letters = torch.tensor(list(text.encode("ascii", "replace")))
    letters = letters[: len(letters) // (LENGTH + 1) * (LENGTH + 1)]
    pieces = letters.reshape(-1, LENGTH + 1)
    order = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(0))
    held_out = pieces[order[:NUM_HELD_OUT]]
    trained = pieces[order[NUM_HELD_OUT : NUM_HELD_OUT + NUM_TRAIN]]
    data = TensorDataset(trained[:, :-1], trained[:, 1:])
    return data, held_out[:, :-1], held_out[:, 1:], Net()


def is_good(look: Look) -> bool:
    return look["loss"] <= 1.77


TEXT = Task("text", make_text, is_good, 3, NUM_TRAIN, rate=0.03, first=8)

if __name__ == "__main__":
    main(TEXT, str(__doc__))
