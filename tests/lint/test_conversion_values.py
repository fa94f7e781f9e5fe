"""Values that live over epochs, which a patch keeps in Variables."""

from __future__ import annotations

import pytest

from elasticrun.lint.engine import lint_text
from tests.lint.test_conversion_cases import EPOCHS, HEAD, convert
from tests.lint.test_conversion_uses import (
    LOADER,
    in_epochs,
    indented,
    summed,
)

KEPT = "elasticrun.Variables(value="


@pytest.mark.parametrize(
    ("begun", "text", "new"),
    [
        (
            "best = -float('inf')",
            "best = max(best, epoch)\nprint(f'{best:.4f}', best)",
            (f"best = {KEPT}-float('inf'))\n"
            "|    best.value = max(best.value, epoch)\n"
            "    print(f'{best.value:.4f}', best.value)"),
        ),
        (
            "n, worst = 0, None",
            "if worst is None or epoch > n: n, worst = epoch, 1",
            (f"n, worst = {KEPT}0, name=\"n\"), {KEPT}None, name=\"worst\")\n"
            "|    if worst.value is None or epoch > n.value: n.value, worst.value"),
        ),
        ("n = 0", "n += 1\nf(n)", f"n = {KEPT}0)\n|    n.value += 1\n    f(n.value)"),
        ("n = (0)", "n += 1", f"n = ({KEPT}0))\n|n.value += 1"),
        (
            "n = 0",
            ("for i, (x, y) in enumerate(loader):\n    net(x).sum().backward()\n"
            "    if (i + 1) % 2 == 0: n += 1\nprint(f'n={n}')"),
            f"n = {KEPT}0)\n|n.value += 1\n|f'n={{n.value}}'",
        ),
        (
            "best = 0",
            f"{summed('len(x)')}a = s / len(loader.dataset)\nif a > best: best = a",
            f"best = {KEPT}0)\n|if a > best.value: best.value = a",
        ),
        (
            "best = 0",
            ("import argparse\nargs = argparse.ArgumentParser().parse_args()\n"
            "if epoch % args.every == 0: best += min(args.size, 2)"),
            f"best = {KEPT}0)\n|best.value += min(args.size, 2)",
        ),
    ],
)  # fmt: skip
def test_values_that_live_over_epochs_are_kept(begun: str, text: str, new: str) -> None:
    whole = in_epochs(text).replace("for epoch", f"{begun}\nfor epoch", 1)
    found = convert(whole)
    assert all(each in found for each in new.split("|"))
    codes = {each.code for each in lint_text(found).findings}
    assert not codes & {"ER301", "ER302", "ER311"}


LINE = 'n = elasticrun.Variables(value=n, name="n")'


@pytest.mark.parametrize(
    ("begun", "text", "new"),
    [
        ("n = other = 0", "n += 1", (LINE, "n.value += 1")),
        ("n: int = 0", "n += 1", (LINE, "n.value += 1")),
        ("n = 0\nif f(): n = torch.load('a')['n']", "n += 1", (LINE, "n.value += 1")),
        (
            "n = 0\nif f():\n    state = torch.load('a')\n    n, m = divmod(state, 2)",
            "if epoch > n: f()",
            (f"{LINE}.value", "if epoch > n: f()"),
        ),
    ],
)
def test_values_of_a_checkpoint_of_its_own_are_kept(
    begun: str, text: str, new: tuple[str, str]
) -> None:
    found = convert(in_epochs(text).replace("for epoch", f"{begun}\nfor epoch", 1))
    assert f"{begun}\n{new[0]}\nfor epoch in" in found
    assert f"\n    {new[1]}\n" in found


@pytest.mark.parametrize(
    ("begun", "text"),
    [
        ("best = 0", "best = max(best, f())"),  # of what each replica has
        ("best = 0", "if f(): best += 1"),
        ("best = 0", "best = epoch\nprint(best)"),  # set before it is read
        ("best = 0", "print(f'{best=}')\nbest += 1"),
        ("best = 0", "best += 1\ndel best"),
        ("best = 0", "print(best)\nfor best in range(3): pass"),
        ("best = f()", "best += 1"),
        ("best = rank()", "best += 1"),
        ("best = []", "best += [1]"),
        ("for best in range(3): pass", "best += 1"),
        ("best = 0\nif f(): best = g()", "best += 1"),  # no checkpoint of its own
        ("if f():\n    best = 0", "best += 1"),
        ("best = 0", "try: f()\nexcept E: best += 1"),
        ("best = 0", "while f(): best += 1"),
        ("best = 0\ndef f(): return best", "best += 1"),
        ("best = 0\ndef f():\n    global best\n    best = 1", "best += 1"),
        ("best = 0", "for i, x in enumerate(loader, 1): best += i"),
        ("best = 0\nif f(): best = 1", "if epoch > best: f()"),
        ("best = 3", "f(best)"),
        ("best = None\nif f(): best = torch.load('a')", "f(best)"),  # a model?
        ("best = {}\nif f(): best = torch.load('a')", "f(best)"),
        ("if 2 > 1:\n    best = 0", "best += 1"),
        ("best = 0\nfor x in (1, 2): best = x", "best += 1"),
        ("if f(): best = torch.load('a')", "f(best)"),
        ("for x in y:\n    if f(): best = torch.load('a')", "best += 1"),
        *(
            (
                "best = 0",
                (
                    f"for x, y in loader:\n    if y.sum() > 0: {leaves}\n"
                    "    net(x).sum().backward()\n    best += 1"
                ),
            )
            for leaves in ("continue", "break")
        ),
        ("best = 0", "with torch.no_grad():\n    for x, y in valid: best += 1"),
        ("best = 0", "for x, y in loader:\n    if y.sum() > 0: best += 1"),
        ("best = 0", "import other\nbest += other.number"),
    ],
)
def test_values_are_left_that_may_differ_or_be_other_things(
    begun: str, text: str
) -> None:
    whole = in_epochs(text).replace("for epoch", f"{LOADER}{begun}\nfor epoch", 1)
    new = convert(whole)
    assert "Variables" not in new
    assert "elasticrun.remaining_epochs_until(9)" in new


def test_the_main_part_is_no_branch_that_loads_a_checkpoint() -> None:
    body = f"n, k, plan = 0, 3, Plan(optimizer)\nif f(): n = torch.load('a')\n{EPOCHS}"
    text = f"{HEAD}if __name__ == '__main__':\n    {indented(body)}    f(n, k, plan)\n"
    new = convert(text)
    assert LINE in new
    assert new.count("Variables") == 1
