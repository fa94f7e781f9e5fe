"""Where nodes meet, and the address at which each node reaches the others."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import psutil

from elasticrun.checkpoint.storage.claim import ClaimTiming
from elasticrun.checkpoint.storage.remote import storage_at
from elasticrun.errors import CheckpointError

_BACKLOG = 1024
_ELSEWHERE = "192.0.2.1"  # Nobody's, for documentation: RFC 5737.
_EVERYWHERE = {socket.AF_INET: "0.0.0.0", socket.AF_INET6: "::"}
_FILE = "endpoint.json"
_WATCH_SECONDS = 1.0
# A job's own claim has more time: whoever takes that ends what another has trained.
_TIMING = ClaimTiming(renewal=3.0, silence=12.0)


@dataclass(frozen=True)
class OwnAddress:
    """How this node stands in the network.

    Attributes:
        told: What the other nodes are told.
        bind: Where to listen for them.
        interface: The network interface, if it is known.
    """

    told: str
    bind: str
    interface: str


def own_address(host: str, port: int) -> OwnAddress:
    """Return the address with which this node reaches the endpoint; sends nothing."""
    family, there = _resolve(host, port)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((there, port))
        own = str(probe.getsockname()[0])
    if _is_loopback(own) and not _is_loopback(host):
        # The machine's own name, which stands for a loopback address here and for
        # another one elsewhere.
        return OwnAddress(host, _EVERYWHERE[family], "")
    return OwnAddress(own, own, _interface_of(own))


def address_here(given: str) -> OwnAddress:
    """Return how other nodes reach this one; sends nothing to them.

    Args:
        given: A name or an address of this machine, or one that leads to it; if empty,
            what its own name stands for counts, else the address of its default route.
    """
    if given:
        family, address = _resolve(given, 0)[0]
        interface = _interface_of(address)
        return OwnAddress(
            given, address if interface else _EVERYWHERE[family], interface
        )
    for address in _likely_addresses():
        if not _is_loopback(address) and (interface := _interface_of(address)):
            return OwnAddress(address, address, interface)
    raise OSError(
        "no address was found at which other machines reach this one: its name, "
        f"{socket.gethostname()}, leads to none of its addresses, and it has no "
        "default route. Give --address HOST"
    )


def _likely_addresses() -> Iterator[str]:
    with contextlib.suppress(OSError):
        yield from (address for _, address in _resolve(socket.gethostname(), 0))
    with contextlib.suppress(OSError):
        yield own_address(_ELSEWHERE, 9).told


def listen_at(bind: str) -> socket.socket:
    """Listen at a free port of an address of this machine."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    return socket.create_server((bind, 0), family=family, backlog=_BACKLOG)


def listen(host: str, port: int) -> socket.socket | None:
    """Listen at the endpoint if it is on this machine and nobody does; else None."""
    for family, address in _resolve(host, port):
        if _is_loopback(address) and not _is_loopback(host):
            address = _EVERYWHERE[family]
        try:
            return socket.create_server(
                (address, port), family=family, backlog=_BACKLOG
            )
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return None
    return None


def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = [(each[0], str(each[4][0])) for each in found]
    return sorted(addresses, key=lambda each: each[0] != socket.AF_INET)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _interface_of(address: str) -> str:
    for name, addresses in psutil.net_if_addrs().items():
        if any(each.address == address for each in addresses):
            return str(name)
    return ""


@dataclass(frozen=True)
class Endpoint:
    """Where a node serves the rendezvous.

    Attributes:
        token: What the store there holds, so that nobody takes another one for it.
    """

    host: str
    port: int
    token: str
    name: str


class EndpointDirectory:
    """The folder in which nodes look for each other, in the checkpoint directory.

    The node that holds its lock (in an object store, its claim) serves the rendezvous,
    and writes the address there. When its process ends, so does the lock, and another
    node takes it.

    Args:
        place: The checkpoint directory: a path or a URL.

    Attributes:
        is_overruled: Whether another node has written that it serves, though this one
            does: where locks mean nothing, or the store was not reached for too long.
    """

    def __init__(self, place: str, name: str) -> None:
        self._storage = storage_at(f"{place}/rendezvous", timing=_TIMING)
        self._name = name
        self._has_ended = threading.Event()
        self.is_overruled = False

    def take(self) -> bool:
        """Return whether this node is to serve, since nobody does."""
        try:
            self._storage.acquire(timeout=0)
        except CheckpointError as error:
            if isinstance(error.__cause__, (OSError, ValueError)):
                raise OSError(str(error)) from error
            return False  # Another one lives.
        return True

    def announce(self, host: str, port: int, token: str) -> None:
        """Tell the others where this node serves, and watch whether that stands."""
        own = json.dumps(asdict(Endpoint(host, port, token, self._name))).encode()
        self._storage.replace(_FILE, own)
        self._has_ended.clear()
        threading.Thread(target=self._watch, args=(own,), daemon=True).start()

    def find(self) -> Endpoint:
        """Return where another node serves, or did once."""
        try:
            found = Endpoint(**json.loads(self._storage.read(_FILE)))
        except FileNotFoundError as error:
            raise OSError(
                "the node that serves it has not written its address yet"
            ) from error
        except (ValueError, TypeError, CheckpointError) as error:
            raise OSError(f"{_FILE} cannot be read: {error}") from error
        if found.name != self._name:
            raise OSError(
                f"another job, {found.name}, meets there; this one needs a "
                "--checkpoint-dir of its own"
            )
        return found

    def release(self) -> None:
        self._has_ended.set()
        self._storage.release()

    def _watch(self, own: bytes) -> None:
        """Look whether another node has written there; in a thread."""
        while not self._has_ended.wait(_WATCH_SECONDS):
            try:
                self.is_overruled = self._storage.read(_FILE) != own
            except FileNotFoundError:
                self.is_overruled = True
            except (OSError, CheckpointError):  # It may come back.
                continue
