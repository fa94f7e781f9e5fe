"""The machine that a figure was measured on, and one JSON line for each figure."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path
from typing import Any

import numpy as np
import torch

# An installed package is compiled. Where this is set, every process that a benchmark
# starts would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def report(benchmark: str, **figures: Any) -> None:
    """Print one line: what was measured, the figures, and the machine."""
    print(json.dumps({"benchmark": benchmark, **figures, **machine()}), flush=True)


def machine() -> dict[str, object]:
    """Return what a figure depends on beside the code."""
    return {
        "platform": platform.platform(),
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "torch_threads": torch.get_num_threads(),
    }


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
