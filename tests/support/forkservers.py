"""Forkservers that have imported what the replicas of some tests need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from typing import Any

# What each of them is to `multiprocessing`, which knows of one at a time. All end with
# this process.
_servers: dict[str, dict[str, Any]] = {}


@contextmanager
def forks_that_have_imported(module: str) -> Iterator[None]:
    """Fork replicas from a process that has imported a module, and all that it imports.

    That takes seconds, once, instead of as many in each replica.
    """
    current = vars(forkserver._forkserver)  # type: ignore[attr-defined]
    usual = current.copy()
    current.update(_servers.get(module) or vars(forkserver.ForkServer()))
    try:
        forkserver.set_forkserver_preload(["elasticrun.testing.preloaded", module])
        forkserver.ensure_running()
        yield
    finally:
        _servers[module] = current.copy()
        current.update(usual)
