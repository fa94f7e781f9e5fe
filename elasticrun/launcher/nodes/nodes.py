"""The nodes of a job, as the launcher of one of them sees them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from elasticrun.errors import counted
from elasticrun.launcher.endings import EndKind, Outcome
from elasticrun.replicas.wire import Message

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
        number: The generation's, as far as this node knows.
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
        number: The generation's.
        share: Replicas on this node.
        offset: The rank of the first of them.
        size: Replicas on all nodes.
        address: The host of the store, which rank 0 serves.
        is_outward: Whether that is reached by other nodes.
        interface: The network interface towards them, if it is known.
        node: This node's number, of `num_nodes`.
        names: What the nodes' machines are called, by number; none for one machine.
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

    def on_outcome(self, outcome: Outcome) -> None:
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

    def tell_trouble(self, *, is_hang: bool = False) -> None:
        pass

    def conclude(self, outcome: Outcome) -> None:
        self._subscriber.on_outcome(outcome)

    def leave(self, kind: str, cause: str) -> None:
        pass

    def close(self, *, is_hurried: bool) -> None:
        pass


Note = dict[str, Any]


class Attempt:
    """What this node has noted, and what it knows of the others.

    Args:
        number: The attempt's, from 0 in each round.
        hosts: Names of nodes that are known from before.

    Attributes:
        own: This node's note.
        silent: Nodes of whom nothing is heard.
        is_awaited: Whether a node waits for the next round.
        has_heard_trouble: Whether this node has passed on that others failed.
    """

    def __init__(
        self, number: int, *, node: int, num_nodes: int, hosts: dict[int, str]
    ) -> None:
        self.number = number
        self.node = node
        self.own: Note = {}
        self.silent: set[int] = set()
        self.is_awaited = False
        self.has_heard_trouble = False
        self.hosts = dict(hosts)
        self._others = set(range(num_nodes)) - {node}
        self._notes: dict[int, Note] = {}
        self._heard: set[tuple[int, str]] = set()

    def read(self, message: Message) -> None:
        self._notes = {int(node): note for node, note in message["notes"].items()}
        for node, note in self._notes.items():
            if "host" in note:
                self.hosts[node] = note["host"]
        self.silent = set(message["silent"])
        self.is_awaited = message["num_waiting"] > 0

    # Before the generation.

    @property
    def is_refused(self) -> bool:
        """Whether a node makes no offer in this attempt.

        A node notes either its offer or that it meets the others anew, and never takes
        that back, so all come to the same.
        """
        return bool(self.silent) or any("offer" not in n for n in self._notes.values())

    @property
    def is_agreed(self) -> bool:
        notes = (self.own, *self._notes.values())
        return self._notes.keys() == self._others and all("offer" in n for n in notes)

    @property
    def offers(self) -> list[Offer]:
        return [Offer.decode(note["offer"]) for note in self._in_order()]

    @property
    def addresses(self) -> list[str]:
        return [str(note["address"]) for note in self._in_order()]

    @property
    def names(self) -> list[str]:
        return [str(note["host"]) for note in self._in_order()]

    def _in_order(self) -> list[Note]:
        notes = {**self._notes, self.node: self.own}
        return [notes[node] for node in sorted(notes)]

    # While it runs.

    def request_stop(self, kind: str, cause: str) -> None:
        """Ask all nodes to save and exit, unless this one has a stronger reason."""
        there = self.own.get("stop")
        if there is None or REASONS.index(kind) >= REASONS.index(there["kind"]):
            self.own["stop"] = {"kind": kind, "cause": cause}

    def new_stop_requests(self, *kinds: str) -> Iterator[tuple[str, str]]:
        """Yield each such request of another node, with its cause, once."""
        for node, note in sorted(self._notes.items()):
            request = note.get("stop", {"kind": ""})
            key = node, str(request["kind"])
            if key[1] in kinds and key not in self._heard:
                self._heard.add(key)
                who = "" if key[1] == JOIN else f"{self.label(node)}: "
                yield key[1], who + request["cause"]

    @property
    def has_trouble(self) -> bool:
        """Whether replicas on another node have failed."""
        return any(
            note.get("has_trouble")
            or note.get("ending", {}).get("kind") in (EndKind.CRASHED, EndKind.LEFT)
            for note in self._notes.values()
        )

    @property
    def is_hang(self) -> bool:
        """Whether that is a hang on any of them, whose stacks all are to print."""
        return any(note.get("is_hang") for note in self._notes.values())

    # After it.

    @property
    def missing(self) -> set[int]:
        """Other nodes that have not said how theirs ended."""
        ended = {node for node, note in self._notes.items() if "ending" in note}
        return self._others - ended

    @property
    def outcomes(self) -> list[Outcome]:
        return [
            Outcome.decode(note["ending"], node=self.label(node))
            for node, note in sorted(self._notes.items())
            if "ending" in note
        ]

    @property
    def stop_requests(self) -> set[str]:
        notes = (self.own, *self._notes.values())
        return {str(note["stop"]["kind"]) for note in notes if "stop" in note}

    @property
    def changes_members(self) -> bool:
        """Whether the next generation needs another round."""
        has_left = any(outcome.kind == EndKind.LEFT for outcome in self.outcomes)
        is_requested = bool(self.stop_requests & {JOIN, LEAVE})
        return is_requested or has_left or bool(self.silent) or self.is_awaited

    # For people.

    def label(self, node: int) -> str:
        host = self.hosts.get(node)
        return f"node {node} ({host})" if host else f"node {node}"

    def describe_silent(self) -> str:
        labels = ", ".join(self.label(node) for node in sorted(self.silent))
        return f"{labels}: no sign of life for some seconds"
