"""Scripts that are not elastic yet: what they are told to write, line by line."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.lint.engine import lint_paths, lint_text
from tests.docs.documents import side_of
from tests.docs.test_ports import PORTS, diff_of

PLAIN = """\
import torch
from torch.utils import data

torch.manual_seed(0)
x = torch.randn(60, 4)
größe, net = 6, torch.nn.Linear(4, 1); train = data.DataLoader(x, größe, shuffle=True)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
for epoch in range(3):
    for batch in train:
        optimizer.zero_grad()
        net(batch).square().mean().backward()
        optimizer.step()
    scheduler.step()
"""
CHANGES = {
    "data.DataLoader": "elasticrun.AdaptiveDataLoader",
    "range(3)": "elasticrun.remaining_epochs_until(3)",
    "(optimizer, 1)\n": "(optimizer, 1)\n"
    "net = elasticrun.AdaptiveDataParallel(net, optimizer, scheduler)\n",
    "import torch\n": "import torch\nimport elasticrun\n",
}
HEAD = """\
import torch
from torch.utils.data import DataLoader
net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
loader = DataLoader(data, 64, shuffle=True)
"""
FIT = "    for x in loader: net(x).sum().backward(); optimizer.step()\n"
EPOCHS = f"for epoch in range(9):\n{FIT}"
STEP = "    net(draw()).sum().backward()\n    optimizer.step()\n"
SGD = "torch.optim.SGD(net.parameters(), lr=0.1)"
PLAN = "torch.optim.lr_scheduler.StepLR(opt, 1)"


def said(text: str) -> str:
    found = lint_text(text)
    assert not found.problems
    return "\n".join(
        f"{each.line} {each.message}: {each.help}"
        for each in found.findings
        if each.code == "ER003"
    )


def test_each_line_is_told_what_to_write() -> None:
    elastic = PLAIN
    for old, new in CHANGES.items():
        assert f"`{new.splitlines()[-1]}`" in said(PLAIN)
        elastic = elastic.replace(old, new)
    assert [line.split()[0] for line in said(PLAIN).splitlines()] == list("1689")
    assert lint_text(elastic).findings == []


@pytest.mark.parametrize("name", PORTS)
def test_scripts_of_others_are_told_about_their_loops(name: str) -> None:
    text = side_of(diff_of(name), "-")
    assert "elasticrun.remaining_" in said(text)
    assert "elasticrun.AdaptiveDataParallel" in said(text)


def test_nothing_is_said_where_something_is_elastic(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(PLAIN)
    assert {each.code for each in lint_paths([tmp_path]).findings} == {"ER003"}
    (tmp_path / "elastic.py").write_text("import elasticrun\n")
    assert lint_paths([tmp_path]).findings == []
    assert lint_text(PLAIN.replace("torch", "chainer")).findings == []
    assert lint_text("import torch\nfor i in range(9):\n    print(i)\n").findings == []


def test_more_is_found_as_if_the_changes_were_made() -> None:
    text = (
        f"{HEAD}i = 0\nwhile i < 9:\n{FIT}    i += 1\n    best = max(best, f())\n"
        "    print(best)\n"
    )
    found = lint_text(text).findings
    lines = text.splitlines()
    assert {each.code for each in found} == {"ER003", "ER301"}
    assert all(each.source == lines[each.line - 1] for each in found)


def test_one_loop_is_one_finding() -> None:
    found = lint_text(f"{HEAD}for i in count(1):\n{STEP}").findings
    assert [each.code for each in found if each.line == 6] == ["ER003"]


# Loops.


@pytest.mark.parametrize(
    ("loop", "new"),
    [
        ("range(n)", "(n)"),
        ("range(0, n)", "(n)"),
        ("range(1, n + 1)", "(n, start=1)"),
        ("range(1, 9)", "(8, start=1)"),
        ("range(1, a if b else c)", "((a if b else c) - 1, start=1)"),
        ("range(5, n)", "(n - 5, start=5)"),
        ("tqdm(range(n), 'x')", "(n)"),
    ],
)
def test_a_loop_over_epochs(loop: str, new: str) -> None:
    text = said(f"{HEAD}for epoch in {loop}:\n{FIT}")
    why = "6 a restart would begin with the first of these epochs again"
    assert f"{why}: write `elasticrun.remaining_epochs_until{new}`" in text


@pytest.mark.parametrize("begun", ["begun", "args.begun"])
def test_a_loop_begins_after_a_restart_where_it_did(begun: str) -> None:
    text = said(f"{HEAD}for epoch in range({begun}, n):\n{FIT}")
    until = f"`elasticrun.remaining_epochs_until(n - {begun}, start={begun})`"
    assert f"{until} behind `{begun} = elasticrun.Variables(value={begun}).val" in text


@pytest.mark.parametrize(
    "loop",
    [
        *("range(0, n, 2)", "range(*given)", "range(stop=9)", "range()"),
        *("self.range()", "zip(range(9), rates)", "count(1)"),
    ],
)
def test_another_loop_is_told_what_there_is(loop: str) -> None:
    text = said(f"{HEAD}for epoch in {loop}:\n{FIT}")
    assert "begin this loop again: loop over `elasticrun.remaining_epochs_unt" in text


@pytest.mark.parametrize(
    ("text", "new"),
    [
        (f"for i in range(9):\n{STEP}", "steps_until(9)"),
        (f"for i in range(len(train_loader)):\n{STEP}", "steps_until(len(train_l"),
        (f"for iEpoch in range(9):\n{STEP}", "epochs_until(9)"),
        (f"for i in range(9):\n{FIT}", "epochs_until(9)"),
        (f"while i < n:\n{STEP}    i += 1\n", "steps_until(n - i, start=i)` behind"),
        (f"while self.i < 9:\n{FIT}    self.i += 1\n", "epochs_until(9 - self.i, st"),
    ],
)
def test_what_a_loop_counts(text: str, new: str) -> None:
    assert f"elasticrun.remaining_{new}" in said(HEAD + text)


@pytest.mark.parametrize("turn", ["i += 2", "f()", "if f(): i += 1"])
def test_a_while_that_does_not_count_is_told_what_there_is(turn: str) -> None:
    text = said(f"{HEAD}while i < n:\n{STEP}    {turn}\n")
    assert "6 a restart would begin this loop again" in text


RUNS = """\
def fit():
    net = Net()
    opt = torch.optim.SGD(net.parameters())
    for epoch in range(9):
        for x in loader: net(x).sum().backward()
