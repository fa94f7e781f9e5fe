"""The random generators of a process, saved by each replica for itself."""

from __future__ import annotations

import ctypes
import io
import random
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np
import torch

from elasticrun.checkpoint.seeding import derive_seed
from elasticrun.checkpoint.states.anchor_notes import AnchorNotes, Place
from elasticrun.checkpoint.states.per_rank import PerRankState
from elasticrun.checkpoint.states.values import load_values, save_values

_MOST_IN_RECORD = 1 << 17  # Bytes of anchors, which go there anew at each one.
# The generators' memory, a Mersenne Twister's: its words and the position among them;
# then whether there is a number for the next call of `gauss` or `randn`, and that.
_PYTHON = struct.Struct("=i624Ii4xd")
_NUMPY = struct.Struct("=624Iii4xd")
_PYTHONS: Any = random.getstate.__self__  # type: ignore[attr-defined]
_TWISTER = ctypes.c_char * 2500
_MARK = 36  # Bytes at an end of it: the position, and some words.
_KEPT = struct.Struct("=i4xd")
_NOTHING = _KEPT.pack(0, 0.0)
_ANY = 0.123456789
_SIZES = struct.Struct("<II")  # Of the CPU's state of torch, and of each GPU's.
_GPU = struct.Struct("<i")  # Its number; -1 for this replica's own.


# 2**64 over the golden ratio, an odd number: the middle bits of a product with it
# depend on all lower bits (multiplicative hashing: Knuth, "Sorting and Searching").
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
_MASK_32 = (1 << 32) - 1
_MASK_63 = (1 << 63) - 1


class Generators(PerRankState):
    """Python's, NumPy's and torch's global generators: the CPU's and those of GPUs.

    This replica's own GPU is known as that, whatever its number is in the next
    generation; others that the process uses are known by their number.

    `load` only remembers them: replayed code may still draw. `restore` puts them back
    when the program moves on from the position that was saved with them.

    Args:
        are_alike: Whether those of all ranks are the same at boundaries.

    Attributes:
        are_alike: As given.
        seen: What the last look has returned.
        begun: How the program has seeded them; empty before its first epoch or loop.
    """

    def __init__(self, device: torch.device, *, are_alike: bool = False) -> None:
        super().__init__("random")
        self._device = device
        self.are_alike = are_alike
        self._loaded: dict[str, Any] | None = None
        self._seed: int | None = None
        self.begun: dict[str, int] = {}
        self._alike: dict[str, Any] = {}  # What a rank that derives takes over,
        self._if_begun: dict[str, int] | None = None  # if it has begun so, too.
        self._glance = _Glance()
        self.noted = {in_epoch: AnchorNotes() for in_epoch in (True, False)}
        self._on_anchors: Callable[[bytes], object] | None = None
        self.seen: bytes | None = None

    def save(self, fileobj: BinaryIO) -> None:
        """Write the generators as they are now, or what is yet to be restored."""
        save_values(self._to_save(), fileobj)

    def capture_for_record(self) -> bytes:
        """Return what `save` writes, without anchors for which a record has no room."""
        return _encoded(self._to_save(_MOST_IN_RECORD))

    def _to_save(self, *most_bytes: int) -> dict[str, Any]:
        own = {"seed": self._seed} if self._seed is not None else self._loaded
        return {**(own or capture(self._device)), **self._anchors(*most_bytes)}

    def load(self, fileobj: BinaryIO) -> None:
        """Remember the saved generators; `restore` puts them into the process.

        They are tried on generators of no use first, so that damage shows here.
        """
        values = load_values(fileobj)
        values.pop("begun", None)
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
        self._tell_anchors()

    def watch_anchors(self, on_anchors: Callable[[bytes], object]) -> None:
        """Call with what is saved of the anchors, now and whenever there are others."""
        self._on_anchors = on_anchors
        self._tell_anchors()

    def _tell_anchors(self) -> None:
        if self._on_anchors is not None:
            self._on_anchors(_encoded(self._anchors(_MOST_IN_RECORD)))

    def _anchors(self, *most_bytes: int) -> dict[str, Any]:
        encoded = {key: each.encode(*most_bytes) for key, each in self.noted.items()}
        return {"anchors": encoded, "begun": self.begun}

    def begin(self) -> None:
        """Note what they are where the program's first epoch or loop begins."""
        now = capture(self._device)
        self.begun = {name: _digest(state) for name, state in now.items()}

    def note(self, place: Place) -> None:
        """Note the generators at an anchor of the program: see `ReplayedStates`."""
        self._glance.look(self._device)
        self.noted[place[2]].add(place, dict(enumerate(self._glance.parts)))
        self._tell_anchors()

    def put_back_at(self, place: Place) -> None:
        """Draw on as at an anchor; as now where none was noted."""
        if known := self.noted[place[2]].at(place):
            packed = b"".join(known[key] for key in sorted(known))
            _apply_all(_values_of(packed), self._device)

    def derive(self, parts: Sequence[bytes], rank: int) -> None:
        """Remember a seed of this rank's own: the checkpoint has nothing of it.

        And those generators that are the same on all ranks that it has. A program may
        need that, as for noise on parameters. One rank alone tells only how they began.
        """
        if self.are_alike:
            self.load(io.BytesIO(parts[0]))
            return
        self._seed = derive_seed(zlib.crc32(parts[0]), rank)
        first, *others = (load_values(io.BytesIO(part)) for part in parts)
        self._alike = {
            name: first[name]
            for name in ("python", "numpy", "torch", "cuda")
            if name in first
            and all(_digest(each.get(name)) == _digest(first[name]) for each in others)
        }
        self._if_begun = None if others else first.get("begun", {})
        anchors = first.get("anchors", {})
        if all(each.get("anchors", {}) == anchors for each in others):
            self._load_noted(anchors)

    def remember(self) -> Callable[[], None]:
        packed, begun = self.look(), self.begun
        back = [noted.remember() for noted in self.noted.values()]

        def put_back() -> None:
            if packed is not None:  # Else what is yet to be restored stays as it is.
                _apply_all(_values_of(packed), self._device)
                self.begun = begun
                for each in back:
                    each()

        return put_back

    def look(self) -> bytes | None:
        """Return the generators as `bytes_of` takes them; None before `restore`.

        It is the same object as long as nothing is drawn.
        """
        is_ahead = self._loaded is not None or self._seed is not None
        self.seen = None if is_ahead else self._glance.look(self._device)
        return self.seen

    def restore(self) -> None:
        """Put back what was remembered, once."""
        if self._loaded is not None:
            _apply_all(self._loaded, self._device)
        elif self._seed is not None:
            alike, begun = self._alike, self._if_begun
            if begun is not None:  # The program may give each rank a seed of its own.
                own = self.begun.items() & begun.items()
                alike = {name: alike[name] for name in alike.keys() & dict(own)}
            seed_all(self._seed)
            _apply_all({**capture(self._device), **alike}, self._device)
        self._loaded = self._seed = None


