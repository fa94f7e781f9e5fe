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


def test_what_is_given_is_told_and_listened_at_where_it_is_here() -> None:
    own = endpoint.address_here("127.0.0.1")
    assert own == endpoint.OwnAddress("127.0.0.1", "127.0.0.1", "lo")
    # It leads here from elsewhere only.
    own = endpoint.address_here("192.0.2.7")
    assert own == endpoint.OwnAddress("192.0.2.7", "0.0.0.0", "")
    with endpoint.listen_at(own.bind) as listener:
        assert listener.getsockname()[1] > 0


def test_an_address_of_this_machine_is_found_or_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    likely = ["127.0.1.1", "198.51.100.1", "127.0.0.1", "203.0.113.5"]
    interfaces = {"203.0.113.5": "eth0", "127.0.0.1": "lo"}
    monkeypatch.setattr(endpoint, "_likely_addresses", lambda: iter(likely))
    monkeypatch.setattr(endpoint, "_interface_of", lambda a: interfaces.get(a, ""))
    own = endpoint.address_here("")
    assert own == endpoint.OwnAddress("203.0.113.5", "203.0.113.5", "eth0")
    del interfaces["203.0.113.5"]
    with pytest.raises(OSError, match="Give --address HOST"):
        endpoint.address_here("")
