"""How many files a process may have open, and how many rank 0 needs."""

from __future__ import annotations

import contextlib
import resource
import sys

FILES_OF_REPLICA = 64  # One that is alone, with torch, a log and a few workers.
_FILES_OF_OTHER = 3  # Of each other one on rank 0: two at the store, one link.


def files_of_rank_0(world_size: int) -> int:
    """Return about how many files rank 0 has open."""
    return FILES_OF_REPLICA + _FILES_OF_OTHER * (world_size - 1)


def largest_world(limit: int) -> int:
    """Return the most replicas that rank 0 can serve with so many files open."""
    return max(0, (limit - FILES_OF_REPLICA) // _FILES_OF_OTHER + 1)


def allow_open_files(needed: int) -> int:
    """Raise the soft limit where that is needed and can be done; return the limit.

    It stays as it was where it is enough: programs that use `select` need it low.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return sys.maxsize
    if soft < needed:
        limit = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        with contextlib.suppress(ValueError, OSError):  # The system has another bound.
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]
