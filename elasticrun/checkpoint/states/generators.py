"""The random generators of a process, saved by each replica for itself."""

from __future__ import annotations

import ctypes
import random
import struct
import zlib
from collections.abc import Callable
from typing import Any, BinaryIO

import numpy as np
import torch

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.gathered import GatheredState
from elasticrun.checkpoint.states.values import load_values, save_values

_MT19937_BYTES = 2500  # 624 words and a position, as NumPy's C code has them.


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
        self._glance = _Glance()

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

    def remember(self) -> Callable[[], None]:
        if self._loaded is not None or self._seed is not None:
            return lambda: None  # What is yet to be restored stays as it is.
        values = self._glance.look(self._device)
        return lambda: _apply_all(values, self._device)

    def restore(self) -> None:
        """Put back what was remembered, once."""
        if self._loaded is not None:
            _apply_all(self._loaded, self._device)
        elif self._seed is not None:
            seed_all(self._seed)
        self._loaded = self._seed = None


def capture(
    device: torch.device,
    *,
    python_state: tuple[Any, ...] | None = None,
    numpy_state: tuple[Any, ...] | None = None,
) -> dict[str, Any]:
    """Return the generators' states as plain values and tensors.

    Args:
        python_state: That of Python's, if it is known.
        numpy_state: That of NumPy's, if it is known.
    """
    values: dict[str, Any] = {
        "python": python_state or random.getstate(),
        "numpy": numpy_state or _numpy_state(),
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


class _Glance:
    """Reads the generators at each boundary, and only those that were drawn from.

    To read Python's and NumPy's takes longer than all else. Both are a Mersenne Twister
    in memory: a look at its 2,500 bytes tells whether it was drawn from. Both may also
    keep a second normal number for the next call, and are read as long as they do.
    """

    def __init__(self) -> None:
        self._python = _Seen(_address_of_python(), random.getstate)
        self._numpy = _Seen(_address_of_numpy(), _numpy_state)

    def look(self, device: torch.device) -> dict[str, Any]:
        """Return what `capture` does."""
        return capture(
            device,
            python_state=self._python.read(has_kept=lambda state: state[2] is not None),
            numpy_state=self._numpy.read(has_kept=lambda state: bool(state[3])),
        )


class _Seen:
    """A generator's state, read again only if its memory has changed.

    Args:
        address: Where that is; None where it is not known.
        read: Reads the state.
    """

    def __init__(
        self, address: int | None, read: Callable[[], tuple[Any, ...]]
    ) -> None:
        self._address = address
        self._read = read
        self._bytes = b""
        self._state: tuple[Any, ...] | None = None

    def read(self, *, has_kept: Callable[[tuple[Any, ...]], bool]) -> tuple[Any, ...]:
        """Return the state.

        Args:
            has_kept: Whether it has a number for the next call, which then changes
                nothing else.
        """
        if self._address is None:
            return self._read()
        now = ctypes.string_at(self._address, _MT19937_BYTES)
        if self._state is None or now != self._bytes or has_kept(self._state):
            self._bytes, self._state = now, self._read()
        return self._state


def _address_of_python() -> int | None:
    """Return where the memory of Python's generator begins.

    CPython has it behind the object's header: the position, then the words. None where
    that is not so.
    """
    generator: Any = random.getstate.__self__  # type: ignore[attr-defined]
    address = id(generator) + object.__basicsize__
    *words, position = random.getstate()[1]
    found = struct.unpack("<i624I", ctypes.string_at(address, _MT19937_BYTES))
    return address if found == (position, *words) else None


def _address_of_numpy() -> int | None:
    """Return where the memory of NumPy's generator begins; before NumPy 1.24, None."""
    bits: Any = getattr(np.random, "get_bit_generator", lambda: None)()
    is_known = type(bits).__name__ == "MT19937"
    return int(bits.ctypes.state_address) if is_known else None


def _numpy_state() -> tuple[Any, ...]:
    kind, words, position, has_gauss, gauss = np.random.get_state()
    tensor = torch.from_numpy(np.asarray(words).astype(np.int64))
    return kind, tensor, int(position), int(has_gauss), float(gauss)


def _apply_all(values: dict[str, Any], device: torch.device) -> None:
    _apply(values, random, np.random, torch.default_generator)
    _apply_to_gpus(values, device)


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
    if values.keys() & {"cuda", "other_gpus"} and torch.cuda.is_available():
        torch.cuda.init()  # Else seeds that were given before would come after these.
    if device.type == "cuda" and "cuda" in values:
        torch.cuda.set_rng_state(values["cuda"], device)
    for number, state in values.get("other_gpus", {}).items():
        is_own = "cuda" in values and number == device.index
        if number < torch.cuda.device_count() and not is_own:
            torch.cuda.set_rng_state(state, number)
