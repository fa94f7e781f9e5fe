"""Scripts as people write them, one thing changed: silent but for mistakes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_paths
from elasticrun.lint.finding import Finding
from tests.lint.mistakes import Mistake, read_mistakes

STYLES = Path(__file__).parent / "styles"
SCRIPTS = sorted(STYLES.rglob("*.py"))

MISTAKES = read_mistakes(STYLES / "mistakes.diff")

REWRITINGS = [
    ("flat.py", "in test_loader:", "in iter(test_loader):"),
    (
        "flat.py",
        "for data, target in test_loader:",
        "for _, (data, target) in enumerate(test_loader):",
    ),
    (
        "gan.py",
        "remaining_epochs_until as epochs_until",
        "remaining_epochs_until as turns",
    ),
    ("own_ddp.py", "for x, y in train:", "for _, (x, y) in enumerate(train):"),
    (
        "adaptdl_style.py",
        "import adaptdl.torch as adl",
        "from adaptdl import torch as adl",
    ),
    ("curriculum.py", "import elasticrun\n", "import elasticrun as er\n"),
    (
        "states.py",
        "        confusion.reset()\n        stopper.step(float(error))\n",
        "        finish(confusion, stopper, error)\n",
    ),
    (
        "two_modules/main.py",
        "        scheduler.step()\n",
        "        advance(scheduler)\n",
    ),
]
ADDED = {
    "states.py": "\n\ndef finish(confusion, stopper, error):\n    confusion.reset()\n"
    "    stopper.step(float(error))\n",
    "two_modules/main.py": "\n\ndef advance(scheduler):\n    scheduler.step()\n",
}


def lint_changed(
    tmp_path: Path, name: str, change: Callable[[str], str]
) -> list[Finding]:
    """Return what is found in a script that was changed."""
    path = STYLES / name
    for source in path.parent.glob("*.py") if "/" in name else [path]:
        text = source.read_text(encoding="utf-8")
        if source.name == Path(name).name:
            text = change(text)
        (tmp_path / source.name).write_text(text, encoding="utf-8")
    result = lint_paths([tmp_path / Path(name).name])
    assert not result.problems
    return result.findings


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_correct_script_has_no_findings(path: Path) -> None:
    result = lint_paths([path])
    assert not result.problems
    assert [(each.code, each.line, each.message) for each in result.findings] == []


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_found(tmp_path: Path, mistake: Mistake) -> None:
    found = lint_changed(tmp_path, f"{mistake.script}.py", mistake.plant)
    assert mistake.codes & {each.code for each in found}


@pytest.mark.parametrize(("name", "old", "new"), REWRITINGS)
def test_a_rewriting_changes_nothing(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    added = ADDED.get(name, "")

    def rewrite(text: str) -> str:
        assert old in text, old
        text = text.replace(old, new, 1)
        if "import elasticrun as er" in new:
            text = text.replace("elasticrun.", "er.")
        if " as turns" in new:
            text = text.replace("epochs_until(num_epochs)", "turns(num_epochs)")
        main = text.find("\nif __name__")
        at = main if added and main >= 0 else len(text)
        return text[:at] + added + text[at:]

    found = lint_changed(tmp_path, name, rewrite)
    assert [(each.code, each.line, each.message) for each in found] == []
