"""Where commands find launchers."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

import pytest

from elasticrun.launcher.talk import sockets


def test_a_directory_that_others_own_or_enter_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    own = tmp_path / "elasticrun"
    own.mkdir(mode=0o750)
    with pytest.raises(sockets.SocketDirectoryError, match="mode 750"):
        list(sockets.connections())
    own.rmdir()
    (tmp_path / "real").mkdir(mode=0o700)
    own.symlink_to(tmp_path / "real")
    with pytest.raises(sockets.SocketDirectoryError):
        sockets.ControlSocket()


def test_where_one_place_takes_no_socket_another_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="er-") as temporary:
        monkeypatch.setattr(tempfile, "tempdir", temporary)
        monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc/self")
        control = sockets.ControlSocket()
        assert control.is_there()
        [(_, connection)] = sockets.connections()
        assert connection is not None
        connection.close()
        control.close()
        assert list(sockets.connections()) == []
        Path(temporary, f"elasticrun-{os.getuid()}").rmdir()
        monkeypatch.setattr(tempfile, "tempdir", "/proc/self")
        with pytest.raises(sockets.SocketDirectoryError, match="/proc/self/elasticrun"):
            sockets.ControlSocket()


def test_whoever_looks_meanwhile_takes_none_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A socket that takes nobody yet would be removed as one that was left behind."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    control, is_over = sockets.ControlSocket(), threading.Event()

    def look() -> None:
        while not is_over.is_set():
            for _, connection in sockets.connections():
                if connection is not None:
                    connection.close()

    looking = threading.Thread(target=look)
    looking.start()
    try:
        for _ in range(200):
            control.renew()
            assert control.is_there()
    finally:
        is_over.set()
        looking.join()
        control.close()
