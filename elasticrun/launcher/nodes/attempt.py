"""One generation in a round of nodes, as one node sees it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from elasticrun.launcher.nodes.nodes import JOIN, LEAVE, REASONS, Offer
from elasticrun.launcher.verdict import EndKind, Verdict
from elasticrun.replicas.wire import Message

Note = dict[str, Any]


class Attempt:
    """What this node has noted, and what it knows of the others.

    Args:
        number: Of the attempt, from 0 in each round.
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
    def verdicts(self) -> list[Verdict]:
        return [
            Verdict.decode(note["ending"], node=self.label(node))
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
        has_left = any(verdict.kind == EndKind.LEFT for verdict in self.verdicts)
        is_requested = bool(self.stop_requests & {JOIN, LEAVE})
        return is_requested or has_left or bool(self.silent) or self.is_awaited

    # For people.

    def label(self, node: int) -> str:
        host = self.hosts.get(node)
        return f"node {node} ({host})" if host else f"node {node}"

    def describe_silent(self) -> str:
        labels = ", ".join(self.label(node) for node in sorted(self.silent))
        return f"{labels}: no sign of life for some seconds"
