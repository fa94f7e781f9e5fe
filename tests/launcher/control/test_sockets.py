"""Where commands find launchers."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from elasticrun.launcher.control import sockets


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"elasticrun-{os.getuid()}"


def test_a_directory_that_others_own_or_enter_is_refused(
    folder: Path, tmp_path: Path
) -> None:
    folder.mkdir(mode=0o750)
    with pytest.raises(sockets.SocketDirectoryError, match="mode 750"):
        list(sockets.connections())
    folder.rmdir()
    (tmp_path / "real").mkdir(mode=0o700)
    folder.symlink_to(tmp_path / "real")
    with pytest.raises(sockets.SocketDirectoryError):
        sockets.ControlSocket()


def test_a_place_that_takes_no_socket_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", "/proc/self")
    assert list(sockets.connections()) == []
    with pytest.raises(sockets.SocketDirectoryError, match="/proc/self/elasticrun"):
        sockets.ControlSocket()


def test_a_launcher_is_found_until_it_ends(folder: Path) -> None:
    control = sockets.ControlSocket()
    [(pid, connection)] = sockets.connections()
    assert pid == os.getpid()
    assert connection is not None
    connection.close()
    control.close()
    assert [*folder.iterdir()] == [*sockets.connections()] == []


def test_whoever_looks_meanwhile_takes_none_away(folder: Path) -> None:
    """A socket that takes nobody yet would be removed as one that was left behind."""
    is_over = threading.Event()

    def look() -> None:
        while not is_over.is_set():
            for _, connection in sockets.connections():
                if connection is not None:
                    connection.close()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            control = sockets.ControlSocket()
            assert [path.suffix for path in folder.iterdir()] == [".sock"]
            control.close()
    finally:
        is_over.set()
        looking.join()
