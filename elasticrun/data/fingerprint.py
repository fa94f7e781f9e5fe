"""What must not change about a loader between restarts, and where it is kept."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from elasticrun.checkpoint.state import BaseState
from elasticrun.errors import CheckpointError
from elasticrun.position import Position

_STATE_FORMAT = 1

_WORDS = {
    "num_samples": "samples in the data set (or its sampler)",
    "batch_size": "as the batch size",
    "shuffle": "as shuffle",
    "seed": "as the seed",
    "drop_last": "as drop_last",
    "order": "as a checksum of the sampler's order",
}


@dataclass(frozen=True)
class Fingerprint:
    """What the order and the batches of a loader depend on."""

    num_samples: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool
    order: int | None = None

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


class LoaderState(BaseState):
    """Keeps a loader's fingerprint; its index is part of the job's position."""

    def __init__(
        self, *, name: str | None, default: str, fingerprint: Fingerprint
    ) -> None:
        super().__init__(default if name is None else f"loader.{name}")
        self._loader_name = default
        self._fingerprint = fingerprint

    def save(self, fileobj: BinaryIO) -> None:
        """Write the fingerprint as JSON."""
        fileobj.write(json.dumps(self._fingerprint.encode()).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Check the saved fingerprint.

        Raises:
            CheckpointError: It differs.
        """
        self._fingerprint.check(json.loads(fileobj.read()), name=self._loader_name)


def encode_state(
    fingerprint: Fingerprint, position: Position, index: int | None
) -> dict[str, Any]:
    """Return what `state_dict()` of a loader does.

    Args:
        index: Samples consumed in the loader's own loop; None when it is in none.
    """
    values = {**position.encode(), "index": index}
    del values["loader"]  # Its state is its own, whatever it is called when loaded.
    return {
        "format": _STATE_FORMAT,
        "fingerprint": fingerprint.encode(),
        **values,
    }


def decode_state(state: Any, fingerprint: Fingerprint, *, name: str) -> Position:
    """Return the position in what `encode_state` returned.

    Raises:
        CheckpointError: It is no such state, or that of another loader.
    """
    keys = encode_state(fingerprint, Position(), None).keys()
    if not isinstance(state, dict) or set(state) != set(keys):
        raise CheckpointError(
            f"{state!r} is not the state of an AdaptiveDataLoader, which has the keys "
            f"{', '.join(keys)}. Load what state_dict() returned."
        )
    if state["format"] != _STATE_FORMAT:
        raise CheckpointError(
            f"the state of `{name}` has format {state['format']!r}, but this version "
            f"of elasticrun reads {_STATE_FORMAT}. Load it with the version that wrote "
            "it."
        )
    fingerprint.check(state["fingerprint"], name=name)
    index = state["index"]
    values = {key: state[key] for key in Position().encode() if key != "loader"}
    values["index"] = 0 if index is None else index
    values["loader"] = "" if index is None else name
    position = Position.decode(values)
    if position.index > fingerprint.num_samples:
        raise CheckpointError(
            f"the state of `{name}` is at sample {position.index}, but a loop has "
            f"{fingerprint.num_samples}. It was not written by this loader."
        )
    return position
