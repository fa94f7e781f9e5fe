"""Iterable data sets: torch's `IterableDataset`, Hugging Face's."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import logging
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
from torch.utils.data import IterableDataset

from elasticrun.checkpoint.states.generators import (
    program_generators_kept,
    seed_generators,
)
from elasticrun.data.streams.index import STRIDE, Scan
from elasticrun.data.streams.streams import Streams, text_of
from elasticrun.errors import ElasticRunError

_READ_AT_ONCE = 256
# Who iterates over each data set that keeps its own place, by the `id` of that.
_TURNS: dict[int, object] = {}
_SHARING_OUT = {"get_worker_info", "get_rank", "get_world_size"}


def streams_of(dataset: Any) -> Streams:
    """Return the streams of an `IterableDataset`, as it is given to a loader."""
    if getattr(dataset, "_distributed", None) is not None:
        raise TypeError(
            "the data set was split by split_dataset_by_node, and the loader would "
            "split it again: samples would be lost. Give every replica the whole data "
            "set."
        )
    is_of_hugging_face = hasattr(dataset, "num_shards") and hasattr(dataset, "shard")
    return Shards(dataset) if is_of_hugging_face else Iterated(dataset)


def with_end(given: Any, taker: str, *, else_: str = "") -> Streams:
    """Return the streams that something takes which reads them to their ends."""
    streams = streams_of(given) if isinstance(given, IterableDataset) else given
    if not (isinstance(streams, Streams) and streams.has_end):
        raise TypeError(
            f"{taker} takes streams that have an end, not {type(streams).__name__}. "
            f"Give TextLines, another of Streams, or an IterableDataset{else_}."
        )
    return streams


class _Given(Streams):
    """Streams of a data set that nothing tells from others, so no counts are kept.

    All replicas must get the same samples from it at each start. That they get the same
    first ones is compared; random draws up to them do not show.

    Attributes:
        dataset: What was given.
    """

    kind = None

    def __init__(self, dataset: Any, names: list[str], **options: Any) -> None:
        super().__init__(names, **options)
        self.dataset = dataset

    @cached_property
    def beginning(self) -> str:
        with program_generators_kept():
            seed_generators(0)
            samples = (self.open(stream, 0) for stream in range(len(self.names)))
            return text_of(itertools.chain.from_iterable(samples))


class Shards(_Given):
    """The shards of a streamed data set of Hugging Face's, as its streams.

    A shard is entered by its own `state_dict`, as it was while it was counted, if that
    leads to the same sample; it does not behind a shuffle buffer. Else what lies before
    is read.
    """

    def __init__(self, dataset: Any) -> None:
        self._num_shards = int(dataset.num_shards)
        names = [f"shard {number}" for number in range(self._num_shards)]
        super().__init__(dataset, names)

    def scan(self, stream: int) -> Scan:
        """Count the samples; a mark is the shard's state as JSON."""
        shard, count, second = self._shard(stream), 0, ""
        states = [_as_json(shard.state_dict())]
        for rows in shard.iter(batch_size=_READ_AT_ONCE):
            if count == STRIDE:
                second = text_of(_samples(rows))
            count += _num_rows(rows)
            if count == STRIDE * len(states):
                states.append(_as_json(shard.state_dict()))
        if not (all(states) and second and len(states) > count // STRIDE):
            return Scan(count)
        with _said_by_nobody("datasets.iterable_dataset"):  # Of a shuffle buffer.
            shard = self._shard(stream)
            shard.load_state_dict(json.loads(states[1]))
            entered = text_of(_samples(next(shard.iter(_READ_AT_ONCE), {})))
        return Scan(count, np.array(states)) if entered == second else Scan(count)

    def open(self, stream: int, first: int) -> Iterator[dict[str, Any]]:
        shard = self._shard(stream)
        if self._scans is not None and len(self._scans[stream].marks):
            number, text = self.mark(stream, first)
            shard.load_state_dict(json.loads(str(text)))
            first -= number
        for rows in shard.iter(batch_size=_READ_AT_ONCE):
            yield from itertools.islice(_samples(rows), first, None)
            first = max(first - _num_rows(rows), 0)

    def _shard(self, stream: int) -> Any:
        return self.dataset.shard(num_shards=self._num_shards, index=stream)


@contextlib.contextmanager
def _said_by_nobody(name: str) -> Iterator[None]:
    """Let a logger say nothing for a while."""
    log = logging.getLogger(name)
    before, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = before


# By batches: for single samples a shard would share itself out among workers.


def _num_rows(rows: dict[str, Any]) -> int:
    return len(next(iter(rows.values()), ()))


def _samples(rows: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for row in range(_num_rows(rows)):
        yield {column: values[row] for column, values in rows.items()}


class Iterated(_Given):
    """An `IterableDataset` as one stream, which every replica reads through.

    Each takes its part. The stream is entered by the data set's own `state_dict`, if
    that can be written as JSON, else by iterating from the beginning.
    """

    def __init__(self, dataset: Any) -> None:
        code = getattr(type(dataset).__iter__, "__code__", None)
        found = _SHARING_OUT.intersection(code.co_names if code else ())
        if found:
            raise TypeError(
                f"{type(dataset).__name__} splits itself ({min(found)} in its "
                "__iter__), and the loader would split it again: samples would be "
                "lost. Let __iter__ yield all samples on every rank and worker."
            )
        length = None
        with contextlib.suppress(TypeError):  # Torch's ChainDataset has a len without.
            length = [len(dataset)]
        super().__init__(dataset, [type(dataset).__name__], lengths=length)
        if length is not None:
            self._given_by = "its __len__"
        self._start = None  # What it says of its place, if that is in itself.
        if hasattr(dataset, "state_dict") and self._has_own_place(iter(dataset)):
            self._start = copy.deepcopy(dataset.state_dict())

    def scan(self, stream: int) -> Scan:
        """Count the samples; a mark is the data set's state as JSON, if it has one."""
        del stream
        samples = iter(self.dataset)
        states = [self._state(samples)]
        for count in itertools.count():
            if count and count % STRIDE == 0:
                states.append(self._state(samples))
            if next(samples, self) is self:
                break
        return Scan(count, np.array(states if all(states) else []))

    def _state(self, samples: Any) -> str:
        holder = self.dataset if self._has_own_place(samples) else samples
        if not (hasattr(holder, "state_dict") and hasattr(holder, "load_state_dict")):
            return ""
        return _as_json(holder.state_dict())

    def open(self, stream: int, first: int) -> Iterator[Any]:
        number, state = 0, copy.deepcopy(self._start)
        if self._scans is not None and len(self._scans[stream].marks):
            number, text = self.mark(stream, first)
            state = json.loads(str(text))
        samples = iter(self.dataset)
        if state is not None and hasattr(samples, "load_state_dict"):
            samples.load_state_dict(state)
        elif state is not None:
            self.dataset.load_state_dict(state)
            samples = iter(self.dataset)
        if self._has_own_place(samples):
            _TURNS[id(self.dataset)] = turn = object()
            samples = self._checked(samples, turn)
        return itertools.islice(samples, first - number, None)

    def _has_own_place(self, samples: Any) -> bool:
        """Return whether the data set itself, and no iterator, knows where it is."""
        return samples is self.dataset or (
            hasattr(self.dataset, "load_state_dict")
            and not hasattr(samples, "load_state_dict")
        )

    def _checked(self, samples: Iterator[Any], turn: object) -> Iterator[Any]:
        """Yield samples while nobody else iterates over the data set."""
        for sample in samples:
            if _TURNS[id(self.dataset)] is not turn:
                raise ElasticRunError(
                    f"{self.names[0]} keeps its position in itself, and another loop "
                    "began to iterate over it before this one was done, whose samples "
                    "would be lost. Give each loader its own data set, or let __iter__ "
                    "return an iterator that keeps the position."
                )
            yield sample


def _as_json(state: Any) -> str:
    """Return a state as JSON, or nothing if that would not be the same."""
    try:
        text = json.dumps(state)
    except TypeError:
        return ""
    return text if json.loads(text) == state else ""
