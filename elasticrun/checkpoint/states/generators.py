"""The random generators of a process, saved by each replica for itself."""

from __future__ import annotations

import ctypes
import io
import random
import struct
import zlib
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

import numpy as np
import torch

from elasticrun.checkpoint.draft import Checkpoint
from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.gathered import GatheredState
from elasticrun.checkpoint.states.noted import Noted, Place
from elasticrun.checkpoint.states.values import load_values, save_values

_MOST_NOTED = 1 << 17  # Bytes of each rank's: the record for a rescue has them, too.
_MT19937_BYTES = 2500  # 624 words and a position, as NumPy's C code has them.
_MT19937 = struct.Struct("<625I?d")  # With the number that is kept for the next call.
_SIZES = struct.Struct("<II")  # Of the CPU's state of torch, and of each GPU's.
_GPU = struct.Struct("<i")  # Its number; -1 for this replica's own.


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
        self._alike: dict[str, Any] = {}  # What a rank that derives takes over.
        self._is_sure = False  # Whether several ranks have shown that.
        self._glance = _Glance()
        self.noted = {in_epoch: Noted(_MOST_NOTED) for in_epoch in (True, False)}
        self.seen: bytes | None = (
            None  # What `look` would have returned, by `remember`.
        )

    def save(self, fileobj: BinaryIO) -> None:
        """Write the generators as they are now, or what is yet to be restored."""
        if self._seed is not None:
            values = {"seed": self._seed}
        else:
            values = self._loaded or capture(self._device)
        anchors = {key: noted.encode() for key, noted in self.noted.items()}
        save_values({**values, "anchors": anchors}, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        """Remember the saved generators; `restore` puts them into the process.

        They are tried on generators of no use first, so that damage shows here.
        """
        values = load_values(fileobj)
        self._load_noted(values.pop("anchors", {}))
        self._seed = int(values["seed"]) if "seed" in values else None
        self._loaded = values if self._seed is None else None
        if self._loaded is not None:
            _try(self._loaded)

    def _load_noted(self, anchors: Any) -> None:
        for in_epoch, noted in self.noted.items():
            noted.decode(anchors.get(in_epoch, ()), name="random.anchors")
            for place in noted.places:
                _try(_values_of(b"".join(noted.at(place).values())))

    def note(self, place: Place) -> None:
        """Note the generators at an anchor of the program: see `ReplayedStates`."""
        self._glance.look(self._device)
        self.noted[place[2]].add(place, dict(enumerate(self._glance.parts)))

    def put_back_at(self, place: Place) -> None:
        """Draw on as at an anchor; nothing is known of some, as after a rescue."""
        if known := self.noted[place[2]].at(place):
            self._glance.look(self._device)
            parts = {**dict(enumerate(self._glance.parts)), **known}
            packed = b"".join(parts[key] for key in sorted(parts))
            _apply_all(_values_of(packed), self._device)

    def load_from(self, checkpoint: Checkpoint, rank: int) -> bool:
        """Load what the rank has saved, or derive it; return whether either could be.

        A rescue knows of a dead rank no anchors. It has those of another one as far as
        it drew like that: replicas that draw alike, as a mask, would drift apart.
        """
        is_there = super().load_from(checkpoint, rank)
        if self._loaded is not None and not any(e.places for e in self.noted.values()):
            for part in self._saved(checkpoint, rank).values():
                if self._take_anchors(load_values(io.BytesIO(part)), self._loaded):
                    break
        return is_there

    def _take_anchors(self, values: dict[str, Any], own: dict[str, Any]) -> bool:
        alike = {
            key
            for key, name in enumerate(("python", "numpy", "", "torch"))
            if _digest(values.get(name)) == _digest(own.get(name))
        }
        if len(alike) == 1 or "anchors" not in values:
            return False
        for in_epoch, anchors in values["anchors"].items():
            theirs = Noted(_MOST_NOTED)
            theirs.decode(anchors, name="random.anchors")
            for place in theirs.places:
                known = theirs.at(place)
                self.noted[in_epoch].add(
                    place, {k: known[k] for k in known if k in alike}
                )
        return True

    def derive(self, parts: Sequence[bytes], rank: int) -> None:
        """Remember a seed of this rank's own: the checkpoint has nothing of it.

        And those generators that are the same on all ranks that it has. A program may
        need that, as for noise on parameters. One rank alone tells only that of torch,
        which knows its seed: see `restore`.
        """
        self._seed = derive_seed(zlib.crc32(parts[0]), rank)
        first, *others = (load_values(io.BytesIO(part)) for part in parts)
        names = ("python", "numpy", "torch", "cuda") if others else ("torch", "cuda")
        self._alike = {
            name: first[name]
            for name in names
            if name in first
            and all(_digest(each.get(name)) == _digest(first[name]) for each in others)
        }
        self._is_sure = bool(others)
        anchors = first.get("anchors", {})
        if all(each.get("anchors", {}) == anchors for each in others):
            self._load_noted(anchors)

    def remember(self) -> Callable[[], None]:
        if self._loaded is not None or self._seed is not None:
            self.seen = None
            return lambda: None  # What is yet to be restored stays as it is.
        values, self.seen = self._glance.look(self._device)
        back = [noted.remember() for noted in self.noted.values()]

        def put_back() -> None:
            _apply_all(values, self._device)
            for each in back:
                each()

        return put_back

    def look(self) -> bytes | None:
        """Return the generators as `bytes_of` takes them; None before `restore`."""
        if self._loaded is not None or self._seed is not None:
            return None
        return self._glance.look(self._device)[1]

    def restore(self) -> None:
        """Put back what was remembered, once."""
        if self._loaded is not None:
            _apply_all(self._loaded, self._device)
        elif self._seed is not None:
            alike, own = self._alike, torch.initial_seed()
            if not self._is_sure and _seed_of(alike.get("torch")) != own:
                alike = {}  # The program gives each rank a seed of its own.
            seed_all(self._seed)
            _apply_all({**capture(self._device), **alike}, self._device)
        self._loaded = self._seed = None


def bytes_of(packed: bytes) -> bytes:
    """Return what `Generators.save` would have written, from what a look has seen."""
    buffer = io.BytesIO()
    save_values(_values_of(packed), buffer)
    return buffer.getvalue()


def _values_of(packed: bytes) -> dict[str, Any]:
    """Return what `capture` would have returned, from what a look has seen."""
    *words, has_gauss, gauss = _MT19937.unpack_from(packed)
    python = (3, tuple(words), gauss if has_gauss else None)
    *words, has_gauss, gauss = _MT19937.unpack_from(packed, _MT19937.size)
    tensor = torch.tensor(words[:-1], dtype=torch.int64)
    values: dict[str, Any] = {
        "python": python,
        "numpy": ("MT19937", tensor, words[-1], int(has_gauss), gauss),
    }
    at = 2 * _MT19937.size
    size, size_of_gpu = _SIZES.unpack_from(packed, at)
    at += _SIZES.size
    values["torch"] = _tensor_of(packed[at : at + size])
    for place in range(at + size, len(packed), _GPU.size + size_of_gpu):
        (number,) = _GPU.unpack_from(packed, place)
        begin = place + _GPU.size
        state = _tensor_of(packed[begin : begin + size_of_gpu])
        if number < 0:
            values["cuda"] = state
        else:
            values.setdefault("other_gpus", {})[number] = state
    return values


def _digest(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return str(value.tolist())
    return str(
        [each.tolist() if hasattr(each, "tolist") else each for each in value or ()]
    )


def _seed_of(state: Any) -> int | None:
    """Return the seed that the CPU's generator of torch was given last."""
    return None if state is None else int(state[:8].view(torch.int64))


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


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
        self._python = _Seen(_address_of_python(), random.getstate, _pack_python)
        self._numpy = _Seen(_address_of_numpy(), _numpy_state, _pack_numpy)
        self.parts: list[bytes] = []  # As of the last look,
        self._packed = b""  # and all of them.

    def look(self, device: torch.device) -> tuple[dict[str, Any], bytes]:
        """Return what `capture` does, and the same as bytes."""
        values = capture(
            device,
            python_state=self._python.read(has_kept=lambda state: state[2] is not None),
            numpy_state=self._numpy.read(has_kept=lambda state: bool(state[3])),
        )
        gpus = dict(values.get("other_gpus", {}))
        if "cuda" in values:
            gpus[-1] = values["cuda"]
        size_of_gpu = max((each.numel() for each in gpus.values()), default=0)
        parts = [
            self._python.packed,
            self._numpy.packed,
            _SIZES.pack(values["torch"].numel(), size_of_gpu),
            values["torch"].numpy().tobytes(),
        ]
        for number, state in gpus.items():
            parts += [_GPU.pack(number), state.numpy().tobytes()]
        if parts != self.parts:  # Else it is the same object, as is told at once.
            self.parts, self._packed = parts, b"".join(parts)
        return values, self._packed


class _Seen:
    """A generator's state, read again only if its memory has changed.

    Args:
        address: Where that is; None where it is not known.
        read: Reads the state.
        pack: Returns it as bytes.
    """

    def __init__(
        self,
        address: int | None,
        read: Callable[[], tuple[Any, ...]],
        pack: Callable[[tuple[Any, ...]], bytes],
    ) -> None:
        self._pack = pack
        self.packed = b""
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
        now = b""
        if self._address is not None:
            now = ctypes.string_at(self._address, _MT19937_BYTES)
        if (
            not now
            or self._state is None
            or now != self._bytes
            or has_kept(self._state)
        ):
            self._bytes, self._state = now, self._read()
            self.packed = self._pack(self._state)
        return self._state


def _pack_python(state: tuple[Any, ...]) -> bytes:
    _, words, gauss = state
    return _MT19937.pack(*words, gauss is not None, gauss or 0.0)


def _pack_numpy(state: tuple[Any, ...]) -> bytes:
    _, words, position, has_gauss, gauss = state
    return _MT19937.pack(*words.tolist(), position, bool(has_gauss), gauss)


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


def _try(values: dict[str, Any]) -> None:
    """Put values into generators of no use, so that damage shows."""
    _apply(values, random.Random(), np.random.RandomState(), torch.Generator())


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
