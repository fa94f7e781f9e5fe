"""The nodes of a job on many machines, by torch's rendezvous and the board of a round.

A node is a member from a round of the rendezvous to the next. As long as the members
stay the same, one generation follows another in the same round, as turns on its board:
each node pins its offer, later perhaps a wish, and at last how its replicas ended.
What all have pinned is the same for all, so all come to the same verdict.
"""

from __future__ import annotations

import enum
import socket
import time
from collections.abc import Callable
from typing import Any

from elasticrun.launcher.event_loop import EventLoop
from elasticrun.launcher.nodes.meeting import Meeting
from elasticrun.launcher.nodes.nodes import (
    END,
    JOIN,
    WISHES,
    NodesSubscriber,
    Offer,
    OneNode,
    Round,
    plan_round,
)
from elasticrun.launcher.nodes.turn import Turn
from elasticrun.launcher.options import NodeSettings, Options
from elasticrun.launcher.verdict import How, Verdict, merged
from elasticrun.replicas.wire import Message

_RETRY_SECONDS = 0.5
_QUIET_SECONDS = 15.0


class _NodePhase(enum.Enum):
    OPENING = 0  # Looking for the endpoint.
    OUTSIDE = 1
    JOINING = 2
    SEATED = 3  # A member, without an offer.
    OFFERED = 4
    RUNNING = 5
    CONCLUDING = 6  # The replicas here have ended.


