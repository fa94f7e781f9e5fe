"""Where nodes meet, and at which address others reach this one."""

from __future__ import annotations

import socket

import pytest

from elasticrun.launcher.nodes import endpoint


def test_whoever_comes_first_serves_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert endpoint.listen("127.0.0.1", port) is None
    first = endpoint.listen("localhost", port)
    assert first is not None
    with first:
        assert first.getsockname()[0] == "127.0.0.1"


def test_the_address_of_another_machine_is_not_served() -> None:
    assert endpoint.listen("192.0.2.1", 4000) is None


def test_loopback_stays_on_loopback() -> None:
    own = endpoint.own_address("localhost", 4000)
    assert own == endpoint.OwnAddress("127.0.0.1", "127.0.0.1", "lo")


def test_a_name_for_loopback_is_told_as_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    found = socket.getaddrinfo("127.0.1.1", 4000, type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    own = endpoint.own_address("head", 4000)
    assert own == endpoint.OwnAddress("head", "0.0.0.0", "")
