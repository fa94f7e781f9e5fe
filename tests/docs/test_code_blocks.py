"""The code in README, docs and the rules' pages runs as it stands there.

At three replicas it prints what it prints at one: a sum over one replica's part, or an
effect of each replica, would show.
"""

from __future__ import annotations

import contextlib
import gc
import io
import math
import os
import re
import subprocess
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from elasticrun.job import current
from elasticrun.testing import run_generation
from tests.docs.documents import ROOT, Block, blocks, side_of
from tests.lint.pages import PAGES

PYTHON = blocks("python")
SHELL = blocks("sh")
DIFFS = blocks("diff")


def fewer_epochs(code: str) -> str:
    return re.sub(r"(until\(\d)0\)", r"\1)", code)


# What runs at one replica and at three, by its name.
AT_ANY_SIZE = {
    **{block.name: block.code for block in PYTHON if block.sizes == (1, 3)},
    **{f"{b.name}+": side_of(b.code, "+") for b in DIFFS if b.sizes == (1, 3)},
    **{f"{code} right": fewer_epochs(p.prelude + p.right) for code, p in PAGES.items()},
}


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
        # Of the rules' pages.
        "extra_set": rows,
        "more_set": torch.randn(200, 4),
        "all_data": range(1000),
        "weights": torch.ones(200),
    }


PRELUDE_OF_RULES = """
def loss(x, y):
    return torch.nn.functional.cross_entropy(model(x), y)

def step(x, y):
    optimizer.zero_grad()
    loss(x, y).backward()
    optimizer.step()

def evaluate(*batch):
    return 0.5

def work(number):
    pass

def worse():
    return True

class writer:
    add_scalar = print
"""


def run_block(code: str, name: str) -> str:
    """Run code, and return what it printed."""
    names = prelude()
    exec(PRELUDE_OF_RULES, names)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, name, "exec"), names)
        current.close_current_job()
    names.clear()
    gc.collect()  # Closes the files that it has left open.
    return printed.getvalue()


@dataclass(frozen=True)
class Effects:
    """What a block has done.

    Attributes:
        printed: By each replica.
        lines: Of the tables (*.csv) that it has written, sorted.
    """

    printed: list[str]
    lines: list[str]


def run_blocks(codes: dict[str, str], directory: str) -> list[str]:
    """Run code in one replica, one after another, each in a directory of its own."""
    sys.modules["requests"] = types.ModuleType("requests")
    sys.modules["requests"].__dict__["post"] = post
    sys.modules.update(adaptdl_alone())
    printed = []
    gc.freeze()  # What is there stays, and is not looked through after each.
    for number, (name, code) in enumerate(codes.items()):
        here = Path(directory, str(number))
        here.mkdir(exist_ok=True)
        os.chdir(here)
        os.environ["ELASTICRUN_CHECKPOINT_DIR"] = str(here / "checkpoints")
        write_records(here / "data")
        try:
            printed.append(run_block(code, name))
        except Exception as error:
            raise RuntimeError(f"{name} failed") from error
    return printed


def write_records(folder: Path) -> None:
    """Write the files that docs/howto/streams.md reads."""
    folder.mkdir(exist_ok=True)
    for name in ("a.jsonl", "b.jsonl"):
        lines = "".join(f'{{"n": {n}, "name": "{name}"}}\n' for n in range(40))
        whole = folder / f"{name}.{os.getpid()}"
        whole.write_text(lines)
        whole.replace(folder / name)


def adaptdl_alone() -> dict[str, types.ModuleType]:
    """Stand for AdaptDL in one process: no torch of today can import it."""
    package, module = types.ModuleType("adaptdl"), types.ModuleType("adaptdl.torch")
    package.__dict__["torch"] = module
    module.__dict__.update(
        init_process_group=lambda backend: None,
        AdaptiveDataLoader=DataLoader,
        AdaptiveDataParallel=lambda net, optimizer, scheduler: net,
        remaining_epochs_until=range,
    )
    return {"adaptdl": package, "adaptdl.torch": module}


def post(url: str, json: object) -> None:
    """Stand for `requests.post`: let each request be seen."""
    with open("posted.csv", "a") as file:
        file.write(f"{url} {json}\n")


def effects_at(size: int, codes: dict[str, str], directory: Path) -> dict[str, Effects]:
    """Start replicas once, and run all of the code in them; return what each did."""
    directory.mkdir()

    def replica() -> list[str]:
        from tests.docs.test_code_blocks import run_blocks

        return run_blocks(codes, str(directory))

    printed = run_generation(replica, size, timeout=3600.0)
    return {
        name: Effects(
            [of_replica[number] for of_replica in printed],
            sorted(
                line
                for path in (directory / str(number)).glob("*.csv")
                for line in path.read_text().splitlines()
            ),
        )
        for number, name in enumerate(codes)
    }


@pytest.mark.slow(35)
@pytest.mark.wide
def test_three_replicas_print_what_one_prints(tmp_path: Path) -> None:
    without = {f"{b.name}-": side_of(b.code, "-") for b in DIFFS if b.sizes == (1, 3)}
    alone = effects_at(1, {**AT_ANY_SIZE, **without}, tmp_path / "1")
    together = effects_at(3, AT_ANY_SIZE, tmp_path / "3")
    wrong = [
        f"{name}: {one} became {three}"
        for name, three in together.items()
        for one in [alone[name]]
        if one.lines != three.lines
        or not all(text == "" or alike(text, one.printed[0]) for text in three.printed)
        or not alike(three.printed[0], one.printed[0])
    ]
    assert wrong == []


def alike(text: str, other: str) -> bool:
    """Return whether two texts differ by no more than rounding in their numbers."""
    number = re.compile(r"-?\d+\.\d+(?:e-?\d+)?")
    return number.sub("#", text) == number.sub("#", other) and all(
        math.isclose(float(one), float(another), rel_tol=1e-3)
        for one, another in zip(
            number.findall(text), number.findall(other), strict=True
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.name) for b in PYTHON if len(b.sizes) == 1]
)
def test_a_block_for_one_number_of_replicas_runs(
    block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (size,) = block.sizes
    if size > 1:
        effects_at(size, {block.name: block.code}, tmp_path / "job")
    else:
        monkeypatch.chdir(tmp_path)
        run_block(block.code, block.name)


@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.parametrize(
    "block", [pytest.param(b, id=b.name) for b in DIFFS if len(b.sizes) == 1]
)
def test_both_sides_of_a_diff_for_one_number_print_the_same(
    block: Block, tmp_path: Path
) -> None:
    """A framework's Trainer, without elasticrun in one process and with it in some."""
    (size,) = block.sizes
    sides = {side: {block.name: side_of(block.code, side)} for side in "-+"}
    before = effects_at(1, sides["-"], tmp_path / "before")[block.name].printed
    after = effects_at(size, sides["+"], tmp_path / "after")[block.name].printed
    assert after[0].splitlines()[-1] == before[0].splitlines()[-1]


def test_diff_of_readme_changes_few_lines() -> None:
    (diff,) = [b for b in DIFFS if b.document == ROOT / "README.md"]
    lines = diff.code.splitlines()
    assert sum(line.startswith("+") for line in lines) <= 9


@pytest.mark.parametrize("block", SHELL, ids=[block.name for block in SHELL])
def test_shell_block_parses(block: Block) -> None:
    subprocess.run(["bash", "-n"], input=block.code.encode(), check=True)


def test_every_block_says_its_language() -> None:
    known = {"python", "diff", "sh", "console", "text", "json"}
    assert {block.language for block in blocks()} <= known
