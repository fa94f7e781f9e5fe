"""Loops that count by hand, which a patch makes loops over steps or epochs."""

from __future__ import annotations

import pytest

from elasticrun.lint.engine import lint_text
from tests.lint.test_conversion_cases import EPOCHS, FIT, HEAD, convert, said

STEP = "    net(draw()).sum().backward()\n    optimizer.step()\n"


@pytest.mark.parametrize(
    ("text", "new"),
    [
        (
            f"i = 0\nwhile i < n:\n{STEP}    f(i)\n    i += 1\n",
            f"i = 0\nfor i in elasticrun.remaining_steps_until(n):\n{STEP}    f(i)\n",
        ),
        (
            f"i, j = 0, 1\nwhile (i < o.n - 1): # all\n{STEP}    i += 1  # next\nf()\n",
            (
                f"for i in (elasticrun.remaining_steps_until(o.n - 1)): # all\n{STEP}"
                "      # next\nf()\n"
            ),
        ),
        (
            f"i = 0\nwhile i < n:\n{FIT}    i += 1\n",
            f"for i in elasticrun.remaining_epochs_until(n):\n{FIT}",
        ),
        (
            f"i = 1\nwhile i < n:\n{STEP}    i += 1\n",
            "for i in elasticrun.remaining_steps_until(n - 1, start=1):\n",
        ),
        (
            f"i = 0\nif f(): i = torch.load('a')\nwhile i < n:\n{STEP}    i += 1\n",
            (
                'i = elasticrun.Variables(value=i, name="i").value\n'
                "for i in elasticrun.remaining_steps_until(n - i, start=i):\n"
            ),
        ),
        (
            f"i = 0\nwhile i < n:\n    i += 1\n{STEP}",
            f"for i in elasticrun.remaining_steps_until(n):\n    i += 1\n{STEP}",
        ),
        ("i = 0\nwhile i < 9: net(draw()).sum().backward(); i += 1\n", "until(9): net"),
    ],
)
def test_a_loop_that_counts_by_hand(text: str, new: str) -> None:
    found = convert(HEAD + text)
    assert new in found
    assert "write `for i in elasticrun.remaining_" in said(HEAD + text)
    assert not lint_text(found).findings


@pytest.mark.parametrize(
    "text",
    [
        f"i = 0\nwhile i <= n:\n{STEP}    i += 1\n",
        f"i = 0\nwhile i < n:\n{STEP}    i += 2\n",
        f"i = 0\nwhile i < n:\n    if f(): i += 1\n{STEP}",
        f"i = 0\nwhile i < n:\n{STEP}    if f(): i = 3\n    i += 1\n",
        f"i = 0\nwhile i < n:\n{STEP}    if f(): continue\n    i += 1\n",
        f"i = 0\nwhile i < n:\n{STEP}    n = f()\n    i += 1\n",
        f"i = 0\nwhile i < f():\n{STEP}    i += 1\n",
        f"i = 0\nwhile i < n:\n{STEP}    i += 1\nprint(i)\n",
        f"i = 0\nwhile i < n:\n{STEP}    i += 1\nelse: f()\n",
        f"i = 0\ndef f(): return i\nwhile i < n:\n{STEP}    i += 1\n",
        f"i = 0\nwhile i < n:\n{STEP}    i += 1\n{EPOCHS}",
        "i = 0\nwhile i < n:\n    print(i)\n    i += 1\n",
        f"def f(i):\n  while i < n:\n{STEP}    i += 1\nf(0)\nf(1)\n",
        (
            f"def f():\n    i = 0\n    while i < n:\n    {STEP[:-21]}        i += 1\n"
            "f()\nf()\n"
        ),
    ],
)
def test_a_loop_is_left_that_does_not_just_count(text: str) -> None:
    assert "while i <" in convert(HEAD + text)


COUNTING = """\
class Fit:
    def __init__(self): self.i = 0
    def read(self): self.i = torch.load('a')
    def run(self):
        while self.i < n:
            net(draw()).sum().backward()
            self.i += 1
            self.said()
    def said(self): print(self.i)
    def other(self): self.layer.i()
Fit().run()
"""


def test_a_loop_may_count_in_an_attribute() -> None:
    until = "elasticrun.remaining_steps_until(n - self.i, start=self.i)"
    head = 'self.i = elasticrun.Variables(value=self.i, name="i").value'
    new = convert(HEAD + COUNTING)
    assert f"        {head}\n        for self.i in {until}:\n" in new
    assert "            self.i += 1\n            self.said()\n" in new


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.layer.i()", "print(self.i)"),
        ("Fit().run()", "fit = Fit()\nfit.run()\nprint(fit.i)"),
        ("print(self.i)", "self.i = 0"),
        ("self.i < n", "self.i < self.n()"),
        ("self.i += 1", "self.i += 2"),
        ("self.i = 0\n    def read(self): self.i = ", "pass; i = 0; i = "),
    ],
)  # fmt: skip
def test_an_attribute_is_left_that_does_more_than_count(old: str, new: str) -> None:
    assert old in COUNTING
    assert "while self.i <" in convert(HEAD + COUNTING.replace(old, new))