"""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{RUNS}for fold in range(5): fit()\n", "give the states of each turn a `na"),
        (f"{RUNS}for cut in folds: fit()\n", "remaining_epochs_until((turn + 1) * 9)"),
        (f"{RUNS}for cut in folds: fit()\n", "net, opt)`, with a name= for each turn"),
        (f"{EPOCHS}{EPOCHS}", "count on from one another"),
        (
            (
                "class Base:\n    def run(self):\n"
                "        for e in range(9): self.turn()\n"
                f"class Trainer(Base):\n    def turn(self):\n    {FIT}Trainer().run()\n"
            ),
            "remaining_epochs_until(9)",
        ),
        (
            "for epoch in range(9): train_one_epoch(net, loader)\n",
            "if this trains, write `elasticrun.remaining_epochs_until(9)`",
        ),
    ],
)
def test_loops_with_calls_in_them(text: str, message: str) -> None:
    assert message in said(HEAD + text)


def test_a_value_that_each_fold_keeps_is_found() -> None:
    runs = RUNS.replace("    for epoch", "    best = 9.0\n    for epoch")
    best = "        best = min(best, loss())\n        if best < 0.1: break\n"
    found = lint_text(f"{HEAD}{runs}{best}for fold in folds: fit()\n").findings
    assert [each.line for each in found if each.code == "ER301"] == [12]


INNER = "for i in range(5): net(x).sum().backward()"


@pytest.mark.parametrize(
    "text",
    [
        f"for x in loader:\n    {INNER}\n",
        f"def attack(x):\n    {INNER}\nfor x in loader: attack(x)\n",
        "def fit(): f().backward()\nfor epoch in range(9): print(epoch)\n",
        "for i in range(num_batches): net(x)\n",
        (
            "for task in tasks:\n    fast = copy.deepcopy(net)\n"
            f"    opt = SGD(fast.parameters())\n    {INNER}\n"
        ),
        (
            "class Meter:\n    def fit(self): pass\nmeter = Meter()\n"
            f"def fit():\n{FIT}for i in range(9): meter.fit()\n"
        ),
    ],
)
def test_other_loops_stay(text: str) -> None:
    assert "remaining_" not in said(HEAD + text)


# Loaders.


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("loader = DataLoader(data, 8, True)", "of all replicas together"),
        ("loader = torch.utils.data.DataLoader(data)", "of all replicas together"),
        ("from torch.utils import data as d\nloader = d.DataLoader(data)", "together"),
        ("loader = DataLoader(data, sampler=None, **given)", "together"),
        ("from theirs import DataLoader\nloader = DataLoader(data)", ""),
        (
            f"for epoch in range(9):\n    loader = DataLoader(data)\n{FIT}",
            "make it before the loop",
        ),
    ],
)
def test_a_loader_is_told_what_else_is_to_change(line: str, message: str) -> None:
    text = said(
        f"import torch\nfrom torch.utils.data import DataLoader\n{line}\n"
        f"net = Net()\nopt = {SGD}\n{EPOCHS}"
    )
    told = [each for each in text.splitlines() if "AdaptiveDataLoader`, whose" in each]
    assert bool(told) == bool(message)
    assert message in "".join(told)


# Models.


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (f"opt = {SGD}", "net, opt"),
        (f"opt = {SGD}\nplan = {PLAN}", "net, opt, plan"),
        (f"opt = {SGD}\nplan = {PLAN}\nmore = {PLAN}", "net, opt, [plan, more]"),
        (f"opt = {SGD}\nplan = get_schedule(opt)", "net, opt, plan"),
        ("opt = SGD(params=net.parameters())", "net, opt"),
        ("opt = AdamW([{'params': net.parameters()}])", "net, opt"),
        ("opt = Adam(filter(f, net.parameters()))", "net, opt"),
        (
            (
                "named = list(net.named_parameters())\n"
                "groups = [p for n, p in named]\nopt = AdamW(groups, lr=0.1)"
            ),
            "net, opt",
        ),
        (f"u = {SGD}\nv = {SGD}", "net, [u, v]"),
        (f"opt, other = {SGD}, 1", "net, opt"),
        ("opt = SGD([*net.body.parameters(), *net.head.parameters()])", "net, opt"),
        ("opt = SGD(net.head.parameters())", "net, opt"),
        (f"opt = {SGD}\nif x:\n    opt.load_state_dict(torch.load('a'))", "net, opt"),
    ],
)
def test_a_model_is_wrapped_behind_what_trains_it(made: str, given: str) -> None:
    text = f"import torch\nnet = Net()\n{made}\ndef f(): net.load_state_dict({{}})\n"
    text += EPOCHS
    at = text[: text.index("\ndef f()") + 1].count("\n") - ("\n    opt.l" in made)
    new = f"net = elasticrun.AdaptiveDataParallel({given})"
    why = "`net` is in no checkpoint, and no gradient of it is averaged"
    assert f"{at} {why}: add behind it: `{new}`" in said(text)
    behind = f"{EPOCHS}net.load_state_dict(torch.load('best'))\n"
    assert f"{at} {why}" in said(text.replace(EPOCHS, behind))


@pytest.mark.parametrize(
    ("made", "new"),
    [
        ("opts = [SGD(net.parameters())]", "(model, optimizer)"),
        ("opt = SGD(groups, lr=0.1)", "(model, opt)"),
        ("groups = parameters_of(net, lr.parameters())\nopt = SGD(groups)", "(model, "),
        ("opt = SGD([*a.parameters(), *b.parameters()])", "(model, opt)"),
        (f"opt = ScheduledOptim({SGD}, 2.0)", "(model, optimizer)"),
        ("opt = SGD(agent.actor.parameters())", "(model, opt)"),
        ("opt = SGD([*net.body.parameters(), *a.b.parameters()])", "(model, opt)"),
    ],
)
def test_a_model_that_is_not_seen_is_asked_for(made: str, new: str) -> None:
    text = said(f"import torch\n{made}\n{EPOCHS}")
    assert f"wrap the model that it trains: `elasticrun.AdaptiveDataParallel{new}" in (
        text
    )
    assert text.count("AdaptiveDataParallel") == 1


def test_an_optimizer_that_is_to_be_wrapped_is_not_found_twice() -> None:
    both = "[*net.parameters(), *other.parameters()]"
    text = HEAD.replace("net.parameters()", both)
    found = lint_text(f"{text}{EPOCHS}").findings
    assert [e.code for e in found if e.line == 4] == ["ER003"]


def test_several_models_have_names() -> None:
    made = "a, b = Net(), Net()\nu = Adam(a.parameters())\nv = Adam(b.parameters())\n"
    text = said(f"import torch\n{made}{EPOCHS}")
    for model, given in ("a", "u"), ("b", "v"):
        wrapped = f'AdaptiveDataParallel({model}, {given}, name="{model}")'
        assert f"`{model} = elasticrun.{wrapped}`" in text


@pytest.mark.parametrize(
    "kept",
    [
        *("self.net = model", "self.cfg, self.net = 1, model"),
        *("self.net: Net = model", "self.net = self.model = None"),
    ],
)
def test_a_model_is_wrapped_under_the_name_that_an_object_keeps(kept: str) -> None:
    text = said(
        "import torch\nclass Trainer:\n    def __init__(self, model):\n"
        f"        {kept}\n        self.opt = SGD(model.parameters())\n"
        f"    def run(self):\n        {EPOCHS.replace(FIT, '        ' + FIT)}"
    )
    name = "model" if kept.endswith("None") else "self.net"
    new = f"`{name} = elasticrun.AdaptiveDataParallel({name}, self.opt)`"
    assert f"5 `{name}` is in no checkpoint" in text
    assert new in text


def test_a_model_comes_out_of_another_wrapper() -> None:
    text = said(f"import torch\nnet = DDP(Net())\nopt = {SGD}\n{EPOCHS}")
    assert "2 AdaptiveDataParallel averages gradients itself: give it the bare" in text


# Files.


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
