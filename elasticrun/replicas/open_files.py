"""How many files a process may have open."""

from __future__ import annotations

import contextlib
import resource

_ENOUGH = 1 << 16  # Rank 0 has three for each other replica, the launcher five.


def raise_limit_of_open_files() -> None:
    """Raise the soft limit, often 1,024, as far as the hard one lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = _ENOUGH if hard == resource.RLIM_INFINITY else min(_ENOUGH, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        with contextlib.suppress(ValueError, OSError):  # The system has another bound.
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
