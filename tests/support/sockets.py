"""Ports that are told to processes before one of them listens there."""

from __future__ import annotations

import socket

_KEPT: list[socket.socket] = []


def kept_port() -> int:
    """Return a port of loopback that nobody is given but by its number.

    It is bound until this process ends, and not listened at: whoever connects is
    refused until somebody who allows it to be reused, as all here do, listens.
    """
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    place.bind(("127.0.0.1", 0))
    _KEPT.append(place)
    return int(place.getsockname()[1])
