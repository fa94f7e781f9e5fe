"""States and plain variables as fields that can be compared."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elasticrun.check.replica.fields import flatten, plain_variables


def test_nested_values_become_fields() -> None:
    values = {"groups": [{"lr": 0.1, "betas": (0.9, 0.99)}], "steps": [1, 2], "x": None}
    assert dict(flatten("opt", values)) == {
        "len(opt.groups)": 1,
        "opt.groups[0].lr": 0.1,
        "opt.groups[0].betas": [0.9, 0.99],
        "opt.steps": [1, 2],
        "opt.x": None,
    }


HERE = str(Path(__file__).parent)  # What stands for the program's folder.
_CACHE: dict[str, torch.Tensor] = {}


class Rows(Dataset[Any]):
    def __init__(self) -> None:
        self.labels = np.zeros(3)


def counter() -> Callable[[], int]:
    count = 0

    def next_number() -> int:
        nonlocal count
        count += 1
        return count

    return next_number


def test_what_a_restart_would_lose_is_seen() -> None:
    numbers, rows, seen, count = np.random.default_rng(0), Rows(), {}, counter()
    old, python, own = np.random.RandomState(0), random.Random(0), torch.Generator()
    loader = DataLoader(TensorDataset(torch.zeros(3)))
    nested = {"a": [torch.zeros(1)], "b": 1}
    last, kept = deque([torch.zeros(1)]), torch.nn.Linear(1, 1)
    registered = {id(kept)}
    doubled = lru_cache(lambda number: 2 * number)

    def changed_by(change: Callable[[], Any]) -> list[str]:
        before = plain_variables(HERE, registered=registered)
        change()
        after = plain_variables(HERE, registered=registered)
        return [
            name.replace("test_what_a_restart_would_lose_is_seen.", "")
            for name in after
            if after[name] != before.get(name) and "changed_by" not in name
        ]

    assert changed_by(list) == []
    assert changed_by(numbers.random) == ["numbers"]
    assert changed_by(old.rand) == ["old"]
    assert changed_by(python.random) == ["python"]
    assert changed_by(partial(torch.rand, 1, generator=own)) == ["own"]
    assert changed_by(partial(seen.update, x=1.0)) == ["len(seen)", "seen.x"]
    assert changed_by(partial(rows.labels.fill, 1)) == ["rows.labels"]
    data = loader.dataset.tensors[0]
    assert changed_by(partial(data.fill_, 1)) == ["loader.dataset.tensors[0]"]
    assert changed_by(partial(nested["a"][0].fill_, 1)) == ["nested['a'][0]"]
    assert changed_by(partial(last.append, 1)) == ["len(last)", "last[1]"]
    beside = ["len(kept.__dict__)", "kept.steps"]
    assert changed_by(partial(setattr, kept, "steps", 1)) == beside
    assert changed_by(partial(count)) == ["count.count"]
    assert changed_by(partial(doubled, 2)) == ["len(doubled)"]
    cached = [f"len({__name__}._CACHE)", f"{__name__}._CACHE['x']"]
    change = partial(_CACHE.update, x=torch.zeros(1))
    assert changed_by(change) == cached
    assert list(plain_variables(HERE, registered=(), only=cached[:1])) == cached
