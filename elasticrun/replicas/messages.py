"""The messages of watchers, to each other and from their own replica.

    message   from                      to           what follows
    Request   any thread of a replica   its watcher  it is sent on to rank 0's
              a watcher                 rank 0's     Ask, unless it is served already
    Ask       rank 0's                  all          Answer, and a promise
    Answer    a watcher                 rank 0's     Decision, once all answered
    Decision  rank 0's                  all          all act at that boundary
    GiveUp    rank 0's                  all          a stop exits; a save is left out
    CallOff   rank 0's                  all          all go on
    Close     the training thread       its watcher  on rank 0 Farewell, else HasLeft
    Farewell  rank 0's                  all          HasLeft
    HasLeft   a watcher                 rank 0's     CallOff, if they were agreeing
    HungUp    a connection that ended   its watcher  on rank 0 Dead, unless it left
    Dead      rank 0's                  all          no boundary is passed any more
    Report    a watcher                 rank 0's     it is sent on
              rank 0's                  who asked,   it is kept
                                        or all       Report to who asked

`Decision` stands with the gate that keeps it. Those from one replica to another travel
as JSON, {"type": "Ask", "number": 3}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from elasticrun.replicas.gate import Decision
from elasticrun.replicas.wire import Message


@dataclass(frozen=True)
class Request:
    """A request for a checkpoint or a stop, for rank 0.

    Attributes:
        kind: STOP or CHECKPOINT.
        at: The boundary that the asking replica had reached.
    """

    kind: str
    cause: str
    exit_code: int
    at: int


@dataclass(frozen=True)
class Ask:
    """Asks a replica which boundary it has passed.

    Who answers passes the next one only when it has heard what is decided.

    Attributes:
        number: Of the agreement, so that a late answer counts for no other.
    """

    number: int


@dataclass(frozen=True)
class Answer:
    """The boundary that a rank has passed, and its promise to wait at the next one."""

    number: int
    rank: int
    boundary: int


@dataclass(frozen=True)
class GiveUp:
    """No boundary could be agreed.

    Attributes:
        reason: Who was silent or died.
    """

    kind: str
    exit_code: int
    reason: str


@dataclass(frozen=True)
class CallOff:
    """No boundary of all replicas is to come: a program has come to its end."""


@dataclass(frozen=True)
class Close:
    """The program has ended; there is nothing to watch any more."""


@dataclass(frozen=True)
class Farewell:
    """Rank 0 leaves, and its store with it, once all have answered."""


@dataclass(frozen=True)
class HasLeft:
    """This rank has left the job."""

    rank: int


@dataclass(frozen=True)
class HungUp:
    """The connection to this rank has ended."""

    rank: int


@dataclass(frozen=True)
class Dead:
    """The process of this rank has died."""

    rank: int


@dataclass(frozen=True)
class Report:
    """What a replica has counted.

    Attributes:
        to: Who asked; None asks all the others.
        counts: Empty of one that has left.
    """

    rank: int
    to: int | None
    counts: list[int]


_KINDS = {
    kind.__name__: kind
    for kind in (
        *(Request, Ask, Answer, Decision, GiveUp),
        *(CallOff, Farewell, HasLeft, HungUp, Dead, Report),
    )
}


def encode(message: object) -> Message:
    """Return a message as it travels."""
    return {"type": type(message).__name__, **vars(message)}


def decode(message: Message) -> Any:
    """Return the message that `encode` was given."""
    values = dict(message)
    return _KINDS[values.pop("type")](**values)
