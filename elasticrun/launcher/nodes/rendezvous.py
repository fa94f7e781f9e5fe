"""A process beside the launcher that meets the other nodes by torch's rendezvous.

So the launcher need not import torch, never waits for the network, and can end this
process when it hangs. The two exchange messages.
"""

from __future__ import annotations

import json
import os
import select
import socket
import sys
import threading
import time
import uuid
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousGracefulExitError,
    RendezvousParameters,
    RendezvousTimeoutError,
    dynamic_rendezvous,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import (
    C10dRendezvousBackend,
)

from elasticrun.launcher import processes
from elasticrun.launcher.nodes import endpoint
from elasticrun.launcher.nodes.endpoint import EndpointDirectory, OwnAddress
from elasticrun.launcher.nodes.nodes import Note
from elasticrun.replicas.store import serve_store
from elasticrun.replicas.wire import Channel, Message

LOOK_SECONDS = 0.25
_LAST_CALL = 3  # Seconds for all to see that a round is open; each looks every second.
_BEAT_SECONDS = 2
_TOKEN_SECONDS = 10.0
_RETRY_SECONDS = 0.2
_FIND_SECONDS = 1.0  # Each try writes to a file system that all nodes share.
_STORE_SECONDS = 60.0
_PROBE_SECONDS = 10.0
_FAREWELL_SECONDS = 10.0
_HEARING_SECONDS = 2.5
_MOST_SKEW = 3.0  # Seconds; heartbeats carry the time of day.
_TOKEN = "elasticrun/token"
_CLOCK = "elasticrun/clock"
_SERVED = "elasticrun/served"
_ROOM = "elasticrun/room"
_ROOM_SECONDS = 15.0  # A node that died may be here again before its loss has shown.
_JOINING = "elasticrun/joining"
_ROUNDS = "elasticrun/rounds"
_ROUNDS_SECONDS = 3600.0
_FREE_ROUNDS = 4  # In that time, before nodes that come have to wait.
_MOST_ROUNDS = 20
_LONGEST_CALM = 300.0
SILENT_SECONDS = 8.0


def main() -> None:
    """Serve the launcher at the other end of the socket named on the command line."""
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    order = channel.receive_one()
    if order is not None:
        processes.die_with_parent(order["launcher"])
        try:
            Rendezvous(channel, order).run()
        except (RuntimeError, RendezvousError, OSError) as error:
            channel.send({"type": "lost", "text": _first_line(error)})
    # Threads may sit in a call of the store, and must not see the interpreter's end.
    os._exit(0)


