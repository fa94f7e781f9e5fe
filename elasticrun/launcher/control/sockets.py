"""The sockets of launchers, in a directory that only their user can enter."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elasticrun.launcher import environment
from elasticrun.launcher.options import OptionError

_NAME = re.compile(r"([0-9]+)-[0-9]+\.sock")


class SocketDirectoryError(OptionError):
    """The directory for sockets cannot be trusted, or not be used."""


class ControlSocket:
    """Where this process listens for requests, until `close`."""

    def __init__(self) -> None:
        self._path = _path_of(os.getpid())
        self.listener = _listen_in(self._path.parent, self._path.name)

    def close(self) -> None:
        self.listener.close()
        with contextlib.suppress(OSError):
            os.unlink(self._path)


def _path_of(pid: int) -> Path:
    # Containers that share the directory may have the same process numbers.
    namespace = os.stat("/proc/self/ns/pid").st_ino
    return environment.socket_directory() / f"{pid}-{namespace}.sock"


def is_of_this_container(pid: int) -> bool:
    """Return whether a launcher with this number, as seen here, listens there."""
    return _path_of(pid).exists()


def _listen_in(path: Path, name: str) -> socket.socket:
    with contextlib.suppress(OSError):  # `_opened` says what is wrong with it.
        path.mkdir(mode=0o700, exist_ok=True)
    with _opened(path) as folder, contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.socket(socket.AF_UNIX))
        made = f"{name}.new"
        mask = os.umask(0o177)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made, dir_fd=folder)
            # Through the descriptor: the path may be too long for a socket, and cannot
            # be exchanged between check and use.
            server.bind(f"/proc/self/fd/{folder}/{made}")
            server.listen(16)
            # Whoever finds it can connect, and does not take it for one left behind.
            os.rename(made, name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError as error:
            raise _refusal(path, error) from error
        finally:
            os.umask(mask)
        server.setblocking(False)
        stack.pop_all()
        return server


def accept(server: socket.socket) -> socket.socket | None:
    """Take a connection of the same user; hang up on anybody else."""
    try:
        connection, _ = server.accept()
    except OSError:
        return None
    if _user_of(connection) != os.getuid():
        connection.close()
        return None
    connection.setblocking(False)
    return connection


def connections() -> Iterator[tuple[int, socket.socket | None]]:
    """Yield the process number of each launcher of this user, and a connection to it.

    There is none to a launcher that takes no more, because it is suspended. A socket
    that nobody listens at was left by one that was killed, and is removed.
    """
    path = environment.socket_directory()
    if not path.is_dir():
        return
    with _opened(path) as folder:
        for name in sorted(os.listdir(folder)):
            match = _NAME.fullmatch(name)
            if match is None:
                continue
            connection = socket.socket(socket.AF_UNIX)
            connection.settimeout(5.0)
            try:
                connection.connect(f"/proc/self/fd/{folder}/{name}")
            except ConnectionRefusedError:
                connection.close()
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
            except (TimeoutError, BlockingIOError):
                connection.close()
                yield int(match[1]), None
            except OSError:
                connection.close()
            else:
                yield int(match[1]), connection


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the directory, and refuse one that somebody else could enter or own."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise _refusal(path, error) from error
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077:
            raise SocketDirectoryError(
                f"{path} belongs to user {status.st_uid} with mode "
                f"{stat.S_IMODE(status.st_mode):o}, so others could give orders to "
                "your jobs. It must be yours with mode 700: remove it, or set "
                "TMPDIR to a directory of your own."
            )
        yield folder
    finally:
        os.close(folder)


def _refusal(path: Path, error: OSError) -> SocketDirectoryError:
    return SocketDirectoryError(
        f"{path} cannot hold the sockets of elasticrun: {error.strerror}. Remove it, "
        "or set TMPDIR to a directory of your own."
    )


def _user_of(connection: socket.socket) -> int:
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")
    )
    return int(struct.unpack("3i", credentials)[1])
