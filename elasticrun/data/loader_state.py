"""What is saved of a loader, and must be the same over restarts and on all replicas."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, BinaryIO, NamedTuple

from elasticrun.checkpoint.position import Position
from elasticrun.checkpoint.states.expected import (
    COUNT,
    FLAG,
    SIZES,
    TEXT,
    check_values,
    or_none,
)
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.data.order.batches import STREAMS, SampleOrder, SizePlan
from elasticrun.data.step_times import StepTimes
from elasticrun.data.streams.index import Contents
from elasticrun.errors import CheckpointError
from elasticrun.job.current import current_job
from elasticrun.job.job import Job
from elasticrun.job.loop import Cursor
from elasticrun.job.progress import Progress
from elasticrun.logger import Logger
from elasticrun.replicas.exchange import loader_made

logger = Logger(__name__)

# How long rank 0 waits for a replica that is yet to make the loader, if it ever does:
# so that all say why the job ends, and not only the one that comes last.
_WAIT_SECONDS = 5.0

_STATE_FORMAT = 1
_SIZES = "batch_size"
_CURSOR = "cursor"
_RUN = "passes_by_hand"
_DECIDED = "decided_batch_sizes"
_TIMES = "step_times"
_CONTENTS = "streams"
_MOST_TOLD = 3  # Streams that have changed.

_WORDS = {
    "num_samples": "samples in the data set (or its sampler)",
    _SIZES: "as the batch size",
    "shuffle": "as shuffle",
    "seed": "as the seed",
    "drop_last": "as drop_last",
    "order": "as a checksum of the order (the sampler's; of streams, that of the "
    "streams' lengths, blocks, lanes and window, and of first samples if need be)",
    "mode": "as the mode",
    "members": "as the members",
}


# What the order and the batches of a loader depend on, as plain values.
Fingerprint = dict[str, Any]


class PassesByHand(NamedTuple):
    """Passes in a row that a program runs with `iter` and `next` instead of `for`.

    Each began when the one before had ended.

    Attributes:
        epoch: The epochs that were finished.
        in_epoch: Whether they are in an epoch.
        first: The number of the first one's loop.
        last: That of the last one's.
    """

    epoch: int
    in_epoch: bool
    first: int
    last: int

    def skip(self, progress: Progress) -> None:
        """Walk past the passes that are over, if a replay comes to the first one.

        As in `except StopIteration: batches = iter(loader)`: a program that begins the
        next pass because one has ended takes that pass's first batch at once. If each
        finished pass were skipped by itself, that would raise StopIteration once more,
        where nothing catches it. So all are passed before the first one begins.
        """
        first = (self.epoch, self.first, self.in_epoch)
        if progress.is_replaying and progress.place == first:
            progress.pass_loops(self.last)


def passes_with(run: PassesByHand | None, position: Position) -> PassesByHand:
    """Return the passes of which the one that begins at a position is the last."""
    epoch, loop, in_epoch = position.place
    new = PassesByHand(epoch, in_epoch, loop, loop)
    if run is None or run[:2] != new[:2]:
        return new
    # One follows the other if the program has just been told that that is over.
    follows = sys.exc_info()[0] is StopIteration or run.last == loop
    return run._replace(last=loop) if follows else new


class LoaderState(BaseState):
    """Keeps a loader's fingerprint; its index is part of the job's position.

    Args:
        order: Is given other sizes of batches, where they were decided.
        times: Of the steps of its loops, where batches have planned sizes.
        contents: Of data in streams, what tells which of them have changed.

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
        contents: Contents = (),
    ) -> None:
        super().__init__(default if name is None else f"loader.{name}")
        self.loader_name = default
        self._fingerprint = fingerprint
        self.plan = plan
        self._order = order
        self._contents = contents
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
        text = json.dumps(values)
        if self._contents:
            text = f'{text[:-1]}, "{_CONTENTS}": {self._encoded_contents}}}'
        fileobj.write(text.encode())

    @cached_property
    def _encoded_contents(self) -> str:
        """The same at each save; of 100,000 files 7 MB, while training waits."""
        return json.dumps(self._contents)

    def load(self, fileobj: BinaryIO) -> None:
        """Check the saved fingerprint, and take the cursor."""
        values, more = json.loads(fileobj.read()), {}
        if isinstance(values, dict):  # Anything else is refused below.
            keys = values.keys() & {_CURSOR, _RUN, _DECIDED, _TIMES, _CONTENTS}
            more = {key: values.pop(key) for key in keys}
        contents = more.get(_CONTENTS, ())
        check_values(
            contents, [(TEXT, or_none(COUNT), TEXT)], name=f"{self.name}.{_CONTENTS}"
        )
        decided = more.get(_DECIDED, ())
        check_values(decided, SIZES, name=f"{self.name}.{_DECIDED}")
        self._decide(())
        if decided and [*_pairs(values[_SIZES]), *decided] == _pairs(
            self.fingerprint[_SIZES]
        ):
            # The program is given as its plan what was decided before.
            values[_SIZES], decided = self.fingerprint[_SIZES], ()
        is_new = _CURSOR not in more and not decided
        if is_new and self._is_between_epochs(values):
            values, contents = self._with_other_data(values), ()
        self._check_fingerprint(
            values,
            whose=f"the checkpoint's loader `{self.loader_name}`",
            remedy="Give the loader what it had, or start anew with another checkpoint "
            "directory. Files of streams may be added once an epoch has ended.",
            contents=contents,
        )
        self._warn_of_rewritten(contents)
        self._decide(tuple((int(seen), int(size)) for seen, size in decided))
        if _CURSOR in more:
            self.cursor.decode(more[_CURSOR], resume=current_job().progress.body)
        if _RUN in more:
            form, name = (COUNT, FLAG, COUNT, COUNT), f"{self.name}.{_RUN}"
            check_values(more[_RUN], form, name=name)
            self.run = PassesByHand(*more[_RUN])
        if _TIMES in more and self.times is not None:
            self.times.decode(more[_TIMES])

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
        saved = {key: values[key] for key in Position().encode() if key != "loader"}
        saved["index"] = 0 if index is None else index
        saved["loader"] = "" if index is None else name
        cursor = Cursor()
        if _CURSOR in values:
            cursor.decode(values[_CURSOR], resume=())
        return Position.decode(saved), cursor

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

    def _warn_of_rewritten(self, saved: Contents) -> None:
        """Say which streams of an epoch that goes on are others, as long as before."""
        # Base names may be alike; the checksum of the order says that places are.
        rewritten = [
            name
            for (name, _, had), (_, _, has) in zip(saved, self._contents, strict=False)
            if had != has
        ]
        if rewritten and current_job().rank == 0:
            logger.warning(
                "`%s` reads %s, written anew since the checkpoint%s, or copied without "
                "its time. As many samples are in there, so the loop goes on with what "
                "they are now",
                self.loader_name,
                rewritten[0],
                f", and {len(rewritten) - 1} more" if len(rewritten) > 1 else "",
            )

    def _changes(self, saved: Contents) -> list[str]:
        """Return which streams have other lengths now, in words."""
        had, have = _lengths_in(saved), _lengths_in(self._contents)
        changes = [
            f"{'no' if before is None else before} samples in {key[0]}, but now "
            f"{'none' if now is None else now}"
            for key in {**had, **have}
            if (before := had.get(key)) != (now := have.get(key))
        ]
        more = len(changes) - _MOST_TOLD
        return changes[:_MOST_TOLD] + [f"so with {more} others"] * (more > 0)

    def _check_fingerprint(
        self,
        saved: Any,
        *,
        whose: str,
        remedy: str,
        contents: Contents = (),
    ) -> None:
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
            changes = self._changes(contents) if contents else []
            if changes:
                differing = [k for k in differing if k not in ("num_samples", "order")]
            values = "; ".join(
                [
                    f"{saved[key]!r} {_WORDS[key]}, but now {own[key]!r}"
                    for key in differing
                ]
                + changes
            )
            raise CheckpointError(
                f"{whose} had {values}. With other batches, samples would be skipped "
                f"or seen twice. {remedy}"
            )


