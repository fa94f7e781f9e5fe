"""What must stay the same about a loader over restarts, and where it is saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, BinaryIO

from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.states.expected import COUNT, FLAG, SIZES, check_values
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.data.by_hand import PassesByHand
from elasticrun.data.order.batches import SizePlan
from elasticrun.data.order.loop_orders import STREAMS, SampleOrder
from elasticrun.data.step_times import StepTimes
from elasticrun.errors import CheckpointError
from elasticrun.job.current import current_job
from elasticrun.job.loop import Cursor
from elasticrun.logger import Logger

logger = Logger(__name__)

_STATE_FORMAT = 1
_SIZES = "batch_size"
_CURSOR = "cursor"
_RUN = "passes_by_hand"
_DECIDED = "decided_batch_sizes"
_TIMES = "step_times"

_WORDS = {
    "num_samples": "samples in the data set (or its sampler)",
    _SIZES: "as the batch size",
    "shuffle": "as shuffle",
    "seed": "as the seed",
    "drop_last": "as drop_last",
    "order": "as a checksum of the order (the sampler's; of streams, that of the "
    "streams' lengths, lanes and window, and of first samples where these tell more)",
    "mode": "as the mode",
    "members": "as the members",
}


# What the order and the batches of a loader depend on, as plain values.
Fingerprint = dict[str, Any]


class LoaderState(BaseState):
    """Keeps a loader's fingerprint; its index is part of the job's position.

    Args:
        order: Is given other sizes of batches, where they were decided.
        times: Of the steps of its loops, where batches have planned sizes.

    Attributes:
        plan: The sizes of its global batches, as the program gives them; None of a
            loader of loaders.
        pending: What the next save is to hold besides: from how many samples seen on
            batches are to have another size, and which one.
        cursor: How far its endless passes have come; kept once there are any.
        run: The passes in a row that the program asked by hand, if it did last.
    """

    def __init__(
        self,
        *,
        name: str | None,
        default: str,
        fingerprint: Fingerprint,
        plan: SizePlan | None,
        order: SampleOrder | None = None,
        times: StepTimes | None = None,
    ) -> None:
        super().__init__(default if name is None else f"loader.{name}")
        self.loader_name = default
        self._fingerprint = fingerprint
        self.plan = plan
        self._order = order
        self.times = times
        self._decided: SizePlan = ()
        self.pending: tuple[int, int] | None = None
        self._written: tuple[int, int] | None = None
        self.cursor = Cursor()
        self.run: PassesByHand | None = None

    @property
    def fingerprint(self) -> Fingerprint:
        """What must not change, and the sizes of global batches."""
        if self.plan is None:
            return dict(self._fingerprint)
        return {_SIZES: _encode_plan(self.sizes), **self._fingerprint}

    @property
    def sizes(self) -> SizePlan:
        """The plan, and what was decided since."""
        return (*(self.plan or ()), *self._decided)

    @property
    def has_sizes(self) -> bool:
        """Whether global batches are cut by a plan of sizes."""
        return self._order is not None

    @property
    def num_samples(self) -> int:
        """Samples in a loop over one pass."""
        return int(self._fingerprint["num_samples"])

    def _decide(self, decided: SizePlan) -> None:
        """Let global batches have other sizes than the program's."""
        self._decided = decided
        if self._order is not None:
            self._order.plan = self.sizes

    def after_save(self) -> None:
        self._written, self.pending = self.pending, None

    def committed(self) -> None:
        if self._written is not None:
            self._decide((*self._decided, self._written))

    def remember(self) -> Callable[[], None]:
        put_cursor_back, run = self.cursor.remember(), self.run

        def put_back() -> None:
            put_cursor_back()
            self.run, self.pending = run, None

        return put_back

    def save(self, fileobj: BinaryIO) -> None:
        """Write the fingerprint as JSON, and what else there is."""
        values = self.fingerprint
        pending = () if self.pending is None else (self.pending,)
        if self.plan is not None and (self._decided or pending):
            values[_SIZES] = _encode_plan(self.plan)
            values[_DECIDED] = [*self._decided, *pending]
        if self.times is not None and (times := self.times.encode()):
            values[_TIMES] = times
        if self.cursor.place:
            values[_CURSOR] = self.cursor.encode()
        if self.run is not None:
            values[_RUN] = list(self.run)
        fileobj.write(json.dumps(values).encode())

    def load(self, fileobj: BinaryIO) -> None:
        """Check the saved fingerprint, and take the cursor."""
        values = json.loads(fileobj.read())
        has_keys = isinstance(values, dict)
        cursor = values.pop(_CURSOR, None) if has_keys else None
        run = values.pop(_RUN, None) if has_keys else None
        decided = values.pop(_DECIDED, ()) if has_keys else ()
        times = values.pop(_TIMES, None) if has_keys else None
        check_values(decided, SIZES, name=f"{self.name}.{_DECIDED}")
        self._decide(())
        if decided and [*_pairs(values[_SIZES]), *decided] == _pairs(
            self.fingerprint[_SIZES]
        ):
            # The program is given as its plan what was decided before.
            values[_SIZES], decided = self.fingerprint[_SIZES], ()
        if cursor is None and not decided and self._is_between_epochs(values):
            values = self._with_other_data(values)
        self._check_fingerprint(
            values,
            whose=f"the checkpoint's loader `{self.loader_name}`",
            remedy="Give the loader what it had, or start anew with another checkpoint "
            "directory. Files of streams may be added once an epoch has ended.",
        )
        self._decide(tuple((int(seen), int(size)) for seen, size in decided))
        if cursor is not None:
            self.cursor.decode(cursor, resume=current_job().progress.body)
        if run is not None:
            check_values(run, (COUNT, FLAG, COUNT, COUNT), name=f"{self.name}.{_RUN}")
            self.run = PassesByHand(*run)
        if times is not None and self.times is not None:
            self.times.decode(times)

    def encode(self, position: Position, index: int | None) -> dict[str, Any]:
        """Return what `state_dict()` of the loader does.

        Args:
            index: Where in the loader's own loop it stands; None when it is in none.
        """
        values = {**position.encode(), "index": index}
        del values["loader"]  # Its state is its own, whatever it is called when loaded.
        if self.cursor.place:
            values[_CURSOR] = self.cursor.encode()
        return {
            "format": _STATE_FORMAT,
            "fingerprint": self.fingerprint,
            **values,
        }

    def decode(self, values: Any) -> tuple[Position, Cursor]:
        """Return the position and the cursor in what `encode` returned."""
        name = self.loader_name
        keys = {"format", "fingerprint", *Position().encode()} - {"loader"}
        if not isinstance(values, dict) or set(values) - {_CURSOR} != keys:
            raise CheckpointError(
                f"{values!r} is not the state of an AdaptiveDataLoader, which has the "
                f"keys {', '.join(sorted(keys))}. Load what state_dict() returned."
            )
        if values["format"] != _STATE_FORMAT:
            raise CheckpointError(
                f"the state of `{name}` has format {values['format']!r}, but this "
                f"version of elasticrun reads {_STATE_FORMAT}. Load it with the "
                "version that wrote it."
            )
        self._check_fingerprint(
            values["fingerprint"],
            whose=f"the loader whose state `{name}` is to load",
            remedy="Load the state of a loader with the same data and options.",
        )
        index = values["index"]
        place = {key: values[key] for key in Position().encode() if key != "loader"}
        place["index"] = 0 if index is None else index
        place["loader"] = "" if index is None else name
        cursor = Cursor()
        if _CURSOR in values:
            cursor.decode(values[_CURSOR], resume=())
        return Position.decode(place), cursor

    def _is_between_epochs(self, saved: Any) -> bool:
        """Return whether no loop goes on that depends on the streams' lengths."""
        position = current_job().progress.position
        is_of_streams = str(self._fingerprint.get("order")).startswith(STREAMS)
        is_one_size = self.plan is not None and len(self.sizes) == 1
        is_between = not (position.in_epoch or position.loader)
        return is_of_streams and is_one_size and is_between and isinstance(saved, dict)

    def _with_other_data(self, saved: Fingerprint) -> Fingerprint:
        """Return a saved fingerprint with the streams that there are now; say so."""
        data = {key: self._fingerprint[key] for key in ("num_samples", "order")}
        if {**saved, **data} != saved and current_job().rank == 0:
            had, have = saved.get("num_samples"), self.num_samples
            logger.warning(
                "the streams of `%s`, or how they are dealt, have changed since the "
                "last epoch%s: the next one is made of what there is now",
                self.loader_name,
                "" if had == have else f" ({have} samples in place of {had})",
            )
        return {**saved, **data}

    def _check_fingerprint(self, saved: Any, *, whose: str, remedy: str) -> None:
        """Raise if a saved fingerprint is not that of this loader."""
        own = self.fingerprint
        if not isinstance(saved, dict) or set(saved) != set(own):
            raise CheckpointError(
                f"{saved!r} is not the fingerprint of this loader, which has the keys "
                f"{', '.join(own)}. The state is that of a loader of another kind (a "
                "CombinedLoader, or one alone), or was changed."
            )
        if self.plan is not None and _pairs(saved[_SIZES]) == _pairs(own[_SIZES]):
            saved = {**saved, _SIZES: own[_SIZES]}  # One size may be a list of a pair.
        if str(own.get("order")).startswith(STREAMS) and type(saved["order"]) is int:
            raise CheckpointError(
                f"{whose} dealt whole streams to its lanes, as earlier versions of "
                "elasticrun did, and stopped within an epoch or a loop of steps. This "
                "version deals blocks of them, so samples would be skipped or seen "
                "twice. Finish that with the version that began it: from a checkpoint "
                "at the end of an epoch this one goes on. Or start anew with another "
                "checkpoint directory."
            )
        differing = [key for key in own if saved[key] != own[key]]
        if differing:
            values = "; ".join(
                f"{saved[key]!r} {_WORDS[key]}, but now {own[key]!r}"
                for key in differing
            )
            raise CheckpointError(
                f"{whose} had {values}. With other batches, samples would be skipped "
                f"or seen twice. {remedy}"
            )


def _encode_plan(plan: SizePlan) -> int | list[list[int]]:
    """Return the sizes as plain values: one number where they never change."""
    return plan[0][1] if len(plan) == 1 else [list(pair) for pair in plan]


def _pairs(encoded: int | list[list[int]]) -> list[list[int]]:
    """Return the pairs of what `_encode_plan` returned."""
    return [[0, encoded]] if isinstance(encoded, int) else encoded
