"""Plain scripts of many shapes: what a patch changes in each, and what it leaves."""

from __future__ import annotations

import ast
import shutil
import subprocess
from pathlib import Path

import pytest

from elasticrun.lint.editing import converted, patch
from elasticrun.lint.engine import lint_paths, lint_text
from elasticrun.lint.rules.conversion import edits_of

HEAD = """\
import torch
from torch.utils.data import DataLoader
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(data, 64, shuffle=True)
"""
FIT = "    for x in loader: net(x).sum().backward(); optimizer.step()\n"
EPOCHS = f"for epoch in range(9):\n{FIT}"
WRAP = "AdaptiveDataParallel(net, optimizer)"
SGD = "torch.optim.SGD(net.parameters(), lr=0.1)"


def convert(text: str) -> str:
    return converted(text, edits_of(ast.parse(text), text))


def said(text: str) -> str:
    found = lint_text(text)
    assert not found.problems
    return "\n".join(
        f"{each.line} {each.message}" for each in found.findings if each.code == "ER003"
    )


@pytest.mark.parametrize(
    ("loop", "new"),
    [
        ("range(n)", "elasticrun.remaining_epochs_until(n)"),
        ("range(0, n)", "elasticrun.remaining_epochs_until(n)"),
        ("range(1, n + 1)", "elasticrun.remaining_epochs_until(n, start=1)"),
        ("range(1, 1 + n)", "elasticrun.remaining_epochs_until(n, start=1)"),
        ("range(1, 9)", "elasticrun.remaining_epochs_until(8, start=1)"),
        ("range(1, n + 2)", "elasticrun.remaining_epochs_until(n + 2 - 1, start=1)"),
        (
            "range(1, a if b else c)",
            "elasticrun.remaining_epochs_until((a if b else c) - 1, start=1)",
        ),
        ("range(5, n)", "elasticrun.remaining_epochs_until(n - 5, start=5)"),
        (
            "range(begun, n)",
            "elasticrun.remaining_epochs_until(n - begun, start=begun)",
        ),
        ("tqdm(range(n), 'x')", "tqdm(elasticrun.remaining_epochs_until(n), 'x')"),
        ("range(\n    n\n)", "elasticrun.remaining_epochs_until(n)"),
        *(
            (same, same)
            for same in (
                "range(len(done), n)",
                "range(0.5, n)",
                "range(0, n, 2)",
                "range(*given)",
                "self.range()",
                "np.range(9)",
                "range(stop=9)",
                "range()",
                "trange(9)",
                "zip(range(9), rates)",
                "enumerate(range(9))",
                "reversed(range(9))",
            )
        ),
    ],
)  # fmt: skip
def test_a_loop_over_epochs(loop: str, new: str) -> None:
    text = f"{HEAD}for epoch in {loop}:\n{FIT}"
    assert f"\nfor epoch in {new}:\n{FIT}" in convert(text)
    assert "elasticrun.remaining_epochs_until" in said(text)


def test_a_loop_is_one_over_epochs_by_its_name_too() -> None:
    text = "for {} in range(9):\n    for x in given: net(x).backward()\n"
    for name, what in (("epoch", "epochs"), ("iEpoch", "epochs"), ("i", "steps")):
        new = convert(HEAD + text.format(name))
        assert f"in elasticrun.remaining_{what}_until(9)" in new


@pytest.mark.parametrize("begun", ["begun", "args.begun"])
def test_a_loop_begins_after_a_restart_where_it_did(begun: str) -> None:
    new = convert(f"{HEAD}for epoch in range({begun}, n):\n{FIT}")
    kept = f'{begun} = elasticrun.Variables(value={begun}, name="begun").value\n'
    until = f"elasticrun.remaining_epochs_until(n - {begun}, start={begun})"
    assert f"{kept}for epoch in {until}:\n{FIT}" in new
    assert not lint_text(new).findings


def test_where_a_loop_begins_is_kept_only_if_it_is_converted() -> None:
    text = f"{HEAD}for epoch in range(begun, n):\n{FIT}{EPOCHS}"
    assert "Variables" not in convert(text)