class Rendezvous:
    """One node's part in the rendezvous, and in the store of the round."""

    def __init__(self, channel: Channel, order: Message) -> None:
        self._channel = channel
        self._order = order
        self._patience = float(order["patience"])
        self._host, self._port = str(order["host"]), int(order["port"])
        self._meeting: EndpointDirectory | None = None
        self._own: OwnAddress | None = None
        if order["place"]:
            self._meeting = EndpointDirectory(order["place"], str(order["name"]))
        if order["place"] or order["address"]:
            self._own = self._find_own_address()
        self._served = ""  # The token of a store that is not given by its address.
        self._probed: object = None
        self._probing: threading.Thread | None = None
        self._probe_error = ""
        self._server = self._connect()
        self._is_host = self._server is not None
        # A client that waits blocks its other users, so the handler has its own.
        self._store = self._new_client()
        self._handler: Any = self._make_handler(self._new_client())
        self._round_store: RoundStore | None = None
        self._attempt = 0
        self._joining: threading.Thread | None = None
        self._joining_since = 0.0
        self._is_known = False  # It has been a member of a round.
        self._joined: Message | None = None
        self._is_full = False  # The round has as many nodes as there may be.
        self._left_behind = 0  # Nodes that waited while the round began without them.
        self._counted_from = 0.0

    def run(self) -> None:
        """Do what the launcher says, and tell it what is new, until it has enough."""
        self._check_clock()
        own = self._own or endpoint.own_address(self._host, self._port)
        self._tell("connected", is_host=self._is_host, **own.__dict__)
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        while self._channel.is_open:
            if poll.poll(LOOK_SECONDS * 1000):
                for message in self._channel.receive():
                    self._obey(message)
            self._look()

    # Meeting.

    def _find_own_address(self) -> OwnAddress:
        try:
            return endpoint.address_here(str(self._order["address"]))
        except OSError as error:
            self._tell("no_address", text=error.strerror or str(error))
            os._exit(0)

    def _connect(self) -> TCPStore | None:
        """Wait until there is a store; serve it if that is for this node to do."""
        deadline = time.monotonic() + self._patience
        told = ""
        while True:
            try:
                return self._serve_or_reach()
            except OSError as error:
                why = error.strerror or str(error)
                if time.monotonic() > deadline:
                    self._tell("unreachable", text=why)
                    os._exit(0)
                if why != told:
                    told = why
                    # Whoever serves it may come later: no reason to worry so far.
                    is_usual = isinstance(error, ConnectionRefusedError)
                    self._tell("failing", text=why, is_usual=is_usual)
            time.sleep(_RETRY_SECONDS if self._meeting is None else _FIND_SECONDS)

    def _serve_or_reach(self) -> TCPStore | None:
        """Serve the store, or see that another node does."""
        if self._meeting is None:
            listener = endpoint.listen(self._host, self._port)
            if listener is not None:
                return self._serve(listener)
        elif self._meeting.take():
            try:
                return self._serve_found(self._meeting)
            except OSError:
                self._meeting.release()
                raise
        else:
            found = self._meeting.find()
            self._host, self._port, self._served = found.host, found.port, found.token
        socket.create_connection((self._host, self._port), 5.0).close()
        self._probe()
        return None

    def _serve_found(self, meeting: EndpointDirectory) -> TCPStore:
        """Serve the store at a free port, and write that where the others look."""
        assert self._own is not None
        listener = endpoint.listen_at(self._own.bind)
        self._host, self._port = listener.getsockname()[:2]
        server = self._serve(listener)
        token = uuid.uuid4().hex
        server.set(_SERVED, token)
        meeting.announce(self._own.told, self._port, token)
        return server

    def _probe(self) -> None:
        """Make sure that a store answers, and is the one that is meant."""
        where = self._host, self._port, self._served
        if self._probing is None or self._probed != where:
            self._probed = where
            # Its constructor keeps no time limit while nothing is answered.
            self._probing = threading.Thread(target=self._try_client, daemon=True)
            self._probing.start()
        self._probing.join(_PROBE_SECONDS)
        if self._probing.is_alive():
            raise OSError("another program listens there, not torch's store")
        self._probing = None
        if self._probe_error:
            raise OSError(self._probe_error)

    def _try_client(self) -> None:
        self._probe_error = ""
        try:
            client = self._new_client()
            if self._served and not _holds(client, _SERVED, self._served):
                raise OSError(
                    "another process answers there than the one that wrote the address"
                )
        except (RuntimeError, OSError) as error:
            self._probe_error = _first_line(error)

    def _serve(self, listener: socket.socket) -> TCPStore:
        address = str(listener.getsockname()[0])
        return serve_store(
            "127.0.0.1" if address in ("0.0.0.0", "::") else address,
            self._port,
            listener.detach(),
            timeout=_STORE_SECONDS,
        )

    def _new_client(self) -> TCPStore:
        return TCPStore(
            self._host,
            self._port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_STORE_SECONDS),
        )

    def _make_handler(self, store: TCPStore) -> Any:
        name = str(self._order["name"])
        # Torch knows a node by its address and process number, of which containers on
        # one host may have the same, and numbers nodes in this order: on one host, as
        # they came. Nobody connects to this address.
        own = self._own or endpoint.own_address(self._host, self._port)
        parameters = RendezvousParameters(
            backend="c10d",
            endpoint=f"{self._host}:{self._port}",
            run_id=name,
            min_nodes=int(self._order["least"]),
            max_nodes=int(self._order["most"]),
            local_addr=f"{own.told}/{time.time_ns()}-{uuid.uuid4().hex}",
            join_timeout=int(self._patience),
            last_call_timeout=_LAST_CALL,
            keep_alive_interval=_BEAT_SECONDS,
            keep_alive_max_attempt=int(SILENT_SECONDS / _BEAT_SECONDS),
        )
        return dynamic_rendezvous.create_handler(
            store, C10dRendezvousBackend(store, name), parameters
        )

    def _check_clock(self) -> None:
        """Refuse a clock by which the others' heartbeats would look old, or ours."""
        if self._is_host:
            self._store.set(_CLOCK, str(time.time()))
            return
        deadline = time.monotonic() + _TOKEN_SECONDS
        first = b""
        while time.monotonic() < deadline:
            told = self._store.get(_CLOCK) if self._store.check([_CLOCK]) else b""
            if first and told != first:  # It was written just now.
                skew = time.time() - float(told)
                if abs(skew) > _MOST_SKEW:
                    self._tell("skewed", seconds=skew)
                    os._exit(0)
                return
            first = told
            time.sleep(_RETRY_SECONDS / 2)

    # Between a message and the next.

    def _obey(self, message: Message) -> None:
        if message["type"] == "join":
            self._round_store, self._attempt, self._joined = None, 0, None
            self._joining_since = time.monotonic()
            self._count_joining(1)
            self._joining = threading.Thread(
                target=self._join, args=(message["share"],), daemon=True
            )
            self._joining.start()
        elif message["type"] == "note" and self._round_store is not None:
            self._round_store.put_note(self._attempt, message["note"])
        elif message["type"] == "room":
            self._store.set(self._key(_ROOM), json.dumps(message["room"]))
        elif message["type"] == "attempt":
            self._attempt = message["attempt"]
        elif message["type"] == "bye":
            self._leave(closes=message["closes"], is_hurried=message["is_hurried"])
            if self._meeting is not None:
                self._meeting.release()
            os._exit(0)

    def _look(self) -> None:
        if self._is_host:
            self._store.set(_CLOCK, str(time.time()))
            if self._meeting is not None and self._meeting.is_overruled:
                raise OSError("another node serves the rendezvous now")
        else:
            self._store.check([_CLOCK])  # Whether the link still stands.
        if self._joined is not None:
            joined, self._joined, self._joining = self._joined, None, None
            if joined["type"] == "joined":
                self._is_known = True
                self._round_store = RoundStore(
                    self._store,
                    token=joined["token"],
                    node=joined["node"],
                    num_nodes=joined["num_nodes"],
                )
                self._is_full = joined["num_nodes"] >= int(self._order["most"])
                # A node that died may be counted until its loss shows: all would save
                # and exit for it again and again.
                self._left_behind = self._handler.num_nodes_waiting()
                self._counted_from = time.monotonic() + SILENT_SECONDS
            self._channel.send(joined)
            self._count_joining(-1)
        if self._round_store is None:
            waited = time.monotonic() - self._joining_since
            if self._joining and self._is_known and waited > 3 * _LAST_CALL:
                # Too few are left, so any that comes is needed.
                self._store.set(self._key(_ROUNDS), "[]")
            self._tell("alive")
            return
        silent = self._round_store.beat()
        # One that came for a place which another one took is counted as waiting.
        num_waiting = 0 if self._is_full else self._handler.num_nodes_waiting()
        if time.monotonic() < self._counted_from:
            self._left_behind = min(self._left_behind, num_waiting)
            num_waiting -= self._left_behind
        self._tell(
            "notes",
            attempt=self._attempt,
            notes=self._round_store.read(self._attempt),
            silent=silent,
            num_waiting=num_waiting,
        )

    def _key(self, what: str) -> str:
        return f"{what}/{self._order['name']}"

    def _count_joining(self, change: int) -> int:
        """Change how many nodes wait, and return it; one that was killed counts on."""
        return self._store.add(self._key(_JOINING), change)

    def _await_calm(self) -> None:
        """Let the others train for a while if nodes come and go again and again.

        Before they hear of this node: one that is killed and started all the time would
        have them save and restart, or lose what they have trained, for ever.
        """
        is_told = False
        while (left := calm_left(self._rounds)) > 0 and not self._handler.is_closed():
            if not is_told:
                self._tell("calming", seconds=left)
            is_told = True
            time.sleep(LOOK_SECONDS)

    @property
    def _rounds(self) -> list[float]:
        """When rounds began."""
        key = self._key(_ROUNDS)
        return json.loads(self._store.get(key)) if self._store.check([key]) else []

    def _lacking_room(self, share: int) -> Message | None:
        """Return why there is no room for so many replicas more, if there is none.

        Before the others hear of this node, as they would all save and exit.
        """
        deadline = time.monotonic() + _ROOM_SECONDS
        while self._store.check([self._key(_ROOM)]):
            room = json.loads(self._store.get(self._key(_ROOM)))
            if not room or share <= room["num_shares"] - room["size"]:
                return None
            if time.monotonic() > deadline:
                return {"type": "no_room", "share": share, **room}
            time.sleep(LOOK_SECONDS)
        return None

    def _join(self, share: int) -> None:
        """Become a member of the next round; in a thread, since it takes its time."""
        try:
            if not self._is_known:
                self._await_calm()
            lacking = self._lacking_room(share) if share else None
            self._joined = lacking or self._next_round()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            self._joined = {"type": "closed"}
        except RendezvousTimeoutError:
            self._joined = {"type": "too_few", "seconds": self._patience}
        except (RuntimeError, RendezvousError, OSError) as error:
            self._joined = {"type": "lost", "text": _first_line(error)}

    def _next_round(self) -> Message:
        while True:
            round_ = self._handler.next_rendezvous()
            if round_.rank == 0:
                rounds = [*self._rounds, time.time()][-_MOST_ROUNDS:]
                self._store.set(self._key(_ROUNDS), json.dumps(rounds))
                round_.store.set(_TOKEN, uuid.uuid4().hex)
            try:
                round_.store.wait([_TOKEN], timedelta(seconds=_TOKEN_SECONDS))
            except dist.DistStoreError:
                continue  # Whoever became node 0 is gone already.
            return {
                "type": "joined",
                "node": round_.rank,
                "num_nodes": round_.world_size,
                "token": round_.store.get(_TOKEN).decode(),
            }

    # The end.

    def _leave(self, *, closes: bool, is_hurried: bool) -> None:
        if self._joining is not None:
            self._count_joining(-1)
        if closes:
            self._handler.set_closed()
            # Who waits looks every second, in a store that ends with this process.
            until = time.monotonic() + _HEARING_SECONDS if self._is_host else 0.0
            while time.monotonic() < until and self._count_joining(0) > 0:
                time.sleep(_RETRY_SECONDS)
        elif self._joining is None:
            self._leave_round()
        if self._round_store is None:
            return
        self._round_store.say_goodbye()
        deadline = time.monotonic() + _FAREWELL_SECONDS
        while self._is_host and not is_hurried and time.monotonic() < deadline:
            staying = self._round_store.staying(self._round_store.beat())
            if not closes:  # They need no more than to have heard how it ended here.
                staying -= self._round_store.read(self._attempt).keys()
            if not staying:
                return
            time.sleep(LOOK_SECONDS / 5)

    def _leave_round(self) -> None:
        """Let the others form a round before this node's heartbeats look too old.

        torch has no public way to do that; without this they wait for some seconds.
        The names are listed in tests/unit/test_private_names.py.
        """
        handler: Any = self._handler
        try:
            handler._stop_heartbeats()
            leave = dynamic_rendezvous._RendezvousExitOp()
            handler._op_executor.run(leave, time.monotonic() + _BEAT_SECONDS)
        except RendezvousError:  # It cannot be told: the link is lost, or time is up.
            return
        except AttributeError as error:
            sys.stderr.write(
                f"elasticrun: with torch {torch.__version__} no node can leave at once "
                f"({error}), so the others wait up to {SILENT_SECONDS:g} s for this "
                "one; another version of torch may help\n"
            )

    def _tell(self, kind: str, **values: object) -> None:
        self._channel.send({"type": kind, **values})


