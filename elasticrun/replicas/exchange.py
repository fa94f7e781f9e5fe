"""Conversations between rank 0 and all replicas: it hears all, and answers all.

What is said stands in the job's store, under keys that this module and `store` name. A
conversation has a topic, which is the same on all replicas and used once:

    <topic>/<rank>          what a replica tells rank 0
    <topic>/<rank>/<part>   what else it tells, which rank 0 fetches when it needs it
    <topic>/verdict         what rank 0 has decided, or why it could not
    <topic>/heard/<rank>    that a replica knows it, when rank 0 asks back
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from elasticrun.errors import AgreementError, ElasticRunError, text_of
from elasticrun.logger import Logger
from elasticrun.replicas.store import START_TIMEOUT, JobStore

logger = Logger(__name__)

# Topics.
HERE = "here"  # That a replica has found the store.
DIRECTORY = "directory"  # Whether a replica was given a checkpoint directory.
DEVICE = "device"  # Which GPU a replica would have.
START = "start"  # What all begin with.
SEEN = "seen"  # Whether a replica sees the checkpoint to begin with.
SAVE_BEGUN = "save/{}/begun"  # Where the files of a checkpoint, by its number, go to.
SAVE_WRITTEN = "save/{}/written"  # What each rank has written of it.
SAVE_ENDED = "save/{}/ended"  # What became of it.


def loader_made(name: str) -> str:
    """Return the topic of how replicas have made a loader."""
    return f"loader/{name}"


_PATIENCE = START_TIMEOUT  # For all to come to where they agree on something.
_QUIET_SECONDS = 15.0
_LAST_WORD_SECONDS = 5.0  # For those who live to hear why nothing begins.
_SHORTEST_PAUSE = 0.001  # Between two looks into the store,
_LONGEST_PAUSE = 0.05  # which rank 0 serves: with many replicas they look less often.
_PAUSE_EACH = 1e-4
_MOST_AT_ONCE = 256  # Replicas of which one call asks.


class RankZeroError(ElasticRunError):
    """Raised on the other ranks when a decision has failed on rank 0."""

    def __init__(self, text: str, kind: str) -> None:
        super().__init__(text)
        self.kind = kind


class ValuesByRank(Mapping[int, Any]):
    """The value of each rank, decoded from JSON at each access.

    Were all of it objects at once, Python's garbage collector would look through
    everything that the program has, because of so many new ones, and training waits.
    """

    def __init__(self, texts: Mapping[int, str | bytes]) -> None:
        self._texts = texts

    def __getitem__(self, rank: int) -> Any:
        return json.loads(self._texts[rank])

    def __iter__(self) -> Iterator[int]:
        return iter(self._texts)

    def __len__(self) -> int:
        return len(self._texts)


@dataclass(frozen=True)
class Gathered:
    """What rank 0 has heard.

    Attributes:
        by_rank: What each rank has told.
        gone: The ranks that will tell nothing any more, and what became of them.
        silent: Those that have told nothing in time.
        seconds: How long that was.
    """

    by_rank: ValuesByRank
    gone: dict[int, str] = field(default_factory=dict)
    silent: list[int] = field(default_factory=list)
    seconds: float = 0.0


class Exchange:
    """One replica's access to the conversations with rank 0.

    For one thread at a time, as its store's client is.

    Args:
        store: None for a replica that is alone: it talks with itself.
        gone: Ranks that take part no more, and what became of them. Rank 0's watcher
            adds to it, in its own thread.

    Attributes:
        given_up: Set when nobody is to wait any more. With it, waiting is looking now
            and then: a thread must not be in the store's C++ when the interpreter ends.
        asked: The topic of the last verdict of which rank 0 will ask whether all have
            heard it, or None.
    """

    def __init__(
        self,
        store: JobStore | None,
        *,
        rank: int,
        world_size: int,
        gone: dict[int, str] | None = None,
    ) -> None:
        self._store = store
        self._rank = rank
        self._others = range(1, world_size)
        self._gone = {} if gone is None else gone
        self._keys: list[str] = []
        self.given_up: threading.Event | None = None
        self.asked: str | None = None
        self._longest_pause = max(_LONGEST_PAUSE, world_size * _PAUSE_EACH)

    # What all replicas call, at the same place of the program.

    def agree(
        self,
        topic: str,
        own: Any,
        judge: Callable[[list[Any]], Any],
        *,
        is_end: Callable[[Any], object] = lambda _: False,
    ) -> Any:
        """Return on all replicas what `judge` returns on rank 0 for the values of all.

        Args:
            is_end: Whether no replica goes on after this verdict: rank 0 then returns
                only when all have heard it.
        """
        if self._rank != 0:
            self.report(topic, own)
            try:
                return self.await_verdict(topic, timeout=2 * _PATIENCE)
            except RankZeroError as error:
                raise AgreementError(str(error)) from error
            except TimeoutError as error:
                raise self._absence(topic, [0]) from error
        heard = self.gather(topic, own, timeout=min(_QUIET_SECONDS, _PATIENCE))
        if heard.silent:
            logger.warning("waiting for %s (%s)", self._list(heard.silent), topic)
            heard = self.gather(topic, own, timeout=_PATIENCE)
        if heard.silent:
            absence = self._absence(topic, heard.silent)
            self._gone.update(dict.fromkeys(heard.silent, "it did not come"))
            self.announce_failure(topic, absence)
            self.wait_until_heard(topic, timeout=_LAST_WORD_SECONDS)
            raise absence
        verdict = judge(list(heard.by_rank.values()))
        self.announce(topic, verdict, is_end=bool(is_end(verdict)))
        return verdict

    def decide_on_rank_0(
        self,
        topic: str,
        make: Callable[[], Any],
        *,
        timeout: float = START_TIMEOUT,
        is_heard: bool = False,
    ) -> Any:
        """Return on all replicas what `make` returns on rank 0.

        Args:
            timeout: Seconds that the others wait for it.
            is_heard: Whether rank 0 will ask whether all have heard it, as it does of a
                failure.
        """
        if self._rank != 0:
            return self.await_verdict(topic, timeout=timeout)
        try:
            made = make()
        except Exception as error:
            self.announce_failure(topic, error)
            raise
        self._tell_verdict(topic, {"made": made, "asks": is_heard})
        return made

    # What rank 0 calls.

    def gather(
        self, topic: str, own: Any, *, timeout: float = START_TIMEOUT
    ) -> Gathered:
        """Return the values of all ranks, this one's included."""
        told: dict[int, str | bytes] = {0: json.dumps(own)}
        if self._store is None:
            return Gathered(ValuesByRank(told))
        deadline = time.monotonic() + timeout
        for ranks in self._some_others():
            self._wait_for(self._store, topic, ranks, deadline)
            keys = {rank: f"{topic}/{rank}" for rank in ranks}
            if not self._store.has(list(keys.values())):  # Only then one by one.
                keys = {rank: k for rank, k in keys.items() if self._store.has([k])}
            texts = self._store.take_all(list(keys.values()))
            told |= zip(keys, texts, strict=True)
        missing = [rank for rank in self._others if rank not in told]
        gone = {rank: self._gone[rank] for rank in missing if rank in self._gone}
        silent = [rank for rank in missing if rank not in gone]
        return Gathered(ValuesByRank(told), gone, silent, timeout)

    def fetch(self, topic: str, name: str, ranks: Iterable[int]) -> list[Any]:
        """Return a part of what each of these ranks has told, which `gather` has heard.

        Args:
            name: The part's, as `report` was given it.
        """
        keys = [f"{topic}/{rank}/{name}" for rank in ranks]
        if self._store is None or not keys:
            return []
        return [json.loads(text) for text in self._store.take_all(keys)]

    def announce(self, topic: str, verdict: Any, *, is_end: bool = False) -> None:
        """Tell all the verdict.

        Args:
            is_end: Whether to return only when all who live have heard it.
        """
        self._tell_verdict(topic, {"made": verdict, "asks": is_end})
        if is_end:
            self.wait_until_heard(topic, timeout=_LAST_WORD_SECONDS)

    def announce_failure(self, topic: str, error: Exception) -> None:
        """Tell all why there is no verdict."""
        failure = {"error": text_of(error), "kind": type(error).__name__}
        self._tell_verdict(topic, {**failure, "asks": True})

    def wait_until_heard(self, topic: str, *, timeout: float) -> None:
        """Wait until all who live have heard the verdict.

        They need the store for that, and it goes with this process.
        """
        if self._store is None:
            return
        deadline = time.monotonic() + timeout
        for ranks in self._some_others():
            self._wait_for(self._store, f"{topic}/heard", ranks, deadline)

    # What the others call.

    def report(
        self, topic: str, value: Any, *, parts: Mapping[str, Any] | None = None
    ) -> None:
        """Tell rank 0.

        Args:
            parts: More to tell, by name, for `fetch`.
        """
        key = f"{topic}/{self._rank}"
        for name, part in (parts or {}).items():
            self._put(f"{key}/{name}", part)
        self._put(key, value)

    def await_verdict(
        self, topic: str, *, timeout: float = START_TIMEOUT, is_optional: bool = False
    ) -> Any:
        """Return the verdict of rank 0.

        Args:
            is_optional: Whether there may well be none. Then the store is polled, since
                torch logs each wait in C++ that ends without a value.
        """
        assert self._store is not None
        key = f"{topic}/verdict"
        if self.given_up is None and not is_optional:
            verdict = self._store.take(key, timeout=timeout)
        else:
            verdict = self._look_for(self._store, key, timeout=timeout)
        if verdict["asks"]:
            self._put(f"{topic}/heard/{self._rank}", True)
        if "error" in verdict:
            raise RankZeroError(verdict["error"], verdict["kind"])
        return verdict["made"]

    # What has been said.

    @property
    def num_keys(self) -> int:
        """How many keys this end has put into the store and not removed."""
        return len(self._keys)

    def remove_keys(self, number: int) -> None:
        """Remove the first `number` keys that this end has put into the store.

        Whoever needs them has read them. Each end removes its own, so that rank 0 need
        not remove those of all.
        """
        if self._store is not None:
            self._store.remove(self._keys[:number])
        del self._keys[:number]

    def _tell_verdict(self, topic: str, verdict: dict[str, Any]) -> None:
        if verdict["asks"]:
            self.asked = topic
        self._put(f"{topic}/verdict", verdict)

    def _put(self, key: str, value: Any) -> None:
        if self._store is not None:
            self._store.put(key, value)
            self._keys.append(key)

    def _some_others(self) -> Iterator[range]:
        """Yield the other ranks in groups, so small that no call holds training up."""
        for first in range(0, len(self._others), _MOST_AT_ONCE):
            yield self._others[first : first + _MOST_AT_ONCE]

    def _wait_for(
        self, store: JobStore, topic: str, ranks: range, deadline: float
    ) -> None:
        """Wait until all of these that take part have told something."""
        pause = _SHORTEST_PAUSE
        # The store is at hand, but a look costs the more the more are asked about.
        longest = max(_LONGEST_PAUSE / 5, 2 * _PAUSE_EACH * len(ranks))
        while not store.has([f"{topic}/{r}" for r in ranks if r not in self._gone]):
            if time.monotonic() > deadline or not self._may_wait(pause):
                return
            pause = min(2 * pause, longest)

    def _look_for(self, store: JobStore, key: str, *, timeout: float) -> Any:
        deadline = time.monotonic() + timeout
        pause = _SHORTEST_PAUSE
        while not store.has([key]):
            if time.monotonic() > deadline or not self._may_wait(pause):
                raise TimeoutError(f"no {key} within {timeout:g} s")
            pause = min(2 * pause, self._longest_pause)
        return json.loads(store.take_all([key])[0])

    def _may_wait(self, seconds: float) -> bool:
        """Wait a little; return whether to go on waiting."""
        if self.given_up is not None:
            return not self.given_up.wait(seconds)
        time.sleep(seconds)
        return True

    def _absence(self, topic: str, ranks: list[int]) -> AgreementError:
        return AgreementError(
            f"{self._list(ranks)} did not come to the agreement on {topic!r} within "
            f"{_PATIENCE:g} s, as each replica does when the job starts. Look at the "
            "log: it may have died or hang, or its program may take another path."
        )

    def _list(self, ranks: list[int]) -> str:
        shown = ", ".join(map(str, ranks[:20])) + (", ..." if len(ranks) > 20 else "")
        return f"rank{'s' * (len(ranks) > 1)} {shown} of {len(self._others) + 1}"
