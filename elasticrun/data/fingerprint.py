"""What must not change about a loader between restarts, and the state that keeps it."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO, Protocol

from elasticrun.checkpoint.state import BaseState
from elasticrun.errors import CheckpointError

_WORDS = {
    "num_samples": "samples in the data set (or its sampler)",
    "batch_size": "as the batch size",
    "shuffle": "as shuffle",
    "seed": "as the seed",
    "drop_last": "as drop_last",
}


@dataclass(frozen=True)
class Fingerprint:
    """What the order and the batches of a loader depend on."""

    num_samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool

    def encode(self) -> dict[str, Any]:
        """Return the fingerprint as plain values."""
        return asdict(self)

    def check(self, saved: Any, *, name: str) -> None:
        """Raise if an encoded fingerprint is not this one.

        Raises:
            CheckpointError: It differs, or is none.
        """
        own = self.encode()
        if not isinstance(saved, dict) or set(saved) != set(own):
            raise CheckpointError(
                f"{saved!r} is not the fingerprint of a loader, which has the keys "
                f"{', '.join(own)}. The state was not written by elasticrun, or was "
                "changed."
            )
        differing = [key for key in own if saved[key] != own[key]]
        if differing:
            values = "; ".join(
                f"{saved[key]!r} {_WORDS[key]}, but now {own[key]!r}"
                for key in differing
            )
            raise CheckpointError(
                f"the checkpoint's loader `{name}` had {values}. Its batches would be "
                "others, and samples skipped or seen twice. Give the job what it had, "
                "or start anew with another checkpoint directory."
            )


class _HasFingerprint(Protocol):
    def encode_fingerprint(self) -> dict[str, Any]: ...
    def check_fingerprint(self, saved: Any) -> None: ...


class LoaderState(BaseState):
    """Keeps a loader's fingerprint; its index is part of the job's position."""

    def __init__(self, name: str, loader: _HasFingerprint) -> None:
        super().__init__(name)
        self._loader = loader

    def save(self, fileobj: BinaryIO) -> None:
        """Write the fingerprint as JSON."""
        fileobj.write(json.dumps(self._loader.encode_fingerprint()).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Check the saved fingerprint."""
        self._loader.check_fingerprint(json.loads(fileobj.read()))
