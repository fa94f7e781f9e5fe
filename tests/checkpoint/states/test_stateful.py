"""An empty state of what has something to lose is warned of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticrun import CheckpointWarning, register, save_all_states
from tests.support.generations import run_once


class Forgetful:
    """Has something to lose, and an empty state."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        del state_dict


def not_persistent() -> nn.Module:
    module = nn.Module()
    module.register_buffer("count", torch.zeros(1), persistent=False)
    return module


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: Forgetful(count=1), "count"),
        (lambda: Forgetful(sums=torch.ones(1)), "sums"),
        (not_persistent, "count"),
    ],
)
def test_an_empty_state_of_what_has_something_to_lose_is_warned_of(
    tmp_path: Path, make: Any, name: str
) -> None:
    def script() -> None:
        register(it=make())
        save_all_states()
        save_all_states()

    with pytest.warns(CheckpointWarning) as caught:
        run_once(script, tmp_path)
    assert [
        f"though it has {name}. It begins anew" in str(w.message) for w in caught
    ] == [True]


@pytest.mark.parametrize(
    "make",
    [
        nn.ReLU,
        lambda: nn.Dropout(0.5),
        lambda: torch.amp.GradScaler("cpu", enabled=False),
        lambda: Forgetful(is_on=True, name="x"),
    ],
)
def test_an_empty_state_of_what_has_nothing_to_lose_is_fine(
    tmp_path: Path, make: Any
) -> None:
    def script() -> None:
        register(it=make())
        save_all_states()

    run_once(script, tmp_path)
