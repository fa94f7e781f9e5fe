"""The nodes of a job, as the launcher of one of them sees them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from elasticrun.errors import counted
from elasticrun.launcher.verdict import Verdict

LOOPBACK = "127.0.0.1"

# Why a node may ask all to save and exit, the stronger reasons later: another share,
# another node, to leave, and the end of the job.
SCALE = "scale"
JOIN = "join"
LEAVE = "leave"
END = "end"
REASONS = (SCALE, JOIN, LEAVE, END)


@dataclass(frozen=True)
class Offer:
    """What a node brings into the next generation.

    Attributes:
        ports: Where its first replica could serve the store: on loopback, and at the
            address that other nodes reach.
        number: Of the generation, as far as this node knows.
    """

    share: int
    ports: tuple[int, ...]
    number: int
    has_trained: bool = False
    newest_at_crash: int = 0
    num_used: int = 0

    def encode(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def decode(cls, values: Mapping[str, Any]) -> Offer:
        return cls(**{**values, "ports": tuple(values["ports"])})


@dataclass(frozen=True)
class RoundPlan:
    """What all nodes have agreed to start.

    Attributes:
        number: Of the generation.
        share: Replicas on this node.
        offset: The rank of the first of them.
        size: Replicas on all nodes.
        address: The host of the store, which rank 0 serves.
        is_outward: Whether that is reached by other nodes.
        interface: The network interface towards them, if it is known.
        node: This node's number, of `num_nodes`.
        names: Of the nodes' machines, by number; none for one machine.
        has_trained: Whether any node has trained a batch since the job's start.
        newest_at_crash: The newest checkpoint at the last crash, as the node says that
            knows of most crashes.
        num_used: Restarts without a newer checkpoint so far, as the same node says.
    """

    number: int
    share: int
    offset: int
    size: int
    address: str
    port: int
    is_outward: bool = False
    interface: str = ""
    node: int = 0
    num_nodes: int = 1
    names: tuple[str, ...] = ()
    has_trained: bool = False
    newest_at_crash: int = 0
    num_used: int = 0

    def describe(self) -> str:
        text = f"{counted(self.share, 'replica')} started"
        if self.num_nodes > 1:
            text += f" as {self.label}, {self.size} on {self.num_nodes} nodes"
        return f"generation {self.number}: {text}"

    @property
    def label(self) -> str:
        return f"node {self.node} ({self.names[self.node]})"


def plan_round(
    offers: Sequence[Offer],
    node: int,
    *,
    addresses: Sequence[str],
    interface: str,
    names: Sequence[str] = (),
) -> RoundPlan:
    """Return what one of the nodes is to start."""
    is_outward = len(offers) > 1
    most = max(offers, key=lambda each: (each.newest_at_crash, each.num_used))
    return RoundPlan(
        number=max(each.number for each in offers),
        share=offers[node].share,
        offset=sum(each.share for each in offers[:node]),
        size=sum(each.share for each in offers),
        address=addresses[0] if is_outward else LOOPBACK,
        port=offers[0].ports[-1 if is_outward else 0],
        is_outward=is_outward,
        interface=interface if is_outward else "",
        node=node,
        num_nodes=len(offers),
        names=tuple(names),
        has_trained=any(each.has_trained for each in offers),
        newest_at_crash=most.newest_at_crash,
        num_used=most.num_used,
    )


class NodesSubscriber(Protocol):
    """Who is told what becomes of the nodes."""

    @property
    def num_shares(self) -> int | None:
        """Virtual replicas of the job; None if there are none, or it is not known."""
        ...

    def on_open(self, bind: str) -> None:
        """The others can be met; rank 0 is to listen for them at `bind`."""

    def on_joined(self) -> None:
        """This node is a member, and may make its offer."""

    def on_round(self, round_: RoundPlan) -> None:
        """All members have made their offer: let the replicas go."""

    def on_stop_requested(self, kind: str, cause: str) -> None:
        """Another node asks all to save and exit."""

    def on_trouble_elsewhere(self, *, is_hang: bool) -> None:
        """A replica has failed, or hangs, on another node."""

    def on_broken(self, text: str) -> None:
        """A node is gone, and with it replicas that the generation needs."""

    def on_verdict(self, verdict: Verdict) -> None:
        """This is how the generation ended, on all nodes."""

    def on_closed(self) -> None:
        """The job has ended without this node."""

    def on_no_nodes(self, why: str) -> None:
        """There is no way to meet the others."""


class OneNode:
    """The nodes of a job on one machine: everything is agreed at once.

    `ManyNodes` says what its methods are for.
    """

    is_needed = True

    def __init__(self, subscriber: NodesSubscriber) -> None:
        self._subscriber = subscriber
        self.round: RoundPlan | None = None

    @property
    def pids(self) -> set[int]:
        return set()

    def open(self) -> None:
        self._subscriber.on_open("")

    def join(self) -> None:
        self._subscriber.on_joined()

    def offer(self, offer: Offer) -> None:
        self.round = plan_round([offer], 0, addresses=[LOOPBACK], interface="")
        self._subscriber.on_round(self.round)

    def request_stop(self, kind: str, cause: str) -> None:
        pass

    def note_trouble(self, *, is_hang: bool = False) -> None:
        pass

    def conclude(self, verdict: Verdict) -> None:
        self._subscriber.on_verdict(verdict)

    def leave(self, kind: str, cause: str) -> None:
        pass

    def close(self, *, is_hurried: bool) -> None:
        pass
