"""The version, which has its one literal in `setup.py`."""

from __future__ import annotations

from functools import cache
from importlib import metadata


@cache
def version() -> str:
    """Return the installed version, or "unknown" when run from a plain source tree."""
    try:
        return metadata.version("elasticrun")
    except metadata.PackageNotFoundError:
        return "unknown"
