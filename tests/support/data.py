"""Toy data sets, whose samples tell which they are and what was drawn for them."""

from __future__ import annotations

import os
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

import elasticrun


class Numbers(Dataset[int]):
    """Sample i is the number i; any length costs nothing."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class NumbersByBatch:
    """Read by lists of indices alone, as data bases are."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[int]:
        return indices


class Draws(Numbers):
    """Sample i is i, with a number from each generator that a transform may use."""

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(
            [index, random.random(), np.random.rand(), torch.rand(()).item()],
            dtype=torch.float64,
        )


class Workers(Numbers):
    """Sample i is i, with the process id of the worker that read it (-1 without)."""

    def __getitem__(self, index: int) -> Any:
        return index, -1 if get_worker_info() is None else os.getpid()


class AskingForTheJob(Numbers):
    """Reads elasticrun's job where there is none."""

    def __getitem__(self, index: int) -> int:
        return elasticrun.rank()


def batches_of(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def samples_of(loader: Any) -> list[int]:
    return [int(sample) for batch in loader for sample in batch]
