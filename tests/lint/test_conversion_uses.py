"""What a patch does with numbers of batches and sums, and all of it together."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from elasticrun.lint.editing import converted, patch
from elasticrun.lint.engine import lint_text
from elasticrun.lint.rules.conversion import edits_of
from elasticrun.testing import run_generation
from tests.lint.test_conversion_cases import EPOCHS, HEAD, convert
from tests.support.whole_scripts import Leave, Run, printed, run_each

LOADER = "valid = DataLoader(held_out, 64)\n"
SUMS = "sums = elasticrun.Accumulator()"
SHARE = " * loader.loss_weight / elasticrun.world_size()"
REAL = " * (loader.num_valid > 0)"
FLOAT = "criterion(net(x), y).item()"
CRITERION = "criterion = torch.nn.CrossEntropyLoss()\n"


def in_epochs(text: str) -> str:
    """Return a script that trains, and in each epoch does something else as well."""
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    return f"{HEAD}{CRITERION}{EPOCHS}{lines}"


def summed(value: str, begun: str = "s = 0", *, loader: str = "loader") -> str:
    return (
        f"{begun}\nfor x, y in {loader}:\n    net(x).sum().backward()\n"
        f"    s += {value}\nprint(s)\n"
    )


def counting(text: str) -> str:
    return text.replace("print", "    n += len(x)\nprint(n)\nprint")


def indented(text: str) -> str:
    return text.replace("\n", "\n    ")


# Numbers of batches.


@pytest.mark.parametrize(
    ("loop", "new"),
    [
        ("for i, x in enumerate(loader)", "for i, x in loader.enumerate()"),
        ("for i, x in enumerate(loader, 0)", "for i, x in loader.enumerate()"),
        ("for i, x in tqdm(enumerate(loader))", "for i, x in tqdm(loader.enumerate())"),
        *(
            (same, same)
            for same in (
                "for i, x in enumerate(tqdm(loader))",  # the bar would have no end
                "for i, x in enumerate(loader, 1)",
                "for i, x in enumerate(others)",
                "for i, x in enumerate(loader.dataset)",
            )
        ),
    ],
)
def test_batches_are_numbered_by_the_loader(loop: str, new: str) -> None:
    assert f"{new}: f(x)" in convert(in_epochs(f"{loop}: f(x)"))


@pytest.mark.parametrize(
    ("text", "is_changed"),
    [
        ("def f(loader):\n    for i, x in enumerate(loader): g(x)\nf(loader)\n", True),
        ("def f(given):\n    for i, x in enumerate(given): g(x)\nf(loader)\n", True),
        (
            "def f(given):\n    for i, x in enumerate(given): g(x)\nf(given=loader)\n",
            True,
        ),
        ("def f(given):\n    for i, x in enumerate(given): g(x)\nf([1])\n", False),
        ("def f(given):\n    for i, x in enumerate(given): g(x)\n", False),
        (
            (
                "def f(given):\n    for i, x in enumerate(given): g(x)\n"
                "f(loader); f(*others)\n"
            ),
            False,
        ),
        (
            (
                "def f(a, given):\n    for i, x in enumerate(given): g(x)\n"
                "f(*others, loader)\n"
            ),
            False,
        ),
        ("for i, x in enumerate(loader): g(x)\nloader = [1]\n", False),
        ("for loader in others:\n    for i, x in enumerate(loader): g(x)\n", False),
        (
            (
                "class A:\n    def __init__(self, given): self.given = given\n"
                "    def f(self):\n        for i, x in enumerate(self.given): g(x)\n"
                "a = A(loader)\n"
            ),
            True,
        ),
        (
            (
                "def made():\n    a = DataLoader(data)\n    return a, 1\n"
                "a, one = made()\nfor i, x in enumerate(a): g(x)\n"
            ),
            True,
        ),
        ("def f(): return f()\na = f()\nfor i, x in enumerate(a): g(x)\n", False),
        ("a = b\nb = a\nfor i, x in enumerate(a): g(x)\n", False),
    ],
)
def test_a_loader_is_known_by_all_that_its_name_is_given(
    text: str, is_changed: bool
) -> None:
    new = convert(f"{HEAD}{EPOCHS}{text}")
    assert (".enumerate()" in new) is is_changed
    assert "elasticrun.remaining_epochs_until(9)" in new


# Sums.


@pytest.mark.parametrize(
    ("value", "added"),
    [
        (FLOAT, f"{FLOAT}{SHARE}"),
        (f"{FLOAT} + 1.5 * {FLOAT}", f"({FLOAT} + 1.5 * {FLOAT}){SHARE}"),
        (f"({FLOAT})", f"({FLOAT}{SHARE})"),
        (f"-{FLOAT}", f"-{FLOAT}{SHARE}"),
        ("criterion(net(x), y).sum().item()", f"sum().item(){SHARE}"),
        ("net(x).mean().sum().item()", f"sum().item(){SHARE}"),
        (
            "torch.nn.functional.mse_loss(net(x), y, reduction='none').sum().item()",
            f".sum().item(){REAL}",
        ),
        ("float(net(x).mean())", f"float(net(x).mean()){SHARE}"),
        (f"{FLOAT} * len(x)", f"{FLOAT} * len(x){REAL}"),
        (f"{FLOAT} * x.size(0)", f"{FLOAT} * x.size(0){REAL}"),
        ("y.shape[0]", f"y.shape[0]{REAL}"),
        ("(net(x).argmax(1) == y).sum().item()", f"== y).sum().item(){REAL}"),
        ("int((net(x).argmax(1) == y).sum())", f"argmax(1) == y).sum()){REAL}"),
        ("net(x).sum().item() / len(x)", f"net(x).sum().item() / len(x){SHARE}"),
        ("1", f"1{SHARE}"),
        *(
            (same, "")
            for same in (
                "criterion(net(x), y)",  # a tensor
                "criterion(net(x), y).detach()",
                "f(x)",
                "compute_loss(net(x), y).sum().item()",
                "np.mean()",
                "len()",
                "other(net(x), y).item()",
                "(net(x).mean() + net(x)).sum().item()",
                "net(x).sum(1).item()",
                "net(x).max().item()",
                "(net(x).sum() ** 2).item()",
                "len(net(x).cpu())",
                f"{FLOAT} * (net(x) > 0).sum().item()",
                f"1 / {FLOAT}",
                f"{FLOAT} + len(x)",
                "0.5",
                "s",
            )
        ),
    ],
)
def test_a_sum_is_what_one_replica_would_have(value: str, added: str) -> None:
    text = in_epochs(summed(value))
    new = convert(text)
    if not added:
        assert "    s = 0\n    for x, y in loader:" in new
        assert f"        s += {value}\n    print(s)\n" in new
        return
    shown = 'round(sums["s"])' if value == "1" else 'sums["s"]'
    assert f"    {SUMS}\n    for x, y in loader:" in new
    assert f'        sums["s"] += {added}\n' in new or f"{added}\n" in new
    behind = f"    with sums.synchronized():\n        s = {shown}\n    print(s)\n"
    assert behind in new
    assert "ER302" not in {each.code for each in lint_text(new).findings}


@pytest.mark.parametrize(
    ("made", "is_mean"),
    [
        ("torch.nn.MSELoss()", True),
        ("torch.nn.MSELoss(reduction='sum')", False),
        ("torch.nn.MSELoss(reduction='none')", None),
        ("torch.nn.CrossEntropyLoss(weights)", None),
        ("torch.nn.CrossEntropyLoss(ignore_index=0)", None),
        ("theirs.Loss()", None),
    ],
)
def test_a_criterion_says_what_it_makes_of_a_batch(
    made: str, is_mean: bool | None
) -> None:
    new = convert(in_epochs(summed(FLOAT)).replace(CRITERION, f"criterion = {made}\n"))
    added: dict[bool | None, str] = {
        True: f"+= {FLOAT}{SHARE}\n",
        False: f"+= {FLOAT}{REAL}\n",
    }
    assert added.get(is_mean, f"    s += {FLOAT}\n") in new


@pytest.mark.parametrize(
    ("text", "new"),
    [
        (summed(FLOAT, "s = 0.0"), f'    {SUMS}\n|        s = sums["s"]\n'),
        (summed("len(x)", "s = 0.0"), '        s = float(sums["s"])\n'),
        (summed("1", "s = 0.0"), '        s = float(round(sums["s"]))\n'),
        (
            counting(summed(FLOAT, "s = n = 0")),
            f'    {SUMS}\n|        s = sums["s"]\n        n = sums["n"]\n',
        ),
        (
            counting(summed(FLOAT, "s = 0\nn = 0")),
            f"    {SUMS}\n    for x, y in",
        ),
        (summed(FLOAT, "s, t = 0, f()"), f"    s, t = 0, f()\n    {SUMS}\n"),
        (summed(FLOAT, "s = 0  # of all"), f"    {SUMS}  # of all\n"),
        (
            ("s = 0\nwith torch.no_grad():\n    for x, y in tqdm(valid):\n"
            "        s += (net(x) == y).sum().item()\nprint(s / len(valid.dataset))"),
            ("held_out, 64)\n"
            '|"s"] += (net(x) == y).sum().item() * (valid.num_valid > 0)\n'
            '        with sums.synchronized():\n            s = sums["s"]\n    print'),
        ),
    ],
)  # fmt: skip
def test_sums_begin_in_many_ways(text: str, new: str) -> None:
    whole = in_epochs(text).replace("criterion =", f"{LOADER}criterion =", 1)
    found = convert(whole)
    assert all(each in found for each in new.split("|"))
    assert "ER302" not in {each.code for each in lint_text(found).findings}
    assert "ER312" not in {each.code for each in lint_text(found).findings}


@pytest.mark.parametrize(
    "text",
    [
        summed(FLOAT, "s = 1"),
        summed(FLOAT, "s = f()"),
        summed(FLOAT, "s = 0\ns = 2"),
        summed(FLOAT, "s = 0\nif y: s = 2"),
        summed(FLOAT, "s = 0\nf(s)"),
        summed(FLOAT, "s: float = 0"),
        summed(FLOAT).replace("print(s)", "print()"),
        summed(FLOAT).replace("    s +=", "    print(s)\n    s +="),
        summed(FLOAT).replace("    s +=", "    if f(): s = 0\n    s +="),
        summed(FLOAT).replace("s +=", "s -="),
        summed(FLOAT).replace("print(s)", "else: print(s)\nprint(s)"),
        summed(FLOAT, loader="others"),
        (
            f"def f():\n    {indented(summed(FLOAT))}return s\n"
            "for x, y in loader:\n    f()"
        ),
        f"def f():\n    return s\n{summed(FLOAT)}",
        summed(FLOAT).replace(
            "    s +=", "    if f(): raise StopIteration(s)\n    s +="
        ),
        f"s = 0\nfor z in f():\n    {indented(summed(FLOAT)[6:])}",
    ],
)
def test_sums_are_left_where_they_may_be_something_else(text: str) -> None:
    new = convert(in_epochs(text))
    assert "Accumulator" not in new
    assert "elasticrun.remaining_epochs_until(9)" in new


# All together.


WHOLE = Path(__file__).with_name("after_patch") / "whole.py"


@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_lines_of_all_kinds_keep_their_bytes(newline: str) -> None:
    text = WHOLE.read_text().replace("\n", newline)
    edits = edits_of(ast.parse(text), text)
    new = converted(text, edits)
    assert new.replace(newline, "\n") == convert(WHOLE.read_text())
    assert new.count("\r") == new.count("\n") * (newline == "\r\n")
    assert "  # of all" in new
    assert lint_text(new).findings == []
    assert all(line[:1] in "+- @" for line in patch("a.py", text, edits).splitlines())


def test_a_script_that_only_others_can_make_elastic_is_left_alone() -> None:
    whole = in_epochs(f"{summed(FLOAT)}torch.save(net, 'a')")
    text = f"import torch.distributed\n{whole}"
    assert convert(text) == text
    text = whole.replace("net.parameters()", "groups")
    assert convert(text) == text


@pytest.mark.slow
@pytest.mark.parametrize(("script", "num_replicas"), [("whole", 2), ("uneven", 3)])
def test_sums_and_values_are_those_of_plain_torch_through_a_stop(
    script: str, num_replicas: int, tmp_path: Path
) -> None:
    text = WHOLE.with_stem(script).read_text()
    plain, calm, cut = (tmp_path / name for name in ("plain", "calm", "cut"))
    new = convert(text)
    stopped = Run(new, cut, Leave("stop", after=12))
    (ended,) = run_generation(run_each, 1, Run(text, plain), Run(new, calm), stopped)
    assert ended[2] is None
    run_generation(run_each, num_replicas, Run(new, cut))
    assert printed(cut) == printed(calm) == printed(plain) != []
