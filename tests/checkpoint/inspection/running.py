"""Directories to look into, and the command run in this process."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from elasticrun import Variables, register, save_all_states
from elasticrun.__main__ import main
from tests.support.generations import run_once


class Said(NamedTuple):
    """What a command printed, and its exit code."""

    code: int
    output: str
    errors: str

    @property
    def values(self) -> Any:
        return json.loads(self.output)

    @property
    def lines(self) -> list[str]:
        return self.output.splitlines()


def run(*words: object) -> Said:
    """Run `elasticrun checkpoints` with these words."""
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        code = main(["checkpoints", *map(str, words)])
    return Said(code, output.getvalue(), errors.getvalue())


def make_model(value: float = 0.0) -> nn.Linear:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    nn.init.constant_(model.bias, -value)
    return model


def save_some(directory: Path, *values: float, **settings: Any) -> None:
    """Save a checkpoint for each value, which the model's weights then have."""

    def script() -> None:
        model = make_model()
        register(model=model)
        best = Variables(accuracy=0.0, note="start")
        for value in values:
            with torch.no_grad():
                model.weight.fill_(value)
                model.bias.fill_(-value)
            best.accuracy = value
            save_all_states()

    run_once(script, directory, keep=9, **settings)


def flip_byte(path: Path, position: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)
