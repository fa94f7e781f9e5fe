"""Plain scripts that ask iterators by hand: what a patch makes of their loops."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_text
from elasticrun.testing import run_generation
from tests.lint.test_conversion_cases import HEAD, convert, said
from tests.support.whole_scripts import Leave, Run, printed, run_each

CYCLE = "def cycle(of):\n    while True:\n        yield from of\nit = cycle(loader)\n"
STEP = "    net(next(it)).sum().backward()\n    optimizer.step()\n"
TAKEN = """\
    try:
        {x} = next({it})
    except StopIteration:
        {it} = iter({of})
        {x} = next({it})
    net({x}).sum().backward()
"""
TAKE = TAKEN.format(x="x", it="it", of="loader")
OTHER = TAKEN.format(x="y", it="also", of="valid")
VALID = "valid = DataLoader(held_out, 64)\n"


def indented(text: str) -> str:
    return "".join(f"    {line}\n" for line in text.splitlines())


@pytest.mark.parametrize(
    ("text", "new"),
    [
        (
            f"{CYCLE}for i in range(9):\n{STEP}",
            "it = loader\n|for batch in it.batches(9):\n    net(batch).sum()",
        ),
        (
            f"{CYCLE}for i in range(9):\n{STEP}    print(i)\n",
            "for batch in it.batches(9):\n    i = it.batch_index\n    net(batch)",
        ),
        (
            CYCLE.replace("yield from of", "for each in of: yield each")
            + f"batch = 1\nfor i in range(n):\n{STEP}",
            "for next_batch in it.batches(n):\n    net(next_batch).sum()",
        ),
        (
            f"it = iter(loader)\nfor i in range(9):\n{TAKE}",
            "it = loader\nfor batch in it.batches(9):\n    x = batch\n    net(x)",
        ),
        (
            (
                "it = iter(loader)\nfor epoch in range(n):\n"
                f"    for i in range(9):\n{indented(TAKE)}"
            ),
            (
                "for epoch in elasticrun.remaining_epochs_until(n):\n"
                "    for batch in it.batches(9):\n        x = batch\n        net(x)"
            ),
        ),
        (
            (
                f"{VALID}it = iter(loader)\nalso = iter(valid)\n"
                f"for i in range(9):\n{OTHER}{TAKE}"
            ),
            (
                "\nloaders = elasticrun.CombinedLoader([valid, loader])\n"
                "for batch in loaders.batches(9):\n    y = batch[0]\n    net(y).sum()"
                ".backward()\n    x = batch[1]\n    net(x)"
            ),
        ),
        (
            (
                f"{CYCLE}for step in range(9):\n    for i in range(2):\n"
                f"    {STEP[:-21]}    optimizer.step()\n"
            ),
            (
                "for step in elasticrun.remaining_steps_until(9):\n"
                "    for batch in it.batches(2):\n        net(batch)"
            ),
        ),
        (
            (
                "class Fit:\n    def __init__(self):\n        self.it = iter(loader)\n"
                "    def run(self):\n        for i in range(9):\n"
                + indented(indented(TAKEN.format(x="x", it="self.it", of="loader")))
                + "Fit().run()\n"
            ),
            "self.it = loader\n|for batch in self.it.batches(9):\n            x = b",
        ),
    ],
)
def test_what_is_asked_by_hand_is_looped_over(text: str, new: str) -> None:
    found = convert(HEAD + text)
    assert all(each in found for each in new.split("|")), found
    assert "loader = elasticrun.AdaptiveDataLoader(data" in found
    assert not {e.code for e in lint_text(found).findings} & {"ER003", "ER401", "ER402"}


@pytest.mark.parametrize(
    "text",
    [
        f"{CYCLE}for i in range(9):\n{STEP}x = next(it)\n",
        f"{CYCLE}for i in range(9):\n{STEP}    f(it)\n",
        f"{CYCLE}for i in range(9):\n{STEP}    y = next(it)\n",
        f"{CYCLE}for i in range(9):\n    if f(i):\n    {STEP}",
        f"{CYCLE}for i in range(9):\n    if f(i): continue\n{STEP}",
        f"{CYCLE}for i in range(9):\n{STEP}print(i)\n",
        f"{CYCLE}for i in range(1, 9):\n{STEP}",
        f"{CYCLE}for i in range(9):\n{STEP}else: f()\n",
        f"{CYCLE}for i in range(9):\n{STEP.replace('next(it)', 'f() or next(it)')}",
        f"{CYCLE}for i in range(9):\n{STEP.replace('next(it)', 'next(it, 0)')}",
        f"{CYCLE}for i in range(9): net(next(it)).sum().backward()\n",
        f"{CYCLE.replace('True', 'f()')}for i in range(9):\n{STEP}",
        f"{CYCLE.replace('yield from of', 'yield of')}for i in range(9):\n{STEP}",
        f"{CYCLE.replace('from of', 'from f(of)')}for i in range(9):\n{STEP}",
        f"{CYCLE}".replace("while True:\n    ", "if True:\n    ")
        + f"for i in range(9):\n{STEP}",
        f"it = iter(loader)\nfor i in range(9):\n{STEP}",
        f"it = iter(loader)\nfor i in range(9):\n{TAKE}".replace(
            "        it = iter(loader)", "        f()\n        it = iter(loader)"
        ),
        f"it = iter(loader)\nfor i in range(9):\n{TAKE}".replace(
            "        it = iter(loader)", "        it = iter(loader[1:])"
        ),
        f"it = iter(loader)\nfor i in range(9):\n{TAKE.replace('x =', 'y =', 1)}",
        (
            "for epoch in range(n):\n    it = iter(loader)\n"
            f"    for i in range(9):\n{indented(TAKE)}"
        ),
        (
            f"{VALID}it = iter(loader)\nif f():\n    also = iter(valid)\n"
            f"for i in range(9):\n{OTHER}{TAKE}"
        ),
        f"{VALID}{CYCLE}x = next(iter(valid))\nfor i in range(9):\n{STEP}",
    ],
)  # fmt: skip
def test_an_iterator_is_left_that_is_asked_in_other_ways(text: str) -> None:
    found = convert(HEAD + text)
    assert "AdaptiveDataLoader(" not in found
    assert "batches(" not in found
    assert "do not ask its iterator as in line" in said(HEAD + text)


def test_iterators_over_other_things_are_left() -> None:
    text = f"{CYCLE.replace('(loader)', '(others)')}for i in range(9):\n{STEP}"
    assert "net(next(it))" in convert(HEAD + text)


WHOLE = f"""\
import torch
from torch.utils.data import DataLoader
torch.manual_seed(0)
data = torch.randn(60, 4)
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(data, 16, shuffle=True, drop_last=True)
it = iter(loader)
for epoch in range(3):
    for i in range(5):
        optimizer.zero_grad()
{indented(TAKE).replace("sum()", "mean()")}        optimizer.step()
        print(epoch, i, len(x) > 0)
    print(round(float(net.weight.sum()), 4))
"""


@pytest.mark.slow
def test_a_loop_that_asked_goes_on_exactly(tmp_path: Path) -> None:
    new = convert(WHOLE)
    assert "it.batches(5)" in new
    calm, cut = tmp_path / "calm", tmp_path / "cut"
    stopped = Run(new, cut, Leave("stop", after=8))
    (ended,) = run_generation(run_each, 1, Run(new, calm), stopped)
    assert ended[1] is None
    run_generation(run_each, 2, Run(new, cut))
    assert printed(cut) == printed(calm) != []
