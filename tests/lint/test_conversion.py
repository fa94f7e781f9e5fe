"""Scripts that are not elastic yet: what they are told, and the patch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_paths, lint_text
from elasticrun.lint.rules.conversion import converted, edits_of
from elasticrun.testing import run_generation
from tests.docs.test_ports import PORTS, diff_of, side_of
from tests.support.whole_scripts import Leave, Run, printed, run_each

PLAIN = """\
import torch
from torch.utils.data import DataLoader as Unused
from torch.utils import data

torch.manual_seed(0)
x = torch.randn(60, 4)
größe, net = 6, torch.nn.Linear(4, 1); train = data.DataLoader(x, größe, shuffle=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)  # of all
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for epoch in range(3):
    for batch in train:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    scheduler.step()
print([round(float(each), 6) for each in net.weight.flatten()])"""
CHANGES = {
    "import data\n": "import data\nimport elasticrun\n",
    "data.DataLoader(": "elasticrun.AdaptiveDataLoader(",
    "(optimizer, 1)\n": "(optimizer, 1)\n"
    "net = elasticrun.AdaptiveDataParallel(net, optimizer, scheduler)\n",
    "range(3)": "elasticrun.remaining_epochs_until(3)",
}
ELASTIC = PLAIN
for old, new in CHANGES.items():
    ELASTIC = ELASTIC.replace(old, new)


def convert(text: str, *, adds_lines: bool = True) -> str:
    return converted(text, edits_of(ast.parse(text)), adds_lines=adds_lines)


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_what_is_certain_is_changed_and_every_other_byte_is_kept(ending: str) -> None:
    assert convert(PLAIN.replace("\n", ending)) == ELASTIC.replace("\n", ending)
    same = convert(PLAIN, adds_lines=False)
    assert len(same.splitlines()) == len(PLAIN.splitlines())
    for text in (same, ELASTIC):
        assert lint_text(text).findings == []


@pytest.mark.parametrize(
    ("loop", "new"),
    [
        ("range(n)", "elasticrun.remaining_epochs_until(n)"),
        ("tqdm(range(0, n))", "tqdm(elasticrun.remaining_epochs_until(n))"),
        ("range(1, n + 1)", "elasticrun.remaining_epochs_until(n, start=1)"),
        ("range(1, 9)", "elasticrun.remaining_epochs_until(9 - 1, start=1)"),
        ("range(begun, n)", "elasticrun.remaining_epochs_until(n)"),
        ("range(5, n)", "range(5, n)"),
        ("range(0, n, 2)", "range(0, n, 2)"),
        ("count()", "count()"),
    ],
)
@pytest.mark.parametrize("body", ["for x in loader: pass", "net.fit()"])
def test_loops_over_epochs(loop: str, new: str, body: str) -> None:
    head = "import torch\ndef fit(self):\n    for x in enumerate(loader): f(x)\n"
    text = f"{head}for e in {loop}:\n    {body}\n"
    findings = [each.line for each in lint_text(text).findings if each.code == "ER003"]
    assert 4 in findings
    assert f"for e in {new}:\n    {body}\n" in convert(text)


def test_loops_over_steps() -> None:
    step = "    f(next(batch)).backward()\n"
    assert "in elasticrun.remaining_steps_until(9):" in convert(
        f"import torch\nfor step in range(9):\n{step}"
    )
    text = f"import torch\nwhile step < 9:\n{step}"
    assert convert(text) == text.replace("torch\n", "torch\nimport elasticrun\n")
    [imports, loop] = lint_text(text).findings
    assert (imports.line, loop.line) == (1, 2)
    assert "remaining_steps_until" in loop.message


def test_models_with_several_optimizers_and_several_models() -> None:
    made = [f"o{n} = torch.optim.Adam({m}.parameters())" for n, m in enumerate("aba")]
    text = "\n".join(
        ["import torch", *made, "for e in range(2):", "  for x in loader: f(x)"]
    )
    new = convert(text).splitlines()
    assert 'b = elasticrun.AdaptiveDataParallel(b, o1, name="b")' in new
    assert "a = elasticrun.AdaptiveDataParallel(a, [o0, o2])" in new


def test_what_cannot_be_changed_is_said() -> None:
    text = (
        "import torch\nnet = DDP(net)\n"
        "loader = DataLoader(data, 8, sampler=DistributedSampler(data))\n"
        "for e in range(9):\n    for x in loader: f(x)\n"
    )
    said = "\n".join(each.message for each in lint_text(text).findings)
    assert "give it the bare module" in said
    assert "leave sampler= out" in said


@pytest.mark.parametrize("name", PORTS)
def test_scripts_of_others_are_told_about_their_loops(name: str) -> None:
    text = side_of(diff_of(name), "-")
    result = lint_text(text)
    assert not result.problems
    said = [each.message for each in result.findings if each.code == "ER003"]
    assert any("elasticrun.remaining_" in each for each in said)
    compile(convert(text), name, "exec")


def test_nothing_is_said_where_something_is_elastic(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    assert {each.code for each in lint_paths([tmp_path]).findings} == {"ER003"}
    (tmp_path / "elastic.py").write_text(ELASTIC)
    assert lint_paths([tmp_path]).findings == []
    assert lint_text(PLAIN.replace("torch", "chainer")).findings == []
    assert lint_text("import torch\nfor i in range(9):\n    print(i)\n").findings == []


def test_the_patch_makes_a_script_elastic(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"{PLAIN}\n")
    command = [sys.executable, "-m", "elasticrun", "lint", "--diff", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "train.py:10:14: ER003 " in done.stderr
    subprocess.run(
        ["git", "apply", "-p0"], cwd=tmp_path, input=done.stdout, text=True, check=True
    )
    assert (tmp_path / "train.py").read_text() == f"{ELASTIC}\n"


@pytest.mark.slow
def test_a_converted_script_goes_on_exactly(tmp_path: Path) -> None:
    calm, cut = tmp_path / "calm", tmp_path / "cut"
    plain = Run(PLAIN, tmp_path / "plain")
    runs = (
        Run(ELASTIC, calm),
        Run(ELASTIC, cut, Leave("stop", after=14)),
        Run(ELASTIC, cut),
    )
    ((_, _, stopped, _),) = run_generation(run_each, 1, plain, *runs)
    assert stopped is None
    assert printed(cut) == printed(calm) != []