def calm_left(rounds: list[float]) -> float:
    """Return the seconds for which nodes that come are not let in.

    The more rounds began within an hour, the longer the last one is left alone.
    """
    now = time.time()
    num_lately = sum(now - begun < _ROUNDS_SECONDS for begun in rounds)
    if num_lately <= _FREE_ROUNDS:
        return 0.0
    calm = min(2.0 ** (num_lately - _FREE_ROUNDS), _LONGEST_CALM)
    return max(rounds[-1] + calm - now, 0.0)


def _holds(store: TCPStore, key: str, value: str) -> bool:
    """Return whether a store has this value; to ask for another key would block."""
    return store.check([key]) and store.get(key).decode() == value


def _first_line(error: BaseException) -> str:
    cause = error.__cause__ or error
    return f"{type(cause).__name__}: {cause}".splitlines()[0][:500]


class RoundStore:
    """Keys under a name that only the members of one round know.

    Each node has one note in each attempt, and shows that it lives. An attempt is one
    generation: its offers, stop requests and endings. Notes of earlier attempts stay,
    so that a node which is ahead takes nothing from one that is not.

    Args:
        token: A name that no other round has.
    """

    def __init__(
        self, store: TCPStore, *, token: str, node: int, num_nodes: int
    ) -> None:
        self._store = store
        self._prefix = f"elasticrun/{token}"
        self._node = node
        self._others = [other for other in range(num_nodes) if other != node]
        self._there: set[str] = set()
        now = time.monotonic()
        self._heard = dict.fromkeys(self._others, (b"", now))

    def put_note(self, attempt: int, note: Note) -> None:
        """Show a note to all, in place of this attempt's earlier one."""
        self._store.set(f"{self._prefix}/{attempt}/{self._node}", json.dumps(note))

    def read(self, attempt: int) -> dict[int, Note]:
        """Return the other nodes' notes of an attempt, as far as they are there."""
        found = self._read(attempt)
        return {other: json.loads(text) for other, text in found.items()}

    def beat(self) -> list[int]:
        """Show that this node lives; return those of whom nothing was heard lately."""
        self._store.add(f"{self._prefix}/pulse/{self._node}", 1)
        pulses = self._read("pulse")
        now = time.monotonic()
        for other, pulse in pulses.items():
            if pulse != self._heard[other][0]:
                self._heard[other] = pulse, now
        return [
            o for o, (_, when) in self._heard.items() if now - when > SILENT_SECONDS
        ]

    def say_goodbye(self) -> None:
        """Tell who serves the store that this node needs it no more."""
        self._store.set(f"{self._prefix}/bye/{self._node}", "")

    def staying(self, silent: list[int]) -> set[int]:
        """Return which of the others may still need the store."""
        return set(self._others) - set(silent) - set(self._read("bye"))

    def _read(self, what: int | str) -> dict[int, bytes]:
        """Return what others have put there; to ask for what is not would block."""
        keys = {other: f"{self._prefix}/{what}/{other}" for other in self._others}
        for key in set(keys.values()) - self._there:
            if self._store.check([key]):
                self._there.add(key)
        known = {other: key for other, key in keys.items() if key in self._there}
        if not known:
            return {}
        values = self._store.multi_get(list(known.values()))
        return {other: bytes(v) for other, v in zip(known, values, strict=True)}