def _lengths_in(contents: Contents) -> dict[tuple[str, int], int | None]:
    """Return lengths by name, and by how many of that name come before."""
    num_before: Counter[str] = Counter()
    lengths = {}
    for name, length, _ in contents:
        lengths[name, num_before[name]] = length
        num_before[name] += 1
    return lengths


def _encode_plan(plan: SizePlan) -> int | list[list[int]]:
    """Return the sizes as plain values: one number where they never change."""
    return plan[0][1] if len(plan) == 1 else [list(pair) for pair in plan]


def _pairs(encoded: int | list[list[int]]) -> list[list[int]]:
    """Return the pairs of what `_encode_plan` returned."""
    return [[0, encoded]] if isinstance(encoded, int) else encoded


def check_same_on_replicas(job: Job, name: str, settings: dict[str, Any]) -> None:
    """Check, at a loader's first loop, that all replicas have made it alike.

    Each computes its own share of the order, so samples would be lost otherwise. This
    is no collective, since some replicas may never loop over a loader: nobody waits
    long, and a replica that comes later compares its loader with rank 0's.
    """
    exchange, topic = job.exchange, loader_made(name)
    try:
        if job.rank == 0:
            heard = exchange.gather(topic, settings, timeout=_WAIT_SECONDS)
            text = _compare(name, heard.by_rank)
            exchange.announce(topic, {"made": settings, "text": text})
        else:
            said = exchange.await_verdict(
                topic, timeout=2 * _WAIT_SECONDS, is_optional=True
            )
            own = json.loads(json.dumps(settings))  # As the other has travelled.
            # Rank 0 may have compared what it knew before this one came.
            text = said["text"] or _compare(name, {0: said["made"], job.rank: own})
    except (TimeoutError, ConnectionError):
        # Rank 0 does not come to this loop, or will compare this one's then; or it is
        # gone, which the next boundary says.
        return
    if text:
        raise ValueError(text)


def _compare(name: str, told: Mapping[int, Any]) -> str:
    """Return what is wrong with what the replicas have published, if anything."""
    expected = told[0]
    for rank, made in told.items():
        if made != expected:
            differences = "; ".join(
                f"{setting} is {value!r} on rank 0, but {made.get(setting)!r} on rank "
                f"{rank}"
                for setting, value in expected.items()
                if made.get(setting) != value
            )
            return (
                f"the replicas have made `{name}` differently: {differences}. Each "
                "replica takes its share of one common order, so samples would be lost "
                "or seen twice. Make the same loaders on every replica, in the same "
                "order, with the same seed and all of the data."
            )
    return ""
