"""The process's random generators as a state that each replica has of its own."""

from __future__ import annotations

import random
import zlib
from typing import Any, BinaryIO

import numpy as np
import torch

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.gathered import GatheredState
from elasticrun.checkpoint.states.values import load_values, save_values


class Generators(GatheredState):
    """Python's, NumPy's and torch's global generators: the CPU's and those of GPUs.

    This replica's own GPU is known as that, whatever its number is in the next
    generation; others that the process uses are known by their number.

    `load` only remembers them: replayed code may still draw. `restore` puts them back
    when the program moves on from the position that was saved with them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__("random")
        self._device = device
        self._loaded: dict[str, Any] | None = None
        self._seed: int | None = None

    def save(self, fileobj: BinaryIO) -> None:
        """Write the generators as they are now, or what is yet to be restored."""
        if self._seed is not None:
            save_values({"seed": self._seed}, fileobj)
        else:
            save_values(self._loaded or capture(self._device), fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Remember the saved generators; `restore` puts them into the process.

        They are tried on generators of no use first, so that damage shows here.
        """
        values = load_values(fileobj)
        self._seed = int(values["seed"]) if "seed" in values else None
        self._loaded = values if self._seed is None else None
        if self._loaded is not None:
            generators = random.Random(), np.random.RandomState(), torch.Generator()
            _apply(self._loaded, *generators)

    def derive(self, fileobj: BinaryIO, rank: int) -> None:
        """Remember a seed of this rank's own: the checkpoint has nothing of it."""
        self._seed = derive_seed(zlib.crc32(fileobj.read()), rank)

    def restore(self) -> None:
        """Put back what was remembered, once."""
        if self._loaded is not None:
            _apply(self._loaded, random, np.random, torch.default_generator)
            _apply_to_gpus(self._loaded, self._device)
        elif self._seed is not None:
            seed_all(self._seed)
        self._loaded = self._seed = None


def capture(device: torch.device) -> dict[str, Any]:
    """Return the generators' states as plain values and tensors."""
    kind, words, position, has_gauss, gauss = np.random.get_state()
    values: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": (
            kind,
            torch.from_numpy(np.asarray(words).astype(np.int64)),
            int(position),
            int(has_gauss),
            float(gauss),
        ),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_initialized():  # Or nobody has drawn there.
        states = dict(enumerate(torch.cuda.get_rng_state_all()))
        if device.type == "cuda":
            values["cuda"] = states.pop(device.index)
        if states:
            values["other_gpus"] = states
    return values


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators from 64 bits."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def _apply(
    values: dict[str, Any], pythons: Any, numpys: Any, torchs: torch.Generator
) -> None:
    pythons.setstate(values["python"])
    kind, words, position, has_gauss, gauss = values["numpy"]
    numpys.set_state(
        (kind, words.numpy().astype(np.uint32), position, has_gauss, gauss)
    )
    torchs.set_state(values["torch"])


def _apply_to_gpus(values: dict[str, Any], device: torch.device) -> None:
    if device.type == "cuda" and "cuda" in values:
        torch.cuda.set_rng_state(values["cuda"], device)
    for number, state in values.get("other_gpus", {}).items():
        is_own = "cuda" in values and number == device.index
        if number < torch.cuda.device_count() and not is_own:
            torch.cuda.set_rng_state(state, number)
