"""A replica's reports to its launcher."""

from __future__ import annotations

import socket
import sys
import types

import pytest

from elasticrun.launcher.replica.reporter import Reporter
from elasticrun.replicas.wire import Channel


def test_a_program_that_is_being_imported_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A look at a module of which half is there must not end the reports."""
    half = types.ModuleType("elasticrun.saving.opening")
    monkeypatch.setitem(sys.modules, half.__name__, half)
    own, launchers = socket.socketpair()
    with own, launchers:
        reporter = Reporter(Channel(own), imports=dict, on_begun=print)
        assert reporter.look() < 1.0