def bytes_of(packed: bytes, anchors: bytes) -> bytes:
    """Return what `Generators.save` would have written.

    Args:
        packed: What a look has seen.
        anchors: What a watcher of them was told last.
    """
    return _encoded({**_values_of(packed), **load_values(io.BytesIO(anchors))})


def _encoded(values: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    save_values(values, buffer)
    return buffer.getvalue()


def _values_of(packed: bytes) -> dict[str, Any]:
    """Return what `capture` would have returned, from what a look has seen."""
    position, *words, has_kept, kept = _PYTHON.unpack_from(packed)
    python = (3, (*words, position), kept if has_kept else None)
    *words, position, has_kept, kept = _NUMPY.unpack_from(packed, _PYTHON.size)
    tensor = torch.tensor(words, dtype=torch.int64)
    values: dict[str, Any] = {
        "python": python,
        "numpy": ("MT19937", tensor, position, has_kept, kept),
    }
    at = _PYTHON.size + _NUMPY.size
    size, size_of_gpu = _SIZES.unpack_from(packed, at)
    at += _SIZES.size
    values["torch"] = _tensor_of(packed[at : at + size])
    gpus = {}
    for place in range(at + size, len(packed), _GPU.size + size_of_gpu):
        begin = place + _GPU.size
        (number,) = _GPU.unpack_from(packed, place)
        gpus[number] = _tensor_of(packed[begin : begin + size_of_gpu])
    return _with_gpus(values, gpus)


def _digest(value: Any) -> int:
    rows = value if isinstance(value, tuple) else (value,)
    plain = [each.tolist() if hasattr(each, "tolist") else each for each in rows]
    return zlib.crc32(str(plain).encode())


def _tensor_of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def capture(device: torch.device) -> dict[str, Any]:
    """Return the generators' states as plain values and tensors."""
    kind, words, position, has_kept, kept = np.random.get_state()
    tensor = torch.from_numpy(np.asarray(words).astype(np.int64))
    values = {
        "python": random.getstate(),
        "numpy": (kind, tensor, int(position), int(has_kept), float(kept)),
        "torch": torch.get_rng_state(),
    }
    return _with_gpus(values, _gpus(device))


def generators_of_cpu() -> bytes:
    """Return the states of Python's, NumPy's and torch's generators, to compare."""
    return _encoded(capture(torch.device("cpu")))


def _gpus(device: torch.device) -> dict[int, torch.Tensor]:
    """Return the states of GPUs by their numbers; -1 is this replica's own."""
    if not torch.cuda.is_initialized():
        return {}  # Nobody has drawn there.
    states = dict(enumerate(torch.cuda.get_rng_state_all()))
    if device.type == "cuda":
        states[-1] = states.pop(device.index)
    return states


def _with_gpus(values: dict[str, Any], gpus: dict[int, torch.Tensor]) -> dict[str, Any]:
    own = {"cuda": gpus.pop(-1)} if -1 in gpus else {}
    return values | own | ({"other_gpus": gpus} if gpus else {})


def seed_generators(seed: int) -> None:
    """Seed the three generators so that they differ from each other.

    All three are Mersenne twisters: NumPy's and torch's would draw the same numbers
    from the same 32 bits, and NumPy's and Python's from the same array of words.
    """
    random.seed(seed)
    np.random.seed((seed + 1) * _GOLDEN_GAMMA >> 32 & _MASK_32)
    # Of which torch takes the lower 32 bits; but a data set that hands out its
    # `initial_seed()` needs one that fits into a tensor. `torch.manual_seed` would also
    # seed every accelerator, at a hundred times the cost.
    torch.default_generator.manual_seed(seed & _MASK_63)


@contextmanager
def program_generators_kept() -> Iterator[None]:
    """Give the generators back as they were, also after an exception."""
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.default_generator.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


def seed_all(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators from 64 bits."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class _Glance:
    """Reads the generators as bytes, at each boundary.

    Mostly nobody has drawn since. To ask for Python's and NumPy's states takes longer
    than all else there, so marks of them are read first, in their memory, where that is
    known.
    """

    def __init__(self) -> None:
        self._python = _memory_of_python()
        self._numpy = _memory_of_numpy()
        self._marks = _marks(self._python, self._numpy)
        self._seen: Any = None  # At the last look,
        self.parts: list[bytes] = []  # as it is saved,
        self._packed = b""  # and all of that.

    def look(self, device: torch.device) -> bytes:
        """Return how they are; the same object as before, if they are the same."""
        torchs = torch.default_generator.get_state().numpy().tobytes()
        of_gpus = [(n, each.numpy().tobytes()) for n, each in _gpus(device).items()]
        now = self._read() if self._marks is None else b"".join(self._marks)
        seen = (now, _PYTHONS.gauss_next, torchs, of_gpus)
        if seen == self._seen:
            return self._packed
        self._seen = seen
        size_of_gpu = len(of_gpus[0][1]) if of_gpus else 0
        self.parts = [*self._read(), _SIZES.pack(len(torchs), size_of_gpu), torchs]
        for number, data in of_gpus:
            self.parts += [_GPU.pack(number), data]
        self._packed = b"".join(self.parts)
        return self._packed

    def _read(self) -> list[bytes]:
        return [
            _packed_python() if self._python is None else _read_python(self._python),
            _packed_numpy() if self._numpy is None else _read_numpy(*self._numpy),
        ]


def _marks(python: Any, numpy: Any) -> list[memoryview] | None:
    """Return the memory that differs when somebody has drawn; None if not all is known.

    Of each twister its position and some of its words, which are all made anew when
    they have been used up.
    """
    if python is None or numpy is None:
        return None
    pythons, twister, kept = (memoryview(each).cast("B") for each in (python, *numpy))
    return [pythons[:_MARK], twister[-_MARK:], kept]


def _packed_python() -> bytes:
    _, (*words, position), kept = random.getstate()
    return _PYTHON.pack(position, *words, kept is not None, kept or 0.0)


def _read_python(twister: Any) -> bytes:
    kept = _PYTHONS.gauss_next
    raw: bytes = twister.raw  # Not in one expression: this is read at each boundary.
    return raw + (_NOTHING if kept is None else _KEPT.pack(1, kept))


def _memory_of_python() -> Any:
    """Return the memory of Python's generator; None if it is not where it should be.

    CPython has it behind the object's header.
    """
    twister = _TWISTER.from_address(id(_PYTHONS) + object.__basicsize__)
    return twister if _read_python(twister) == _packed_python() else None


def _packed_numpy() -> bytes:
    _, words, position, has_kept, kept = np.random.get_state()
    return _NUMPY.pack(*words, position, bool(has_kept), kept)


def _read_numpy(twister: Any, kept: Any) -> bytes:
    return bytes(twister.raw + kept.raw)


def _memory_of_numpy() -> tuple[Any, Any] | None:
    """Return the memory of NumPy's generator, and what is kept for the next call.

    None where that is not known, as before NumPy 1.24. The second one is in the global
    `RandomState`, where another one has it, too.
    """
    bits: Any = getattr(np.random, "get_bit_generator", lambda: None)()
    if type(bits).__name__ != "MT19937":
        return None
    other: Any = np.random.RandomState(0)
    other.set_state((*other.get_state()[:3], 1, _ANY))
    memory = ctypes.string_at(id(other), type(other).__basicsize__)
    offset = memory.find(_KEPT.pack(1, _ANY))
    generator = np.random.get_state.__self__  # type: ignore[attr-defined]
    twister = _TWISTER.from_address(bits.ctypes.state_address)
    kept = (ctypes.c_char * _KEPT.size).from_address(id(generator) + max(offset, 0))
    return (twister, kept) if _read_numpy(twister, kept) == _packed_numpy() else None


def _try(values: dict[str, Any]) -> None:
    """Put values into generators of no use, so that damage shows."""
    _apply(values, random.Random(), np.random.RandomState(), torch.Generator())


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
