"""What a patch does beside loops, loaders and models: numbers, sums, values, files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from elasticrun.lint.editing import converted, patch
from elasticrun.lint.engine import lint_text
from elasticrun.lint.rules.conversion import edits_of
from elasticrun.testing import run_generation
from tests.lint.test_conversion_cases import EPOCHS, FIT, HEAD, convert, said
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


# Values.


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


# Files.


RANK = "if elasticrun.rank() == 0:\n"


@pytest.mark.parametrize(
    ("text", "new"),
    [
        (
            "torch.save(net.state_dict(), f'{epoch}.pt')",
            f"    {RANK}        torch.save(net.state_dict(), f'{{epoch}}.pt')\n",
        ),
        (
            "torch.save(net, 'a')\n# And now\ntorch.save(x.cpu(),\n  'b')\nf()",
            (
                f"    {RANK}        torch.save(net, 'a')\n    # And now\n"
                "        torch.save(x.cpu(),\n          'b')\n    f()\n"
            ),
        ),
        (
            "torch.save({'a': net.sample(4)}, f'{epoch}')  # now\ntorch.save(net, 'a')",
            (
                f"    saved = {{'a': net.sample(4)}}\n    {RANK}"
                "        torch.save(saved, f'{epoch}')  # now\n"
                "        torch.save(net, 'a')\n"
            ),
        ),
        (
            "torch.save(net, 'a')\ntorch.save(net.sample(4), 'b')",
            (
                f"    {RANK}        torch.save(net, 'a')\n    saved = net.sample(4)\n"
                f"    {RANK}        torch.save(saved, 'b')\n"
            ),
        ),
        (
            "if x: pass\nelse:\n\ttorch.save({'a': [1]}, 'a')  # all",
            f"    \t{RANK}    \t    torch.save({{'a': [1]}}, 'a')  # all\n",
        ),
        (
            (
                "import json\nwith open('a', 'w') as file:\n\n    json.dump({}, file)\n"
                "    file.write(f'{x}')"
            ),
            (
                f"    {RANK}        with open('a', 'w') as file:\n    \n"
                "            json.dump({}, file)\n            file.write(f'{x}')\n"
            ),
        ),
    ],
)
def test_files_are_written_by_one_replica(text: str, new: str) -> None:
    found = convert(in_epochs(text))
    assert new in found
    assert "ER403" not in {each.code for each in lint_text(found).findings}


@pytest.mark.parametrize(
    "text",
    [
        "torch.save(net, f())",
        "torch.save(await_(a := f()), 'a')",
        "torch.save((a := f), 'a')",
        "if x: torch.save(net, 'a')",
        "f(); torch.save(net, 'a')",
        "torch.save({'a': '''\n'''}, 'a')",
        "kept = torch.save(net, 'a')",
        "theirs.save(net, 'a')",
        "torch.save(net, 'a')\nnet = torch.load('a')",
        "state = torch.load('a')\ntorch.save(net, 'a')",  # of the last epoch
        "def f(): torch.load('a')\ntorch.save(net, 'a')",
        "def f(): torch.load('a')\nf()\ntorch.save(net, 'a')",
        "with open('a', 'a') as file: file.write('')",
        "with open('a', 'w') as file:\n    x = 1",
        "with open('a', 'wb') as file:\n    x = 1\n    torch.save(net, file)",
        "with open('a', 'w') as file:\n    file.write(next(rows))",
    ],
)
def test_files_are_left_that_other_replicas_may_need(text: str) -> None:
    assert "rank()" not in convert(in_epochs(text))


def test_a_file_may_be_read_before_the_training() -> None:
    write = "def write():\n    torch.save(net, 'a')\n"
    text = f"{write}def read(): return torch.load('a')\nprint(read())\n{EPOCHS}"
    assert RANK in convert(f"{HEAD}{text}    write()\n")
    assert RANK not in convert(f"{HEAD}{text}    write()\nread()\n")
    never = text.replace("print(read())", "")
    assert RANK not in convert(f"{HEAD}{never}    write()\n")
    assert RANK not in convert(f"{HEAD}{text}    read()\n    write()\n")


# Loops that count by hand.


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
