"""Tests here need one GPU, and those marked `gpus` two; `make gpu` runs both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if Path(__file__).parent not in item.path.parents:
            continue
        item.add_marker(pytest.mark.gpu)
        num_needed = 2 if item.get_closest_marker("gpus") else 1
        if num_gpus < num_needed:
            reason = f"needs {num_needed} GPU{'s' * (num_needed - 1)}"
            item.add_marker(pytest.mark.skip(reason=reason))
