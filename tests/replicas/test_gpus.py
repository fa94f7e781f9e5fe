"""GPUs are counted as CUDA shows them to a process, without asking it."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.replicas import gpus
from elasticrun.replicas.gpus import count_gpus, num_visible


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (None, 4),
        ("", 0),
        ("0,1,2", 3),
        (" 3, 1", 2),
        ("-1", 0),
        ("0,-1,1", 1),
        ("0,0", 0),
        ("0,9,1", 1),
        ("1gpu2,2ampere", 2),
        ("NoDevFiles", 0),
        ("GPU-8f,GPU-9a", 2),
        ("GPU-8f,GPU-8f", 0),
        ("GPU-8f,MIG-a", 1),
        ("MIG-a", 1),
        ("MIG-a,MIG-b", 1),
    ],
)
def test_what_the_variable_shows_of_four(value: str | None, number: int) -> None:
    assert num_visible(value, 4) == number


@pytest.fixture
def amd(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Have a machine with a CPU and three GPUs of AMD's."""
    for number, units in enumerate((0, 80, 80, 80)):
        (tmp_path / str(number)).mkdir()
        text = f"cpu_cores_count {64 - units}\nsimd_count {units}\nmem_banks_count 1\n"
        (tmp_path / str(number) / "properties").write_text(text)
    monkeypatch.setattr(gpus, "_AMD_NODES", tmp_path)
    monkeypatch.setattr(gpus, "_num_nvidia", lambda: 0)


@pytest.mark.usefixtures("amd")
@pytest.mark.parametrize(
    ("variables", "number"),
    [
        ({}, 3),
        ({"HIP_VISIBLE_DEVICES": "0,2"}, 2),
        ({"HIP_VISIBLE_DEVICES": "", "CUDA_VISIBLE_DEVICES": "1"}, 0),
        ({"CUDA_VISIBLE_DEVICES": "1"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0,1,2"}, 2),
    ],
)
def test_gpus_of_amd_count(variables: dict[str, str], number: int) -> None:
    assert count_gpus(variables) == number
