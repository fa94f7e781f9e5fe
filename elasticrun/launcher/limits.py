"""Whether the launcher may open as many files as its replicas take."""

from __future__ import annotations

import os
import resource

from elasticrun.launcher.options import OptionError

_FILES_WAITING = 3  # Of a replica: its channel, stdout and stderr.
_FILES_RUNNING = 5  # And its log, and what tells of its end.
_FILES_SPARE = 16  # For callers, logs that are read, and one replica that is forked.


def check_open_files(size: int, *, num_running: int = 0) -> None:
    """Refuse more replicas than there can be open files for, before anything stops.

    Args:
        num_running: Replicas that end when those begin.

    Raises:
        OptionError: There would be too many.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    others = len(os.listdir("/proc/self/fd")) + _FILES_SPARE
    without = others - _FILES_RUNNING * num_running
    if limit == resource.RLIM_INFINITY:
        return
    needed = max(others + _FILES_WAITING * size, without + _FILES_RUNNING * size)
    if needed > limit:
        most = min(
            (limit - others) // _FILES_WAITING, (limit - without) // _FILES_RUNNING
        )
        raise OptionError(
            f"{size} replicas: the launcher would have about {needed} files open, and "
            f"may have {limit}. Raise that limit (ulimit -n) before you start it, or "
            f"take at most {max(most, 0)}."
        )
