"""Counts the GPUs that a process would see, without torch and the driver.

Asking either of them could make every later fork of the process unable to use GPUs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

_AMD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
# Devices that only a process which has begun to use GPUs holds open.


def count_gpus(variables: Mapping[str, str]) -> int:
    """Return how many GPUs of this machine those variables show to a process."""
    if num_present := _num_nvidia():
        return num_visible(variables.get("CUDA_VISIBLE_DEVICES"), num_present)
    if not (num_present := _num_amd()):
        return 0
    # ROCm narrows first, HIP what is left; HIP takes CUDA's variable for its own.
    if (rocr := variables.get("ROCR_VISIBLE_DEVICES")) is not None:
        num_present = num_visible(rocr, num_present)
    hip = variables.get("HIP_VISIBLE_DEVICES")
    cuda = variables.get("CUDA_VISIBLE_DEVICES")
    return num_visible(cuda if hip is None else hip, num_present)


def num_visible(value: str | None, num_present: int) -> int:
    """Return how many of the GPUs that are present CUDA_VISIBLE_DEVICES shows.

    As CUDA reads it (CUDA C++ Programming Guide, "CUDA Environment Variables"): a list
    counts up to its first invalid entry, and not at all if it names one GPU twice. Of
    slices (MIG) a process is given one. Numbers are read as C's strtoul does.
    """
    if value is None:
        return num_present
    prefix = next((p for p in ("GPU-", "MIG-") if value.startswith(p)), None)
    seen: set[str | int] = set()
    for entry in value.split(","):
        name = entry if prefix else _leading_number(entry)
        if name in seen:
            return 0
        is_valid = (
            str(name).startswith(prefix)
            if prefix is not None
            else isinstance(name, int) and 0 <= name < num_present
        )
        if not is_valid:
            break
        seen.add(name)
    return min(len(seen), 1) if prefix == "MIG-" else min(len(seen), num_present)


def _leading_number(entry: str) -> int:
    match = re.match(r"\s*([+-]?\d+)", entry)
    return int(match[1]) if match else -1


def _num_nvidia() -> int:
    return sum(bool(re.fullmatch(r"nvidia\d+", name)) for name in os.listdir("/dev"))


def _num_amd() -> int:
    """Return how many of the kernel's compute nodes are GPUs: those with SIMD units."""
    number = 0
    for properties in _AMD_NODES.glob("*/properties"):
        try:
            text = properties.read_text()
        except OSError:
            continue
        match = re.search(r"^simd_count (\d+)$", text, re.MULTILINE)
        number += match is not None and match[1] != "0"
    return number
