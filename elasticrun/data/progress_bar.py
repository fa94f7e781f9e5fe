"""The progress bar of a loop, through tqdm if it is asked for and installed."""

from __future__ import annotations

import importlib.util
from typing import Any, Protocol


class ProgressBar(Protocol):
    """What a loop tells its bar."""

    def update(self) -> Any:
        """Count one global batch."""
        ...

    def close(self) -> Any:
        """End the bar."""
        ...


def open_progress_bar(
    name: str, first_batch: int, num_batches: int | None
) -> ProgressBar:
    """Return a bar that begins where the loop does; it has been checked for."""
    from tqdm.auto import tqdm

    bar: ProgressBar = tqdm(
        total=num_batches, initial=first_batch, desc=name, unit="batch"
    )
    return bar


def check_progress_bar() -> None:
    """Refuse to promise a bar that cannot be shown.

    Raises:
        ImportError: tqdm is not installed.
    """
    if importlib.util.find_spec("tqdm") is None:
        raise ImportError(
            "progress=True needs tqdm: pip install 'elasticrun[progress]'."
        )