def test_steps_count_from_anything() -> None:
    step = "    net(draw()).sum().backward()\n    optimizer.step()\n"
    text = f"{HEAD}for i in {{}}:\n{step}"
    assert "in elasticrun.remaining_steps_until(9):" in convert(text.format("range(9)"))
    new = convert(text.format("range(1, n + 1)"))
    assert "in elasticrun.remaining_steps_until(n, start=1):" in new


INNER = "for i in range(5): net(x).sum().backward()"
RUNS = """\
def fit():
    model = Net()
    trains = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(9):
        for x in loader: model(x).sum().backward()
"""


@pytest.mark.parametrize(
    ("text", "unchanged", "message"),
    [
        (f"{HEAD}for x in loader:\n    {INNER}\n", INNER, ""),
        (f"{HEAD}def attack(x):\n    {INNER}\nfor x in loader: attack(x)\n", INNER, ""),
        (
            (
                f"{HEAD}def attack(x):\n    {INNER}\n"
                "for epoch in range(9):\n    for x in loader: attack(x)\n"
            ),
            INNER,
            "",
        ),
        (f"{HEAD}{RUNS}for fold in range(5): fit()\n", RUNS, "let each turn be a job"),
        (f"{HEAD}{RUNS}for fold in range(5): fit()\n", "range(5)", ""),
        (f"{HEAD}{RUNS}for cut in folds: fit()\n", RUNS, "let each turn be a job"),
        (f"{HEAD}{EPOCHS}{EPOCHS}", f"{EPOCHS}{EPOCHS}", "count on from one another"),
        (
            f"{HEAD}def fit():\n  {EPOCHS.replace(FIT, '  ' + FIT)}fit()\nfit()\n",
            "range(9)",
            "count on from one another",
        ),
        (
            (
                f"{HEAD}class Agent:\n  def fit(self):\n   for i in range(5):\n"
                "     net(draw()).sum().backward()\nfor e in range(9): made().fit()\n"
            ),
            "range(5)",
            "count on from one another",
        ),
        (
            (
                f"{HEAD}class Layer:\n  def train(self, x):\n   for i in range(5):\n"
                "     net(x).sum().backward()\nfor layer in layers: layer.train(x)\n"
            ),
            "range(5)",
            "count on from one another",
        ),
    ],
)
def test_loops_in_loops(text: str, unchanged: str, message: str) -> None:
    assert unchanged in convert(text)
    assert message in said(text)


@pytest.mark.parametrize(
    "text",
    [
        (
            "def fit(): f().backward()\nfor epoch in range(9):\n"
            "    for x in loader: print(net(x))\n"
        ),
        "for i in range(num_batches): net(x)\n",
        (
            "def fit():\n    for x in loader: net(x).sum().backward()\n"
            "class Meter:\n    def fit(self): pass\nmeter = Meter()\n"
            "for i in range(9): meter.fit()\n"
        ),
        (
            "class Trainer:\n    def update(self): net(x).sum().backward()\n"
            "class Meter:\n    def update(self): pass\n"
            "    def all(self):\n        for i in range(9): self.update()\n"
        ),
    ],
)
def test_no_loop_that_does_not_train_is_changed(text: str) -> None:
    assert "range(9)" in convert(HEAD + text) or "num_batches" in convert(HEAD + text)
    assert "remaining_" not in said(HEAD + text)


def test_a_loop_over_numbers_of_batches_is_one_over_steps() -> None:
    step = "    net(draw()).sum().backward()\n"
    for number in ("num_batches", "len(train_loader)"):
        text = f"{HEAD}for i in range({number}):\n{step}"
        assert f"in elasticrun.remaining_steps_until({number}):" in convert(text)