class ManyNodes:
    """The nodes of a job on many machines; this one takes part with the others.

    Args:
        name: Of the job; jobs of other names do not see each other.
        say: Called with what the user should know.

    Attributes:
        round: What all nodes started last; None before the first generation.
        is_needed: Whether the others cannot go on without this node.
    """

    def __init__(
        self,
        settings: NodeSettings,
        name: str,
        *,
        loop: EventLoop,
        subscriber: NodesSubscriber,
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._name = name
        self._loop = loop
        self._subscriber = subscriber
        self._say = say
        self._meeting: Meeting | None = None
        self._phase = _NodePhase.OPENING
        self._wants_seat = False
        self._address: Message = {}
        self._turn = Turn(0, node=0, num_nodes=1, hosts={})
        self._num_nodes = 1
        self._offer: Offer | None = None
        self._verdict: Verdict | None = None
        self._lost_since: float | None = None
        self._num_waits = 0
        self._call = ""  # Of those who run, while this node waits for a seat.
        self._why = ""  # The last try to meet the others has failed.
        self.is_needed = False  # That is if it serves the endpoint.
        self.round: Round | None = None

    # What the supervisor asks for.

    @property
    def pids(self) -> set[int]:
        """The processes that it needs between generations."""
        return set() if self._meeting is None else {self._meeting.pid}

    def open(self) -> None:
        """Look for the others; `on_open` follows."""
        self._phase = _NodePhase.OPENING
        self._say_if_long(lambda: self._looking)
        try:
            self._meeting = Meeting(
                self._settings,
                self._name,
                loop=self._loop,
                on_message=self._on_message,
                on_lost=self._on_lost,
            )
        except OSError as error:  # No processes or open files are left.
            self._on_lost(str(error))

    def join(self) -> None:
        """Ask for a seat in the next generation; `on_seat` follows, each time."""
        self._wants_seat = True
        if self._phase is _NodePhase.OUTSIDE:
            self._ask_for_seat()
        elif self._phase is _NodePhase.SEATED:
            self._subscriber.on_seat()

    def offer(self, offer: Offer) -> None:
        """Say what this node brings; `on_round` follows once all have."""
        self._offer = offer
        self._phase = _NodePhase.OFFERED
        self._pin(
            host=socket.gethostname(),
            address=self._address["told"],
            offer=offer.encode(),
        )
        self._start_if_agreed()

    @property
    def is_called(self) -> bool:
        """Whether any node has called for another generation."""
        return self._phase is _NodePhase.RUNNING and self._turn.called is not None

    def call(self, kind: str, cause: str) -> None:
        """Have all nodes let new replicas prepare; `on_prepared` follows."""
        if self._phase is _NodePhase.RUNNING:
            self._turn.call(kind, cause)
            self._pin()
            self._send({"type": "call"})

    def call_off(self, kind: str) -> None:
        """Take such a call of this node back."""
        if self._turn.call_off(kind):
            self._pin()

    def note_prepared(self, is_prepared: bool = True) -> None:
        """Tell the others whether the new replicas here wait for them."""
        if self._phase is _NodePhase.RUNNING:
            self._pin(is_prepared=is_prepared)
            self._stop_if_prepared()
        elif is_prepared and self._call:  # It waits for a seat: the lobby counts it.
            self._send({"type": "prepared", "call": self._call})

    def hurry(self) -> None:
        """Wait for nobody who prepares; `on_prepared` follows at once."""
        called = self._turn.called
        if self.is_called and called is not None and not self._turn.wishes:
            self.wish(*called)
            self._subscriber.on_prepared(called[1])

    def wish(self, kind: str, cause: str) -> None:
        """Tell the others why all are to save and exit."""
        self._turn.wish(kind, cause)
        self._pin()

    def note_trouble(self, *, is_hang: bool = False) -> None:
        """Tell the others that a replica has failed, or hangs."""
        self._pin(has_trouble=True, **({"is_hang": True} if is_hang else {}))

    def conclude(self, verdict: Verdict) -> None:
        """Say how the generation ended here; `on_verdict` follows once all have."""
        self._verdict = verdict
        if self._phase is _NodePhase.RUNNING:
            self._phase = _NodePhase.CONCLUDING
            self._pin(ending=verdict.encode())
            self._judge_if_all_ended()
        else:  # The others were lost meanwhile.
            self._give_verdict(self._loss)

    def leave(self, kind: str, cause: str) -> None:
        """Tell the others that this node waits for nothing any more."""
        self._turn.wish(kind, cause)
        self._pin(ending=Verdict(How.LEFT, text=cause).encode())

    def close(self, *, is_hurried: bool) -> None:
        """Leave the other nodes, who need not wait for this one."""
        if self._meeting is None:
            return
        if self._phase is _NodePhase.OPENING:
            self._meeting.close()
            return
        if self._phase is _NodePhase.SEATED:
            self._pin(rejoins=True)  # So that nobody waits for an offer.
        is_end = END in self._turn.wishes
        self._meeting.say_goodbye(
            {
                "type": "bye",
                "closes": self.is_needed or is_end,
                "is_hurried": is_hurried,
            }
        )

    # Meeting the others.

    def _on_message(self, message: Message) -> None:
        kind = message["type"]
        if kind == "board":
            self._on_board(message)
        elif kind == "connected":
            self._on_connected(message)
        elif kind == "failing":
            self._on_failing(message["text"], is_usual=message["is_usual"])
        elif kind == "joined":
            self._on_joined(message)
        elif kind == "called":
            self._on_called(message["call"])
        elif kind == "closed":
            self._subscriber.on_closed()
        elif kind != "alive":
            self._subscriber.on_no_nodes(_explain(message, self._settings))

    def _on_connected(self, message: Message) -> None:
        if message["bind"] != self._address.get("bind"):
            self._offer = None  # Its ports are at the old address.
        self._address = message
        self.is_needed = message["is_host"]
        self._why = ""
        self._phase = _NodePhase.OUTSIDE
        self._subscriber.on_open(message["bind"])
        if self._wants_seat and self._phase is _NodePhase.OUTSIDE:
            self._ask_for_seat()

    def _ask_for_seat(self) -> None:
        self._phase = _NodePhase.JOINING
        self._call = ""
        self._send({"type": "join"})
        text = (
            f"waiting at {self._settings.endpoint} for {self._settings.least} nodes or "
            "more, which come together when all have ended the generation before"
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

    def _on_called(self, call: str) -> None:
        """Prepare for a seat: those who have one wait for that."""
        if self._phase is _NodePhase.JOINING:
            self._call = call
            self._subscriber.on_call("those that train make room")

    def _on_joined(self, message: Message) -> None:
        self._call = ""
        self._num_nodes = message["num_nodes"]
        self._lost_since = None
        self._begin_turn(0, node=message["node"], hosts={})
        if self._offer is not None:
            self.offer(self._offer)
        else:
            self._subscriber.on_seat()

    def _begin_turn(self, number: int, *, node: int, hosts: dict[int, str]) -> None:
        self._phase = _NodePhase.SEATED
        self._turn = Turn(number, node=node, num_nodes=self._num_nodes, hosts=hosts)
        self._send({"type": "turn", "turn": number})

    def _on_lost(self, why: str) -> None:
        phase, self._phase, self._meeting = self._phase, _NodePhase.OPENING, None
        self._wants_seat = phase not in (_NodePhase.RUNNING, _NodePhase.CONCLUDING)
        now = time.monotonic()
        self._lost_since = self._lost_since or now
        if now - self._lost_since > self._settings.patience:
            message = {"type": "unreachable", "text": why}
            self._subscriber.on_no_nodes(_explain(message, self._settings))
            return
        if phase is not _NodePhase.OPENING:
            self._say(f"{self._settings.endpoint} is lost ({why}); looking for it")
        else:
            self._on_failing(why, is_usual=False)
        self._loop.call_later(_RETRY_SECONDS, self.open)
        if phase is _NodePhase.RUNNING:
            self._subscriber.on_broken(self._loss)
        elif phase is _NodePhase.CONCLUDING:
            self._give_verdict(self._loss)

    @property
    def _loss(self) -> str:
        return f"this node lost {self._settings.endpoint}, and with it the other nodes"

    # What all pin to the board.

    def _pin(self, **values: Any) -> None:
        self._turn.own.update(values)
        self._send({"type": "note", "note": self._turn.own})

    def _send(self, message: Message) -> None:
        if self._meeting is not None:
            self._meeting.send(message)

    def _on_board(self, message: Message) -> None:
        is_member = self._phase.value >= _NodePhase.SEATED.value
        if not is_member or message["turn"] != self._turn.number:
            return
        self._turn.read(message)
        if self._phase is _NodePhase.RUNNING:
            self._watch()
        elif self._phase is _NodePhase.CONCLUDING:
            self._judge_if_all_ended()
        else:
            self._start_if_agreed()

    def _start_if_agreed(self) -> None:
        """Start once each node has made its offer; meet anew if one will not."""
        turn = self._turn
        self._hear_wishes(END)
        if turn.is_refused:
            if self._phase is _NodePhase.SEATED:
                self._pin(rejoins=True)
            self._ask_for_seat()
        elif turn.is_agreed:
            self.round = plan_round(
                turn.offers,
                turn.node,
                addresses=turn.addresses,
                interface=self._address["interface"],
            )
            self._phase = _NodePhase.RUNNING
            self._offer = None
            self._subscriber.on_round(self.round)

    def _watch(self) -> None:
        turn = self._turn
        self._hear_wishes(*WISHES)
        self._hear_calls()
        if turn.silent and self._phase is _NodePhase.RUNNING:
            self._subscriber.on_broken(turn.describe_silent())
        if turn.has_trouble and not turn.has_heard_trouble:
            turn.has_heard_trouble = True
            self._subscriber.on_trouble_elsewhere(is_hang=turn.is_hang)

    def _hear_calls(self) -> None:
        """Prepare for another generation if any node needs one."""
        turn = self._turn
        if not turn.is_awaited:
            self.call_off(JOIN)
        elif JOIN not in turn.own.get("calls", {}):
            self.call(JOIN, "another node has come")
        if turn.called is None:
            if turn.has_heard_call:
                turn.has_heard_call = False
                self._subscriber.on_called_off()
        elif not turn.has_heard_call:
            turn.has_heard_call = True
            self._subscriber.on_call(turn.called[1])
        self._stop_if_prepared()

    def _stop_if_prepared(self) -> None:
        if self._turn.is_prepared:
            self.hurry()

    def _hear_wishes(self, *kinds: str) -> None:
        for kind, cause in self._turn.new_wishes(*kinds):
            self._subscriber.on_wish(kind, cause)

    def _judge_if_all_ended(self) -> None:
        self._hear_wishes(*WISHES)
        turn = self._turn
        if self._phase is _NodePhase.CONCLUDING and turn.missing <= turn.silent:
            self._give_verdict(turn.describe_silent() if turn.missing else "")

    def _give_verdict(self, gone: str) -> None:
        assert self._verdict is not None
        turn = self._turn
        verdict = merged([self._verdict, *turn.verdicts], gone)
        self._verdict = None
        if self._phase is _NodePhase.CONCLUDING and END not in turn.wishes:
            # Stay in this round for the next turn if its members stay the same.
            changes = turn.changes_members
            self._begin_turn(turn.number + 1, node=turn.node, hosts=turn.hosts)
            if changes:
                self._pin(rejoins=True)
                self._phase = _NodePhase.OUTSIDE
        self._wants_seat = False
        self._subscriber.on_verdict(verdict)


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
        options.nodes, options.name, loop=loop, subscriber=subscriber, say=say
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
            f"that of {settings.endpoint}, so that each would take the other for dead. "
            "Set both by the same time server"
        )
    return (
        f"{settings.endpoint} could not be reached ({message['text']}); it is served "
        "by the launcher on the machine that has this address"
    )
