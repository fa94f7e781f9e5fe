"""The nodes of a job on many machines, by torch's rendezvous and the store of a round.

The members of a round of the rendezvous stay the same. While they do, its generations
follow one another as attempts in the round's store. In each attempt a node notes its
offer, later perhaps a request, and at last how its replicas ended. All nodes read the
same notes, so all come to the same outcome.
"""

from __future__ import annotations

import enum
import socket
import time
from collections.abc import Callable
from typing import Any

from elasticrun.errors import counted
from elasticrun.launcher.endings import EndKind, Outcome, merged
from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.nodes.nodes import (
    END,
    JOIN,
    LEAVE,
    REASONS,
    Attempt,
    NodesSubscriber,
    Offer,
    OneNode,
    RoundPlan,
    plan_round,
)
from elasticrun.launcher.nodes.rendezvous_process import RendezvousProcess
from elasticrun.launcher.options import NodeSettings, Options
from elasticrun.replicas.wire import Message

_RETRY_SECONDS = 0.5
_QUIET_SECONDS = 15.0
_HAS_COME = "another node has come"


class _NodePhase(enum.Enum):
    OPENING = 0  # Looking for the endpoint.
    OUTSIDE = 1
    JOINING = 2
    MEMBER = 3  # A member of the round, without an offer.
    OFFERED = 4
    RUNNING = 5
    CONCLUDING = 6  # The replicas here have ended.


