"""Plain projects of several files: what each of them needs to become elastic."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_paths

DATA = """\
from torch.utils.data import DataLoader

def loaders(size):
    return DataLoader(range(100), size, shuffle=True), DataLoader(range(100), size)
"""
TRAINER = """\
import torch

class SimCLR:
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.best = model, optimizer, 0.0

    def fit(self, train, valid):
        for epoch in range(9):
            for x in train:
                self.model(x).mean().backward()
                self.optimizer.step()
            self.best = max(self.best, self.evaluate(valid))
            print(self.best)

    def evaluate(self, valid):
        total = 0
        for x in valid:
            total += self.model(x).sum().item()
        return total
"""
RUN = """\
import torch
from data import loaders
from trainer import SimCLR

torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
learner = SimCLR(model=model, optimizer=optimizer)
learner.fit(*loaders(8))
"""
NEEDED = {
    ("data.py", 4, "ER003"),  # Both loaders.
    ("run.py", 8, "ER003"),  # The model.
    ("trainer.py", 8, "ER003"),  # The epochs.
    ("trainer.py", 12, "ER301"),  # The best value.
    ("trainer.py", 18, "ER302"),  # The sum.
}
TEXTS = {"data.py": DATA, "trainer.py": TRAINER, "run.py": RUN}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in TEXTS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def found_in(paths: list[str]) -> set[tuple[str, int, str]]:
    """Return what is found, but for the missing imports of elasticrun."""
    found = lint_paths(map(Path, paths)).findings
    return {(e.path, e.line, e.code) for e in found if "is imported" not in e.message}


@pytest.mark.parametrize("paths", [["."], ["run.py", "trainer.py", "data.py"]])
def test_each_file_is_told_what_it_needs(project: Path, paths: list[str]) -> None:
    assert found_in(paths) == NEEDED


def test_files_that_were_not_asked_for_are_told_of_loaders(project: Path) -> None:
    assert found_in(["trainer.py", "run.py"]) == NEEDED
    assert {e for e in NEEDED if e[2] == "ER003"} <= found_in(["run.py"])
    (project / "train.py").write_text(TRAINER + RUN.replace("from trainer", "# from"))
    assert ("data.py", 4, "ER003") in found_in(["train.py"])


def test_a_script_may_import_several_files_that_train(project: Path) -> None:
    fit = "def fit(model, train):\n    for epoch in range(9):\n"
    (project / "more.py").write_text(
        f"import torch\n{fit}        for x in train: model(x).mean().backward()\n"
    )
    (project / "run.py").write_text(f"from more import fit\n{RUN}")
    assert {("more.py", 3, "ER003"), ("trainer.py", 8, "ER003")} <= found_in(["."])


def test_what_is_installed_is_not_converted(project: Path) -> None:
    (project / "site-packages").mkdir()
    (project / "trainer.py").rename(project / "site-packages" / "trainer.py")
    (project / "site-packages" / "run.py").write_text(RUN)
    assert not found_in(["site-packages/run.py"])


def test_what_many_files_import_has_no_script(project: Path) -> None:
    for number in range(9):
        (project / f"run{number}.py").write_text(RUN)
    assert not any(path.startswith("run") for path, *_ in found_in(["."]))


SCRIPT = """\
import torch
from lib import Trainer, loaders

def main():
    torch.manual_seed(0)
    Trainer(torch.nn.Linear(1, 1)).fit(*loaders(8))

main()
"""


@pytest.mark.parametrize("paths", [["train.py"], ["train.py", "lib"], ["."]])
@pytest.mark.parametrize("is_package", [False, True])
def test_a_script_may_train_and_make_all_in_files_that_it_imports(
    project: Path, paths: list[str], is_package: bool
) -> None:
    (project / "run.py").unlink()
    lib = project / "lib"
    lib.mkdir()
    for name in "data.py", "trainer.py":
        (project / name).rename(lib / name)
    made = "self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)"
    (lib / "trainer.py").write_text(
        TRAINER.replace("SimCLR", "Trainer")
        .replace("model, optimizer):", "model):")
        .replace("= model, optimizer, 0.0", f"= model, None, 0.0; {made}")
    )
    text = SCRIPT
    if is_package:
        exports = "from .data import loaders\nfrom .trainer import Trainer\n"
        (lib / "__init__.py").write_text(exports)
    else:
        imports = "from lib.trainer import Trainer\nfrom lib.data import loaders"
        text = SCRIPT.replace("from lib import Trainer, loaders", imports)
    (project / "train.py").write_text(text)
    found = {each for each in found_in(paths) if each[2] == "ER003"}
    needed = {("data.py", 4), ("trainer.py", 5), ("trainer.py", 8)}
    assert found == {(f"lib/{name}", line, "ER003") for name, line in needed}


@pytest.mark.parametrize("name", ["data.py", "run.py"])
def test_a_file_beside_one_that_does_not_train_is_left_alone(
    project: Path, name: str
) -> None:
    (project / "trainer.py").write_text("class SimCLR:\n    pass\n")
    assert not found_in([name])


def test_a_loop_over_a_generator_of_another_file_is_named_where_it_stands(
    project: Path,
) -> None:
    generator = "def logged(loader):\n    for x in loader:\n        yield x\n"
    (project / "logs.py").write_text(generator)
    loop = "for i, x in enumerate(logged(train)):\n    writer.add_scalar('x', x, i)\n"
    (project / "run.py").write_text(
        "import torch\nfrom elasticrun import AdaptiveDataLoader\n"
        "from torch.utils.tensorboard import SummaryWriter\nfrom logs import logged\n"
        f"train = AdaptiveDataLoader(range(9), 3)\nwriter = SummaryWriter()\n{loop}"
    )
    assert ("run.py", 7, "ER304") in found_in(["run.py", "logs.py"])
