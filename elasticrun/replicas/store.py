"""The job's key-value store: a `TCPStore`, a fresh one for each generation.

Values are JSON or plain text, never unpickled. Every thread has a client of its own,
since a client that waits blocks its other users.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore

START_TIMEOUT = 300.0

# Keys of the store, beside those of `exchange`.
HUB = "links"  # Where rank 0 waits for the other watchers' connections.
STEP = "step"  # Of Slurm's, which rank 0 is in: so that no other job joins.
LEAVING = "leaving"  # How many ranks are about to end the process group,
ALL_LEAVE = "all leave"  # and that all are.
PROCESS_GROUP = "process-group"  # Before what torch's process group keeps there.


@dataclass(frozen=True)
class Address:
    """Where the store of this generation listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Return the address that `str` wrote."""
        host, _, port = text.rpartition(":")
        return cls(host, int(port))


def serve_store(
    host: str, port: int, listener: int, *, timeout: float = START_TIMEOUT
) -> TCPStore:
    """Serve a store at `listener`, the descriptor of a socket that listens already."""
    return TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener,
        use_libuv=torch.__version__ >= "2.8",  # 2.7's takes no listener.
    )


def serve_store_at(host: str, port: int = 0) -> TCPStore:
    """Serve a store at an address of this machine; 0 is a port that is free."""
    listener = socket.create_server((host, port), backlog=1024)
    return serve_store(host, listener.getsockname()[1], listener.detach())


class JobStore:
    """One replica's access to the store of its generation.

    Whatever reads or writes it raises ConnectionError when it is gone.

    Attributes:
        client: For one thread.
        address: For more clients.
        interface: The address that rank 0 listens at, which can be wider.
    """

    def __init__(
        self,
        address: Address,
        server: TCPStore | None,
        *,
        interface: str = "",
        patience: float = START_TIMEOUT,
    ) -> None:
        self.address = address
        self.interface = interface or address.host
        self._server = server
        with _noticing_loss():
            self.client = TCPStore(
                address.host,
                address.port,
                is_master=False,
                wait_for_workers=False,
                timeout=timedelta(seconds=patience),
            )
        self.client.set_timeout(timedelta(seconds=START_TIMEOUT))

    def put(self, key: str, value: Any) -> None:
        with _noticing_loss():
            self.client.set(key, json.dumps(value))

    def has(self, keys: list[str]) -> bool:
        """Return whether all of `keys` are there now; one call, however many."""
        with _noticing_loss():
            return self.client.check(keys)

    def take_all(self, keys: list[str]) -> list[bytes]:
        """Return the values of `keys`, which are there, as JSON; one call for all."""
        with _noticing_loss():
            return self.client.multi_get(keys)

    def take(self, key: str, *, timeout: float = START_TIMEOUT) -> Any:
        with _noticing_loss():
            try:
                self.client.wait([key], timedelta(seconds=timeout))
            except dist.DistStoreError as error:
                raise TimeoutError(f"no {key} within {timeout:g} s") from error
            return json.loads(self.client.get(key))

    def remove(self, keys: Iterable[str]) -> None:
        """Remove `keys`, of which some may not be there."""
        with _noticing_loss():
            for key in keys:
                self.client.delete_key(key)


@contextmanager
def _noticing_loss() -> Iterator[None]:
    """Raise ConnectionError where torch raises an error of its own."""
    try:
        yield
    except dist.DistError as error:
        raise ConnectionError(f"the job's store is gone: {error}") from error
