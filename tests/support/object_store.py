"""An S3-compatible server in a process of its own, behind a door that can be shut."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from elasticrun.checkpoint.storage.place import MANIFEST_NAME
from tests.support.places import Content
from tests.support.sockets import kept_port

_SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[int]:
    """Run a server; yield its port. It keeps objects in its memory."""
    with subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


class Door:
    """Passes connections on to a port while it is open; shut, the store is gone.

    Attributes:
        port: Where it is, always the same.
    """

    def __init__(self, target: int) -> None:
        self._target = target
        self.port = kept_port()  # Nobody else gets it while the door is shut.
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._guard = threading.Lock()
        self._open: set[socket.socket] = set()
        self._left: int | None = None
        self._serve()

    def shut(self) -> None:
        """Cut all connections, and take no more."""
        with self._guard:
            with suppress(OSError):
                self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
            for each in self._open:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._left = None

    def shut_after(self, num_bytes: int) -> None:
        """Shut it once so many bytes more have come from clients."""
        self._left = num_bytes

    @property
    def is_open(self) -> bool:
        return self._listener.fileno() >= 0

    def reopen(self) -> None:
        if not self.is_open:
            self._listener = socket.create_server(("127.0.0.1", self.port))
            self._serve()

    def _serve(self) -> None:
        threading.Thread(
            target=self._accept, args=[self._listener], daemon=True
        ).start()

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                with self._guard:
                    if listener.fileno() < 0:  # Shut since that was accepted.
                        client.close()
                        server.close()
                        return
                    self._open |= {client, server}
                for ends in ((client, server), (server, client)):
                    threading.Thread(
                        target=self._pump, args=[*ends, ends[0] is client], daemon=True
                    ).start()

    def _pump(
        self, source: socket.socket, target: socket.socket, is_request: bool
    ) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if is_request and self._left is not None:
                    self._left -= len(data)
                    if self._left < 0:
                        self.shut()
                target.sendall(data)
        for each in (source, target):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        with self._guard:
            self._open -= {source, target}


def credentials(port: int) -> dict[str, str]:
    """Return the variables with which S3's clients come to the server."""
    return {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",  # Else whoever finds the door shut waits in between.
        # Nothing of whoever runs the tests.
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


class Bucket:
    """An empty bucket for a job's checkpoints.

    Attributes:
        url: Where they are to be.
        variables: With which a process comes to it.
        door: Shut, the store is gone.
    """

    def __init__(self, door: Door) -> None:
        import s3fs

        self.door = door
        self.variables = credentials(door.port)
        name = f"bucket-{secrets.token_hex(8)}"
        s3fs.S3FileSystem().mkdir(name)
        self.url = f"s3://{name}/jobs/digits"

    def names(self) -> list[str]:
        return Content(self.url).names()

    def manifests(self) -> list[dict[str, Any]]:
        """Return those of the checkpoints, the oldest first."""
        content = Content(self.url)
        return [
            json.loads(content.read(f"{name}/{MANIFEST_NAME}"))
            for name in content.checkpoints()
            if MANIFEST_NAME in content.names(name)
        ]
