"""The code in README and docs runs as it stands there."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from elasticrun.testing import run_generation
from tests.docs.documents import ROOT, Block, blocks
from tests.support.generations import generation

PYTHON = blocks("python")
SHELL = blocks("sh")
DIFFS = blocks("diff")


def prelude() -> dict[str, Any]:
    """Return what a reader of the documents is assumed to have already."""
    torch.manual_seed(0)
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    rows, labels = torch.randn(50, 4), torch.randint(3, (50,))
    return {
        "__name__": "train",
        "torch": torch,
        "nn": nn,
        "F": nn.functional,
        "net": net,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "train_set": TensorDataset(rows, labels),
        "valid_set": TensorDataset(rows[:30], labels[:30]),
    }


def run_block(code: str, name: str) -> None:
    exec(compile(code, name, "exec"), prelude())


@pytest.mark.slow
@pytest.mark.parametrize("block", PYTHON, ids=[block.name for block in PYTHON])
def test_python_block_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if block.num_replicas > 1:
        variables = {"ELASTICRUN_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
        code, name = block.code, block.name
        run_generation(
            run_block_of_replica, block.num_replicas, code, name, variables=variables
        )
    elif "elasticrun.init(" in block.code:  # It makes the job itself.
        run_block(block.code, block.name)
    else:
        with generation(tmp_path / "job"):
            run_block(block.code, block.name)


def run_block_of_replica(code: str, name: str) -> None:
    from tests.docs.test_code_blocks import run_block

    run_block(code, name)


@pytest.mark.parametrize("block", DIFFS, ids=[block.name for block in DIFFS])
@pytest.mark.parametrize("side", ["-", "+"])
def test_both_sides_of_a_diff_run(block: Block, side: str, tmp_path: Path) -> None:
    lines = block.code.splitlines()
    assert all(line[:1] in ("-", "+", " ", "") for line in lines)
    kept = [line[1:] for line in lines if line[:1] in (side, " ", "")]
    with generation(tmp_path / "job"):
        run_block("\n".join(kept), block.name)


def test_diff_of_readme_changes_few_lines() -> None:
    (diff,) = [b for b in DIFFS if b.document == ROOT / "README.md"]
    lines = diff.code.splitlines()
    assert sum(line.startswith("+") for line in lines) <= 7


@pytest.mark.parametrize("block", SHELL, ids=[block.name for block in SHELL])
def test_shell_block_parses(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.code.encode(), check=True)


def test_every_block_says_its_language() -> None:
    known = {"python", "diff", "sh", "console", "text", "json"}
    assert {block.language for block in blocks()} <= known