def test_a_training_in_another_file_is_asked_about() -> None:
    text = f"{HEAD}for epoch in range(9): train_one_epoch(net, loader)\n"
    new = convert(text)
    assert f"net = elasticrun.{WRAP}" in new
    assert "= DataLoader(data" in new
    assert "in range(9)" in new
    assert "if this trains, a restart would begin with the first of" in said(text)
    assert "where it trains, loop over it with `for`" in said(text)


def test_methods_are_found_through_self_and_known_classes() -> None:
    text = (
        f"{HEAD}class Base:\n    def run(self):\n"
        "        for epoch in range(9): self.turn()\n"
        "class Trainer(Base):\n    def turn(self):\n    "
        f"{FIT}Trainer().run()\n"
    )
    assert "for epoch in elasticrun.remaining_epochs_until(9)" in convert(text)


@pytest.mark.parametrize(
    ("text", "new"),
    [
        (
            "import torch\nx = 1\nimport os\n",
            "import torch\nimport elasticrun\nx = 1\nimport os\n",
        ),
        (
            '"""Of\n2."""\nfrom __future__ import annotations\nx = 1\nimport torch\n',
            '"""Of\n2."""\nfrom __future__ import annotations\nimport elasticrun\n',
        ),
        ('"""Of 2."""\nif x:\n    import torch\n', '"""Of 2."""\nimport elasticrun\n'),
        ("# Digits\nx = 1\nimport torch\n", "# Digits\nimport elasticrun\nx = 1\n"),
        ("import os; import torch; x = [\n]\n", "import elasticrun\nimport os; import"),
    ],
)  # fmt: skip
def test_where_elasticrun_is_imported(text: str, new: str) -> None:
    assert convert(text + HEAD + EPOCHS).startswith(new)


@pytest.mark.parametrize(
    ("imports", "called"),
    [
        ("from torch.utils.data import DataLoader as Loads", "Loads"),
        ("from torch.utils import data", "data.DataLoader"),
        ("import torch.utils.data as tud", "tud.DataLoader"),
        ("import torch.utils.data", "torch.utils.data.DataLoader"),
    ],
)
def test_loaders_of_torch_are_known_by_their_imports(imports: str, called: str) -> None:
    text = f"{imports}\nx = {called}(data, 64, True, sampler=None, **options)\n"
    assert "\nx = elasticrun.AdaptiveDataLoader(data, 64, True, s" in convert(
        text + RUN
    )


RUN = f"import torch\nnet = Net()\nopt = {SGD}\n{EPOCHS}"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("from theirs import DataLoader\nloader = DataLoader(data)", ""),
        ("loader = DataLoader(data, 8, True, None)", "by name"),
        ("loader = DataLoader(*given)", "by name"),
        ("loader = DataLoader(data, batch_size=None)", "give it a batch_size"),
        ("loader = DataLoader(data, sampler=RandomSampler(data))", "leave sampler="),
        (
            "loader = DataLoader(data, sampler=WeightedRandomSampler(w, 9))",
            "elasticrun.WeightedDraws",
        ),
        ("loader = DataLoader(data, batch_sampler=batches)", "a batch's number to its"),
        ("o = {'sampler': RandomSampler(data)}\nloader = DataLoader(data, **o)", "**o"),
        ("loader = DataLoader(data)\nx = next(iter(loader))", "as in line 4"),
        ("loader = DataLoader(data)\nfor x in zip(loader, b): pass", "as in line 4"),
        ("x = iter(DataLoader(data))", "as in line 3"),
        ("train = DataLoader(data)\nfor x in zip(train, b): pass", "as in line 4"),
        (
            "def f(loader):\n    while 1: yield from loader\nx = f(DataLoader(data))",
            "as in line 4",
        ),
        (
            "def f(loader):\n    for x in loader: yield x\nx = f(DataLoader(data))",
            "as in line 4",
        ),
        ("loader, net = made.prepare(DataLoader(data), net)", "as in line 3"),
        (
            "for epoch in range(9):\n    loader = DataLoader(data)\n" + FIT,
            "make it before the loop",
        ),
    ],
)  # fmt: skip
def test_loaders_are_not_changed_where_that_may_be_wrong(
    line: str, message: str
) -> None:
    head = "import torch\nfrom torch.utils.data import DataLoader\n"
    text = f"{head}{line}\n{RUN}"
    assert "AdaptiveDataLoader(" not in convert(text)
    assert message in said(text)
    assert bool(message) == ("AdaptiveDataLoader`, whose" in said(text))