class ManyNodes:
    """The nodes of a job on many machines; this one takes part with the others.

    Args:
        name: The job's; jobs of other names do not see each other.
        share: Replicas that this node brings when it comes.

    Attributes:
        round: What all nodes started last; None before the first generation.
    """

    def __init__(
        self,
        settings: NodeSettings,
        name: str,
        *,
        share: int,
        loop: EventLoop,
        subscriber: NodesSubscriber,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._share = share
        self._name = name
        self._loop = loop
        self._subscriber = subscriber
        self._say = say
        self._rendezvous: RendezvousProcess | None = None
        self._phase = _NodePhase.OPENING
        self._wants_to_join = False
        self._address: Message = {}
        self._attempt = Attempt(0, node=0, num_nodes=1, hosts={})
        self._num_nodes = 1
        self._offer: Offer | None = None
        self._outcome: Outcome | None = None
        self._lost_since: float | None = None
        self._num_waits = 0
        self._why = ""  # The last try to meet the others has failed.
        self._is_host = False  # It serves the endpoint.
        self._is_leaving = False
        self._room: Message = {}  # As told to nodes that come.
        self.round: RoundPlan | None = None

    # What the supervisor asks for.

    @property
    def pids(self) -> set[int]:
        """The processes that it needs between generations."""
        return set() if self._rendezvous is None else {self._rendezvous.pid}

    @property
    def is_needed(self) -> bool:
        """Whether the others cannot go on without this node."""
        return self._is_host and not self._settings.place

    def open(self) -> None:
        """Look for the others; `on_open` follows."""
        self._phase = _NodePhase.OPENING
        self._say_if_long(lambda: self._looking)
        try:
            self._rendezvous = RendezvousProcess(
                self._settings,
                self._name,
                loop=self._loop,
                on_message=self._on_message,
                on_lost=self._on_lost,
            )
        except OSError as error:  # No processes or open files are left.
            self._on_lost(str(error))

    def join(self) -> None:
        """Take part in the next generation; `on_joined` follows, each time."""
        self._wants_to_join = True
        if self._phase is _NodePhase.OUTSIDE:
            self._join_next_round()
        elif self._phase is _NodePhase.MEMBER:
            self._subscriber.on_joined()

    def offer(self, offer: Offer) -> None:
        """Say what this node brings; `on_round` follows once all have."""
        self._offer = offer
        self._phase = _NodePhase.OFFERED
        self._post(
            host=socket.gethostname(),
            address=self._address["told"],
            offer=offer.encode(),
        )
        self._start_if_agreed()

    def request_stop(self, kind: str, cause: str) -> None:
        """Tell the others why all are to save and exit."""
        self._is_leaving = kind == LEAVE
        self._attempt.request_stop(kind, cause)
        self._post()

    def tell_trouble(self, *, is_hang: bool = False) -> None:
        """Tell the others that a replica has failed, or hangs."""
        self._post(has_trouble=True, **({"is_hang": True} if is_hang else {}))

    def conclude(self, outcome: Outcome) -> None:
        """Say how the generation ended here; `on_outcome` follows once all have."""
        self._outcome = outcome
        if self._phase is _NodePhase.RUNNING:
            self._phase = _NodePhase.CONCLUDING
            self._post(ending=outcome.encode())
            self._conclude_if_all_ended()
        else:  # The others were lost meanwhile.
            self._give_outcome(self._loss)

    def leave(self, kind: str, cause: str) -> None:
        """Tell the others that this node waits for nothing any more."""
        self._is_leaving = kind == LEAVE
        self._attempt.request_stop(kind, cause)
        self._post(ending=Outcome(EndKind.LEFT, text=cause).encode())

    def close(self, *, is_hurried: bool) -> None:
        """Leave the other nodes, who need not wait for this one."""
        if self._rendezvous is None:
            return
        if self._phase is _NodePhase.OPENING:
            self._rendezvous.close()
            return
        if self._phase is _NodePhase.MEMBER:
            self._post(rejoins=True)  # So that nobody waits for an offer.
        is_end = END in self._attempt.stop_requests
        self._rendezvous.say_goodbye(
            {
                "type": "bye",
                "closes": is_end or (self._is_host and not self._is_leaving),
                "is_hurried": is_hurried,
            }
        )

    # How the others are met.

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "notes":
            self._on_notes(message)
        elif kind == "connected":
            self._on_connected(message)
        elif kind == "failing":
            self._on_failing(message["text"], is_usual=message["is_usual"])
        elif kind == "joined":
            self._on_joined(message)
        elif kind == "closed":
            self._subscriber.on_closed()
        elif kind == "calming":
            self._say(
                "nodes come and go again and again, so this one waits for "
                f"{message['seconds']:.0f} s while the others train"
            )
        elif kind != "alive":
            self._subscriber.on_no_nodes(_explain(message, self._settings))

    def _on_connected(self, message: Message) -> None:
        if message["bind"] != self._address.get("bind"):
            self._offer = None  # Its ports are at the old address.
        self._address = message
        self._is_host = message["is_host"]
        self._room = {}  # The store is a new one, or has forgotten this node.
        self._why = ""
        self._phase = _NodePhase.OUTSIDE
        self._subscriber.on_open(message["bind"])
        if self._wants_to_join and self._phase is _NodePhase.OUTSIDE:
            self._join_next_round()

    def _join_next_round(self) -> None:
        self._phase = _NodePhase.JOINING
        self._tell_room({})
        # Whoever was here before has a place in the job.
        self._send({"type": "join", "share": 0 if self.round else self._share})
        text = (
            f"waiting at {self._settings.endpoint} for at least "
            f"{counted(self._settings.least, 'node')}; a new generation begins when "
            "all nodes have ended the one before"
        )
        self._say_if_long(lambda: text)

    @property
    def _looking(self) -> str:
        why = f" ({self._why})" if self._why else ""
        return f"looking for {self._settings.endpoint}{why}"

    def _on_failing(self, why: str, *, is_usual: bool) -> None:
        """Say why a try to meet the others has failed, unless it has been said."""
        if why != self._why:
            self._why = why
            if not is_usual:
                self._say(self._looking)

    def _say_if_long(self, text: Callable[[], str]) -> None:
        """Say why nothing happens, if nothing does for some time."""
        phase = self._phase
        self._num_waits += 1
        number = self._num_waits

        def say() -> None:
            if self._phase is phase and self._num_waits == number:
                self._say(text())

        self._loop.call_later(_QUIET_SECONDS, say)

    def _on_joined(self, message: Message) -> None:
        self._num_nodes = message["num_nodes"]
        self._lost_since = None
        self._begin_attempt(0, node=message["node"], hosts={})
        if self._offer is not None:
            self.offer(self._offer)
        else:
            self._subscriber.on_joined()

    def _begin_attempt(self, number: int, *, node: int, hosts: dict[int, str]) -> None:
        self._phase = _NodePhase.MEMBER
        self._attempt = Attempt(
            number, node=node, num_nodes=self._num_nodes, hosts=hosts
        )
        self._send({"type": "attempt", "attempt": number})

    def _on_lost(self, why: str) -> None:
        phase, self._phase, self._rendezvous = self._phase, _NodePhase.OPENING, None
        self._wants_to_join = phase not in (_NodePhase.RUNNING, _NodePhase.CONCLUDING)
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if now - self._lost_since > self._settings.patience:
            message = {"type": "unreachable", "text": why}
            self._subscriber.on_no_nodes(_explain(message, self._settings))
            return
        if phase is not _NodePhase.OPENING:
            self._say(f"{self._settings.endpoint} is lost ({why}); connecting again")
        else:
            self._on_failing(why, is_usual=False)
        self._loop.call_later(_RETRY_SECONDS, self.open)
        if phase is _NodePhase.RUNNING:
            self._subscriber.on_broken(self._loss)
        elif phase is _NodePhase.CONCLUDING:
            self._give_outcome(self._loss)

    @property
    def _loss(self) -> str:
        endpoint = self._settings.endpoint
        return f"this node lost the connection to {endpoint}, and so to the other nodes"

    # What all note in the store of the round.

    def _post(self, **values: Any) -> None:
        self._attempt.own.update(values)
        self._send({"type": "note", "note": self._attempt.own})

    def _send(self, message: Message) -> None:
        if self._rendezvous is not None:
            self._rendezvous.send(message)

    def _on_notes(self, message: Message) -> None:
        is_member = self._phase.value >= _NodePhase.MEMBER.value
        if not is_member or message["attempt"] != self._attempt.number:
            return
        self._attempt.read(message)
        if self._phase is _NodePhase.RUNNING:
            self._watch()
        elif self._phase is _NodePhase.CONCLUDING:
            self._conclude_if_all_ended()
        else:
            self._start_if_agreed()

    def _start_if_agreed(self) -> None:
        """Start once each node has made its offer; meet anew if one will not."""
        attempt = self._attempt
        self._hear_stop_requests(END)
        if attempt.is_refused:
            if self._phase is _NodePhase.MEMBER:
                self._post(rejoins=True)
            self._join_next_round()
        elif attempt.is_agreed:
            self.round = plan_round(
                attempt.offers,
                attempt.node,
                addresses=attempt.addresses,
                names=attempt.names,
                interface=self._address["interface"],
            )
            self._phase = _NodePhase.RUNNING
            self._offer = None
            self._subscriber.on_round(self.round)

    def _tell_room(self, room: Message) -> None:
        """Have nodes that come know how many replicas the job has room for."""
        if room != self._room:
            self._room = room
            self._send({"type": "room", "room": room})

    def _watch(self) -> None:
        attempt = self._attempt
        if self.round is not None and (most := self._subscriber.num_shares):
            self._tell_room({"num_shares": most, "size": self.round.size})
        self._hear_stop_requests(*REASONS)
        if attempt.is_awaited and "stop" not in attempt.own:
            self.request_stop(JOIN, _HAS_COME)
            self._subscriber.on_stop_requested(JOIN, _HAS_COME)
        if attempt.silent and self._phase is _NodePhase.RUNNING:
            self._subscriber.on_broken(attempt.describe_silent())
        if attempt.has_trouble and not attempt.has_heard_trouble:
            attempt.has_heard_trouble = True
            self._subscriber.on_trouble_elsewhere(is_hang=attempt.is_hang)

    def _hear_stop_requests(self, *kinds: str) -> None:
        for kind, cause in self._attempt.new_stop_requests(*kinds):
            self._subscriber.on_stop_requested(kind, cause)

    def _conclude_if_all_ended(self) -> None:
        self._hear_stop_requests(*REASONS)
        attempt = self._attempt
        if self._phase is _NodePhase.CONCLUDING and attempt.missing <= attempt.silent:
            self._give_outcome(attempt.describe_silent() if attempt.missing else "")

    def _give_outcome(self, gone: str) -> None:
        assert self._outcome is not None
        attempt = self._attempt
        outcome = merged([self._outcome, *attempt.outcomes], gone)
        self._outcome = None
        if self._phase is _NodePhase.CONCLUDING and END not in attempt.stop_requests:
            # Stay in this round for the next attempt if its members stay the same.
            changes = attempt.changes_members
            self._begin_attempt(
                attempt.number + 1, node=attempt.node, hosts=attempt.hosts
            )
            if changes:
                self._post(rejoins=True)
                self._phase = _NodePhase.OUTSIDE
        self._wants_to_join = False
        self._subscriber.on_outcome(outcome)


Nodes = OneNode | ManyNodes


def nodes_of(
    options: Options,
    *,
    loop: EventLoop,
    subscriber: NodesSubscriber,
    say: Callable[[str], None],
) -> Nodes:
    """Return the nodes of a job, which tell the subscriber what they do."""
    if options.nodes is None:
        return OneNode(subscriber)
    return ManyNodes(
        options.nodes,
        options.name,
        share=options.replicas.initial,
        loop=loop,
        subscriber=subscriber,
        say=say,
    )


def _explain(message: Message, settings: NodeSettings) -> str:
    if message["type"] == "too_few":
        return (
            f"fewer than {settings.least} nodes came to {settings.endpoint} within "
            f"{message['seconds']:.0f} s; start the same command on more of them, or "
            "lower the MIN of --nodes"
        )
    if message["type"] == "skewed":
        return (
            f"the clock of this machine differs by {message['seconds']:.0f} s from "
            f"that of {settings.endpoint}, so each would believe the other dead. "
            "Synchronize both clocks (NTP)"
        )
    if message["type"] == "no_room":
        room = message["num_shares"] - message["size"]
        return (
            f"this node brings {counted(message['share'], 'replica')} to "
            f"{message['size']} of a job with {message['num_shares']} virtual "
            f"replicas, so there is room for {room}: each replica trains a share of "
            f"each global batch or more. Bring at most {room} (--replicas), or "
            "`elasticrun scale` another node down first"
        )
    if message["type"] == "no_address":
        return str(message["text"])
    text = f"{settings.endpoint} could not be reached ({message['text']})"
    if not settings.place:
        text += "; it is served by the launcher on the machine that has this address"
    return text
