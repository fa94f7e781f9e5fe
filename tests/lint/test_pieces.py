"""Short pieces of training scripts: a mistake in one of its many forms, or none.

A piece begins with `### title | codes`, and stands behind `HEAD`.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import pytest

from elasticrun.lint.engine import lint_text
from elasticrun.lint.options import LintOptions
from elasticrun.lint.rules.table import RULES

PIECES = Path(__file__).parent / "pieces"
HEAD = """\
import copy, json, logging, math, os, random, time
from pathlib import Path
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
import elasticrun
from elasticrun import *
torch.manual_seed(0)
net = nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model = AdaptiveDataParallel(net, optimizer, scheduler)
train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
valid = AdaptiveDataLoader(valid_set, batch_size=64)
def fit(x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
"""


class Piece(NamedTuple):
    title: str
    words: set[str]
    body: str


def pieces(name: str) -> list[object]:
    text = (PIECES / name).read_text(encoding="utf-8")
    found: list[object] = []
    for part in re.split(r"^### ", text, flags=re.MULTILINE)[1:]:
        head, body = part.split("\n", 1)
        title, _, words = head.partition(" | ")
        piece = Piece(title, set(words.split()), body)
        found.append(pytest.param(piece, id=title.replace(" ", "-")))
    return found


def codes(piece: Piece) -> set[str]:
    options = LintOptions(pedantic="pedantic" in piece.words)
    result = lint_text(HEAD + piece.body, options=options)
    assert not result.problems
    return {each.code for each in result.findings}


@pytest.mark.parametrize("piece", pieces("right.txt"))
def test_nothing_is_found(piece: Piece) -> None:
    assert codes(piece) == set()


@pytest.mark.parametrize("piece", pieces("wrong.txt"))
def test_the_mistake_is_found_and_nothing_else(piece: Piece) -> None:
    assert codes(piece) == piece.words - {"pedantic"}


def test_most_rules_have_pieces() -> None:
    text = (PIECES / "wrong.txt").read_text(encoding="utf-8")
    assert RULES.keys() - set(re.findall(r"ER\d+", text)) == {"ER003"}


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("data = torch.randn(3, 4)", True),
        ("net.weight.data = torch.randn(3, 4)", False),
        ("head = nn.Parameter(torch.randn(4))", False),
    ],
)
def test_first_weights_need_no_seed(line: str, is_found: bool) -> None:
    loop = "for epoch in remaining_epochs_until(9):\n    for x, y in train: fit(x, y)\n"
    text = HEAD.replace("torch.manual_seed(0)\n", "") + f"{line}\n{loop}"
    assert [each.code for each in lint_text(text).findings] == ["ER501"] * is_found


def test_a_scaler_is_to_be_registered() -> None:
    text = """\
scaler = torch.amp.GradScaler("cuda")
for epoch in remaining_epochs_until(9):
    for x, y in train:
        scaler.scale(F.cross_entropy(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()
"""
    (finding,) = lint_text(HEAD + text).findings
    assert (finding.code, finding.help) == ("ER306", "give it to register(scaler=...)")


def test_a_model_of_several_parts_is_found_once_and_whole() -> None:
    text = """\
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
other = Net()
sgd = torch.optim.SGD([*other.body.parameters(), *other.head.parameters()], lr=0.1)
for epoch in remaining_epochs_until(9):
    for x, y in train:
        F.cross_entropy(other(x), y).backward()
        sgd.step()
"""
    found = lint_text(HEAD + text).findings
    first = HEAD.count("\n")
    assert [(e.code, e.line - first) for e in found] == [("ER306", 5), ("ER306", 6)]
    made = "wrapped = AdaptiveDataParallel(other, sgd)\nfor epoch"
    whole = text.replace("for epoch", made).replace("other(x)", "wrapped(x)")
    parts = text.replace(
        "for epoch", "register(b=other.body, h=other.head, s=sgd)\nfor epoch"
    )
    assert lint_text(HEAD + whole).findings == []
    assert lint_text(HEAD + parts).findings == []
