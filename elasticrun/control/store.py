"""The job's key-value store: a `TCPStore`, a fresh one for each generation.

Values are JSON or plain text, never unpickled. Every thread has a client of its own,
since a client that waits blocks its other users.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore

START_TIMEOUT = 300.0


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


class JobStore:
    """One replica's access to the store of its generation.

    Attributes:
        client: For the training thread.
        address: For more clients.
        interface: The address that rank 0 listens at, which can be wider.
    """

    def __init__(
        self, address: Address, server: TCPStore | None, *, interface: str = ""
    ) -> None:
        self.address = address
        self.interface = interface or address.host
        self._server = server
        self.client = self.connect()

    def connect(self) -> TCPStore:
        """Return another client."""
        return TCPStore(
            self.address.host,
            self.address.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=START_TIMEOUT),
        )

    def put(self, key: str, value: Any) -> None:
        """Set `key` to `value` as JSON.

        Raises:
            ConnectionError: The store is gone, and with it rank 0.
        """
        try:
            self.client.set(key, json.dumps(value))
        except dist.DistError as error:
            raise ConnectionError(f"the job's store is gone: {error}") from error

    def find(self, key: str) -> Any | None:
        """Return the value of `key`; None if there is none now.

        Raises:
            ConnectionError: The store is gone, and with it rank 0.
        """
        try:
            return (
                json.loads(self.client.get(key)) if self.client.check([key]) else None
            )
        except dist.DistError as error:
            raise ConnectionError(f"the job's store is gone: {error}") from error

    def discard(self, keys: Sequence[str], *, once: Sequence[str]) -> bool:
        """Remove `keys` if all of `once` are there; return whether they were.

        Raises:
            ConnectionError: The store is gone, and with it rank 0.
        """
        try:
            if not self.client.check(list(once)):
                return False
            for key in keys:
                self.client.delete_key(key)
        except dist.DistError as error:
            raise ConnectionError(f"the job's store is gone: {error}") from error
        return True

    def take(self, key: str, *, timeout: float = START_TIMEOUT) -> Any:
        """Wait for `key` and return its value.

        Raises:
            TimeoutError: It did not appear within `timeout` seconds.
            ConnectionError: The store is gone, and with it rank 0.
        """
        try:
            self.client.wait([key], timedelta(seconds=timeout))
            return json.loads(self.client.get(key))
        except dist.DistStoreError as error:
            raise TimeoutError(f"no {key} within {timeout:g} s") from error
        except dist.DistError as error:
            raise ConnectionError(f"the job's store is gone: {error}") from error
