"""Clean scripts with one thing changed: a mistake is found, a rewriting is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_paths
from elasticrun.lint.finding import Finding

CLEAN = Path(__file__).parent / "clean"
SCRIPTS = sorted(CLEAN.rglob("*.py"))

# Of a script: the text to replace, what stands there instead, and what is found.
MISTAKES = [
    (
        "flat.py",
        "    model.eval()\n",
        "    model.eval()\n    scheduler.step()\n",
        "ER101",
    ),
    (
        "flat.py",
        "    model.train()\n",
        "    scheduler.step()\n",
        "ER101",
    ),
    (
        "trainer.py",
        "    self.train_epoch(epoch)\n",
        "    self.train_epoch(epoch)\n            self.scheduler.step()\n",
        "ER101",
    ),
    (
        "trainer.py",
        "        self.model.eval()\n",
        "        self.model.eval()\n        self.progress.bad_epochs += 1\n",
        "ER102",
    ),
    (
        "trainer.py",
        "        self.model.train()\n",
        ("        self.model.train()\n        self.progress.history.append(epoch)\n"),
        "ER103",
    ),
    (
        "trainer.py",
        "        self.model.eval()\n",
        ("        self.model.eval()\n        self.ema.update_parameters(self.net)\n"),
        "ER107",
    ),
    (
        "two_modules/main.py",
        "        accuracy = evaluate",
        "        scheduler.step()\n        accuracy = evaluate",
        "ER101",
    ),
    (
        "phases.py",
        '            if phase == "val":\n                epoch_acc',
        (
            '            if phase == "train":\n                scheduler.step()\n'
            '            if phase == "val":\n                epoch_acc'
        ),
        "ER101",
    ),
    (
        "phases.py",
        "        scheduler.step()\n    return",
        "            scheduler.step()\n    return",
        "ER101",
    ),
    (
        "language_model.py",
        "        bar.close()\n",
        (
            '        bar.close()\n        with open("x.csv", "a") as file:\n'
            '            file.write("x")\n'
        ),
        "ER104",
    ),
    (
        "imagenet.py",
        'param_group["lr"] = lr',
        'param_group["lr"] *= 0.99',
        "ER108",
    ),
    (
        "wrappers.py",
        "        with evaluating(model)",
        "        schedule.step()\n        with evaluating(model)",
        "ER101",
    ),
    (
        "states.py",
        "        for x, y in valid:\n",
        "        stopper.step(0.5)\n        for x, y in valid:\n",
        "ER102",
    ),
    (
        "accumulator.py",
        "        for x, y in valid:\n",
        "        requests.post(hook, timeout=1)\n        for x, y in valid:\n",
        "ER110",
    ),
    (
        "accumulator.py",
        "        for x, y in valid:\n",
        "        scheduler.step(1.0)\n        for x, y in valid:\n",
        "ER101",
    ),
    (
        "callbacks.py",
        (
            "    def on_epoch_begin(self, epoch):\n        pass\n\n"
            "    def on_epoch_end(self, epoch, metrics):\n        pass\n\n\n"
            "class Logger"
        ),
        (
            "    def on_epoch_begin(self, epoch):\n"
            "        self.scheduler.step()\n\n"
            "    def on_epoch_end(self, epoch, metrics):\n        pass\n\n\n"
            "class Logger"
        ),
        "ER101",
    ),
    (
        "callbacks.py",
        "    def on_epoch_end(self, epoch, metrics):\n        self.scheduler",
        "    def on_epoch_begin(self, epoch):\n        self.scheduler",
        "ER101",
    ),
    (
        "adaptdl_style.py",
        "        valid(epoch)\n        lr_scheduler.step()\n",
        "        lr_scheduler.step()\n        valid(epoch)\n",
        "ER101",
    ),
    (
        "contrastive.py",
        "        for x, y in loader:\n            net.update_key()\n",
        "        net.update_key()\n        for x, y in loader:\n",
        "ER107",
    ),
    (
        "trainer.py",
        "scaler=self.scaler, ema",
        "ema",
        "ER306",
    ),
    (
        "trainer.py",
        ", ema=self.ema)",
        ")",
        "ER306",
    ),
    (
        "flat.py",
        "(net, optimizer, scheduler)",
        "(net, optimizer)",
        "ER306",
    ),
    (
        "flat.py",
        "(net, optimizer, scheduler)",
        "(net)",
        "ER306",
    ),
    (
        "own_ddp.py",
        ", optimizer=optimizer)",
        ")",
        "ER306",
    ),
    (
        "own_ddp.py",
        "model=net, ",
        "",
        "ER306",
    ),
    (
        "gan.py",
        "net_d=net_d, ",
        "",
        "ER306",
    ),
    (
        "gan.py",
        ", opt_d=opt_d",
        "",
        "ER306",
    ),
    (
        "callbacks.py",
        ", scheduler=scheduler)",
        ")",
        "ER306",
    ),
    (
        "two_modules/main.py",
        "(net, optimizer, scheduler)\n    train_set",
        "(net, optimizer)\n    train_set",
        "ER306",
    ),
    (
        "states.py",
        "        fields = [self.best, self.bad_epochs,",
        "        fields = [self.best,",
        "ER303",
    ),
    (
        "states.py",
        "self.best, self.bad_epochs, self.should_stop = json",
        "self.best, _, self.should_stop = json",
        "ER303",
    ),
    (
        "flat.py",
        "score = Variables(correct=0, best=0.0)",
        (
            "from types import SimpleNamespace\n"
            "score = SimpleNamespace(correct=0, best=0.0)"
        ),
        "ER301",
    ),
    (
        "trainer.py",
        "    torch.manual_seed(0)\n",
        "",
        "ER501",
    ),
    (
        "trainer.py",
        "manual_seed(0)",
        "manual_seed(int(time.time()))",
        "ER502",
    ),
    (
        "curriculum.py",
        "until(TOTAL)",
        "until(WARMUP)",
        "ER206",
    ),
    (
        "folds.py",
        "EPOCHS * (fold + 1)",
        "EPOCHS",
        "ER206",
    ),
    (
        "language_model.py",
        "in train.enumerate():",
        "in enumerate(train):",
        "ER304",
    ),
    (
        "own_ddp.py",
        "for epoch in remaining_epochs_until(5):",
        "for epoch in range(5):",
        "ER002",
    ),
    (
        "flat.py",
        "    with torch.no_grad():\n        for data",
        "    if rank() == 0:\n        for data",
        "ER401",
    ),
    (
        "curriculum.py",
        (
            "except RuntimeError as error:\n"
            '            if "out of memory" in str(error):\n'
            "                torch.cuda.empty_cache()\n            raise\n"
        ),
        "except BaseException:\n            print('stopped')\n",
        "ER210",
    ),
]

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
    tmp_path: Path, name: str, old: str, new: str, added: str = ""
) -> list[Finding]:
    """Return what is found in a clean script with one text replaced by another."""
    for source in (CLEAN / name).parent.glob("*.py") if "/" in name else [CLEAN / name]:
        text = source.read_text(encoding="utf-8")
        if source.name == Path(name).name:
            assert old in text, old
            text = text.replace(old, new, 1)
            if "import elasticrun as er" in new:
                text = text.replace("elasticrun.", "er.")
            if " as turns" in new:
                text = text.replace("epochs_until(num_epochs)", "turns(num_epochs)")
            main = text.find("\nif __name__")
            at = main if added and main >= 0 else len(text)
            text = text[:at] + added + text[at:]
        (tmp_path / source.name).write_text(text, encoding="utf-8")
    result = lint_paths([tmp_path / Path(name).name])
    assert not result.problems
    return result.findings


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_clean_scripts_have_no_findings(path: Path) -> None:
    result = lint_paths([path])
    assert not result.problems
    assert [(each.code, each.line, each.message) for each in result.findings] == []


@pytest.mark.parametrize(("name", "old", "new", "code"), MISTAKES)
def test_a_mistake_is_found(
    tmp_path: Path, name: str, old: str, new: str, code: str
) -> None:
    codes = {each.code for each in lint_changed(tmp_path, name, old, new)}
    assert code in codes


@pytest.mark.parametrize(("name", "old", "new"), REWRITINGS)
def test_a_rewriting_changes_nothing(
    tmp_path: Path, name: str, old: str, new: str
) -> None:
    found = lint_changed(tmp_path, name, old, new, ADDED.get(name, ""))
    assert [(each.code, each.line, each.message) for each in found] == []
