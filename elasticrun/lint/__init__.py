"""The linter: what a restart would do twice, or lose, found in the source alone."""

from __future__ import annotations
