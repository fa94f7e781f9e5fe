"""What a replica's journal tells, wherever in writing it the replica was killed."""

from __future__ import annotations

import contextlib
import mmap
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch

from elasticrun.checkpoint.states.generators import Generators, seed_all
from elasticrun.checkpoint.states.state import BaseState
from elasticrun.job.journal import Journal, Told, encode_offer
from elasticrun.replicas.records import Records
from elasticrun.replicas.store import Address, JobStore, serve_store_at


class Killed(BaseException):
    pass


class Mortal(mmap.mmap):
    """A record's memory, whose writer dies at one of the moments of its stores.

    At each byte of a short store and some of a long one; up to four bytes come at once.
    """

    num_moments = 0  # Until it dies.

    def __setitem__(self, place: Any, data: Any) -> None:
        size = len(data)
        cuts = [0] if size <= 4 else sorted({0, 1, 2, 7, size // 2, size - 1})
        for cut in cuts:
            self.num_moments -= 1
            if self.num_moments == 0:
                super().__setitem__(slice(place.start, place.start + cut), data[:cut])
                raise Killed
        super().__setitem__(place, data)


class Sums(BaseState):
    """What this replica has added up."""

    def __init__(self) -> None:
        super().__init__("total")
        self.own: list[Any] = []

    def own_part(self) -> Any:
        return [*self.own]

    def save(self, fileobj: Any) -> None:
        raise NotImplementedError

    def load(self, fileobj: Any) -> None:
        raise NotImplementedError


@pytest.fixture
def make() -> Callable[[], Records]:
    server = serve_store_at("127.0.0.1")
    store = JobStore(Address("127.0.0.1", server.port), server)
    return lambda: Records(0, range(1), store)


def turns(records: Records) -> Iterator[None]:
    """Train for some turns, as far as a journal hears of it; stop after each thing."""
    seed_all(1)
    generators, sums = Generators(torch.device("cpu")), Sums()
    journal = Journal(records, generators)
    draws: list[Callable[[], object]] = [random.random, np.random.rand]
    draws += [lambda: torch.rand(3), lambda: None, np.random.randn]
    kept: dict[int, tuple[str, int]] = {}
    for number, draw in enumerate(draws):
        draw()  # In its forward pass.
        journal.look()
        yield
        for key in ("loss", 7):
            journal.add_part("total", key, [number, "a change"])
            sums.own.append([key, [number, "a change"]])
            yield
        if number == 3:
            journal.add_part("total", None, None)
            sums.own.clear()
            yield
        random.gauss(0, 1)  # Behind its step.
        generators.remember()
        entry = journal.entry([sums], is_complete=True)
        yield
        kept = {n: each for n, each in kept.items() if n == 1} | {number: entry}
        journal.write(kept)
        yield
    records.offer(encode_offer({number: b"generators"}))
    yield


def told(records: Records) -> list[Any]:
    """Return all that others may ask."""
    told = Told(records, 0)
    known = [*told.entries.items(), (99, told.next)]
    return [
        told.offer,
        *((n, e, e and records.read_cell(0, e.cell)) for n, e in known),
    ]


def test_a_kill_at_any_moment_leaves_what_was_told_before_or_after(
    make: Callable[[], Records],
) -> None:
    with closing(make()) as records:
        states = [told(records), *(told(records) for _ in turns(records))]
    moment, num_done = 0, -1
    while num_done < len(states) - 1:
        moment, num_done = moment + 1, 0
        with closing(make()) as records:
            records._memory = Mortal(records._descriptor, len(records._memory))
            records._memory.num_moments = moment
            with contextlib.suppress(Killed):
                for _ in turns(records):
                    num_done += 1
            assert told(records) in states[num_done : num_done + 2], moment
    assert moment > 200
