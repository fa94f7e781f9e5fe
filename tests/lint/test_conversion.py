"""Scripts that are not elastic yet: what they are told, and the patch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from elasticrun.lint.__main__ import run
from elasticrun.lint.editing import converted
from elasticrun.lint.engine import lint_paths, lint_text
from elasticrun.lint.rules.conversion import edits_of
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


def convert(text: str) -> str:
    return converted(text, edits_of(ast.parse(text), text))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_what_is_certain_is_changed_and_every_other_byte_is_kept(ending: str) -> None:
    assert convert(PLAIN.replace("\n", ending)) == ELASTIC.replace("\n", ending)
    assert lint_text(ELASTIC).findings == []


def test_what_nothing_can_be_changed_of_is_said() -> None:
    text = "import torch\nwhile step < 9:\n    f(next(batch)).backward()\n"
    assert convert(text) == text
    [imports, loop] = lint_text(text).findings
    assert (imports.line, loop.line) == (1, 2)
    assert "remaining_steps_until" in loop.message


@pytest.mark.parametrize("name", PORTS)
def test_scripts_of_others_are_told_about_their_loops(name: str) -> None:
    text = side_of(diff_of(name), "-")
    result = lint_text(text)
    assert not result.problems
    said = [each.message for each in result.findings if each.code == "ER003"]
    assert any("elasticrun.remaining_" in each for each in said)


@pytest.mark.slow
def test_scripts_of_others_run_to_their_ends_with_the_patch(tmp_path: Path) -> None:
    texts = {name: convert(side_of(diff_of(name), "-")) for name in PORTS}
    assert sum("elasticrun" in text for text in texts.values()) >= 7
    runs = (Run(text, tmp_path / name) for name, text in texts.items())
    (ended,) = run_generation(run_each, 1, *runs)
    assert all(ended)


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


def test_a_patch_names_its_file_from_where_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "train.py"
    script.write_text(PLAIN)
    monkeypatch.chdir(tmp_path)
    run(["--diff", str(script)])
    assert capsys.readouterr().out.startswith("--- train.py\n+++ train.py\n")


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