def test_what_is_named_like_data_is_no_loader_that_is_asked() -> None:
    new = convert(f"{HEAD}hits = zip(x_test, y_test)\n{EPOCHS}")
    assert "loader = elasticrun.AdaptiveDataLoader(data" in new


def test_loops_are_not_changed_without_the_model_that_they_train() -> None:
    text = f"import torch\n{EPOCHS}"
    assert convert(text) == text
    assert "remaining_epochs_until(9)" in said(text)


def test_a_loop_over_batches_alone_is_enough() -> None:
    text = f"{HEAD}{FIT[4:]}"
    assert "loader = elasticrun.AdaptiveDataLoader(data" in convert(text)
    assert f"net = elasticrun.{WRAP}" in convert(text)


@pytest.mark.parametrize(
    "text",
    [
        RUN,
        RUN.removesuffix("\n"),
        RUN.replace("\n", "\r\n"),
        RUN.replace("net = Net()", "\x0c\nname = 'a\x0bb\u2028é'; net = Net()"),
        f"{RUN}x = [\n]",
        (
            f"import torch\ndef fit():\n  {EPOCHS.replace(FIT, '  ' + FIT)}\n"
            f"net = Net()\nopt = {SGD}"
        ),
    ],
)
@pytest.mark.parametrize("command", [["git", "apply", "-p0"], ["patch", "-p0", "-s"]])
def test_patches_apply(text: str, command: list[str], tmp_path: Path) -> None:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    script = tmp_path / "my train.py"
    script.write_bytes(text.encode())
    edits = edits_of(ast.parse(text), text)
    ast.parse(converted(text, edits))
    given = patch("my train.py", text, edits).encode()
    subprocess.run(command, cwd=tmp_path, input=given, check=True, capture_output=True)
    assert script.read_bytes() == converted(text, edits).encode() != text.encode()


def test_findings_show_the_lines_of_the_author() -> None:
    text = (
        f"{HEAD}best = 0.0\nfor epoch in range(9):\n{FIT}    best = max(best, f())\n"
        "    print(best)\n"
    )
    found = lint_text(text).findings
    lines = text.splitlines()
    assert {each.code for each in found} > {"ER003"}
    assert all(each.source == lines[each.line - 1] for each in found)


def test_one_loop_is_one_finding() -> None:
    step = "    optimizer.zero_grad(); net(x).sum().backward(); optimizer.step()\n"
    found = lint_text(f"{HEAD}for i in count(1):\n{step}").findings
    assert [each.code for each in found if each.line == 6] == ["ER003"]


def test_files_that_cannot_be_looked_through_do_not_end_it(tmp_path: Path) -> None:
    deep = "a" + ".b" * 990
    texts = {
        "a_syntax.py": "import torch\nprint 1\n",
        "b_depth.py": f"import torch\nloader = {deep}\n{EPOCHS}",
        "c_good.py": HEAD + EPOCHS,
        "d_other.py": "print 1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    result = lint_paths([tmp_path])
    assert {Path(each.path).name for each in result.findings} >= {"c_good.py"}
    problems = {Path(each.path).name: each.message for each in result.problems}
    assert "cannot be parsed" in problems.pop("a_syntax.py")
    assert "nested too deep" in problems.pop("b_depth.py")
    assert not problems


def test_a_folder_without_init_is_the_authors_own(tmp_path: Path) -> None:
    folder = tmp_path / "digits"
    folder.mkdir()
    (folder / "loops.py").write_text("import elasticrun\n")
    train = folder / "train.py"
    train.write_text(f"from digits.loops import fit\n{HEAD}{EPOCHS}")
    assert not [e for e in lint_paths([train]).findings if e.code == "ER003"]
