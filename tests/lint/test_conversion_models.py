"""Models, their optimizers and averages, which a patch wraps and registers."""

from __future__ import annotations

import pytest

from tests.lint.test_conversion_cases import EPOCHS, FIT, HEAD, SGD, WRAP, convert, said

STEP = "torch.optim.lr_scheduler.StepLR(opt, 1)"


@pytest.mark.parametrize(
    ("made", "new"),
    [
        (f"net = Net()\nopt: Optimizer = {SGD}", "net, opt"),
        (f"net = Net()\nopt = {SGD}\nplan = {STEP}", "net, opt, plan"),
        (f"net = Net()\nopt = {SGD}\nplan = get_schedule(opt)", "net, opt, plan"),
        ("net = Net()\nopt = SGD(params=net.parameters())", "net, opt"),
        ("net = Net()\nopt = AdamW([{'params': net.parameters()}])", "net, opt"),
        ("net = Net()\nopt = Adam(filter(f, net.parameters()))", "net, opt"),
        (f"net = Net().cuda()\nif x:\n  net = net.half()\nopt = {SGD}", "net, opt"),
        (
            (
                "net = Net()\nnamed = list(net.named_parameters())\n"
                "groups = [{'params': [p for n, p in named if 'bias' not in n]}]\n"
                "groups.append({'params': [p for n, p in named if 'bias' in n]})\n"
                "opt = AdamW(groups, lr=0.1)"
            ),
            "net, opt",
        ),
        (
            (
                "net = Net()\nkept, other = [], []\n"
                "for n, p in net.named_parameters():\n"
                "    if n.endswith('bias'): kept.append(p)\n"
                "    else: other.append(p)\n"
                "opt = SGD([{'params': kept}, {'params': other}], lr=0.1)"
            ),
            "net, opt",
        ),
        (
            (
                f"net = Net()\nopt = {SGD}\nif again:\n"
                "    net.load_state_dict(torch.load('a'))"
            ),
            "net, opt",
        ),
        (f"net = Net()\nopt = {SGD}\nopt.load_state_dict(torch.load('a'))", "net, opt"),
        (f"def f(net): g(net)\nnet = Net(); opt = {SGD}", "net, opt"),
        (f"net = Net()\nprint(net)\nopt = {SGD}", "net, opt"),
    ],
)  # fmt: skip
def test_a_model_is_wrapped_behind_what_trains_it(made: str, new: str) -> None:
    text = f"import torch\n{made}\n{EPOCHS}"
    wrapped = f"net = elasticrun.AdaptiveDataParallel({new})"
    assert f"{made}\n{wrapped}\n{EPOCHS[:9]}" in convert(text)
    assert wrapped in said(text)


def test_a_model_of_the_main_part_is_wrapped() -> None:
    main = f"net = Net()\nopt = {SGD}\n{EPOCHS}".replace("\n", "\n    ")
    text = f"import torch\nif __name__ == '__main__':\n    {main}\n"
    assert "    net = elasticrun.AdaptiveDataParallel(net, opt)\n" in convert(text)


def test_a_model_of_a_trainer_is_wrapped() -> None:
    text = (
        "import torch\nclass Trainer:\n    def __init__(self):\n"
        "        self.net = Net()\n        self.opt = SGD(self.net.parameters())\n"
        "    def run(self):\n        for epoch in range(9):\n        " + FIT
    )
    new = "        self.net = elasticrun.AdaptiveDataParallel(self.net, self.opt)\n"
    assert new in convert(text)


TRAINER = """\
class Trainer:
    def __init__(self, model):
        self.net = model
        self.opt = SGD(model.parameters())
        self.mean = copy.deepcopy(model)
        self.size = len(loader)
    def run(self):
        for epoch in range(9):
            for x in loader: self.net(x).sum().backward(); f(self.mean)
"""
IN_TRAINER = """\
        self.mean = copy.deepcopy(model)
        elasticrun.register(mean=self.mean)
        self.net = elasticrun.AdaptiveDataParallel(self.net, self.opt)
        self.size = len(loader)
"""


@pytest.mark.parametrize(
    ("text", "is_wrapped"),
    [
        (f"{TRAINER}Trainer(Net()).run()\n", True),
        (f"{TRAINER}net = Net()\nnet.cuda()\nprint(net)\nTrainer(net).run()\n", True),
        (f"{TRAINER}net = Net()\nTrainer(net).run()\nnet(x)\n", False),
        (f"{TRAINER}net = Net()\ndef f(): net(x)\nTrainer(net).run()\n", False),
        (f"{TRAINER}Trainer(*given).run()\n", False),
        (f"{TRAINER}Trainer(nets[0]).run()\n", False),
        (TRAINER, False),  # Who knows where the model comes from?
        (
            f"{TRAINER}Trainer(Net()).run()\n".replace(
                "= len(loader)", "= f(model)"
            ),
            False,
        ),
        (
            f"{TRAINER}Trainer(Net()).run()\n".replace(
                "= len(loader)", "= self.other = model"
            ),
            False,
        ),
    ],
)  # fmt: skip
def test_a_model_that_a_trainer_is_given_is_wrapped(
    text: str, is_wrapped: bool
) -> None:
    new = convert(f"import copy\nimport torch\n{text}")
    assert (IN_TRAINER in new) is is_wrapped
    assert ("AdaptiveDataParallel" in new) is is_wrapped


MEAN = """\
class Mean:
    def __init__(self, net): self.net = copy.deepcopy(net)
    def state_dict(self): return self.net.state_dict()
    def load_state_dict(self, state): self.net.load_state_dict(state)
"""


@pytest.mark.parametrize(
    ("made", "is_kept"),
    [
        ("mean = copy.deepcopy(net)", True),
        (f"{MEAN}mean = Mean(net)", True),
        (f"{MEAN}mean = Mean(net)\nif x: mean.load_state_dict(torch.load('a'))", True),
        ("other = copy.deepcopy(net)", False),  # which nothing changes
        ("mean = copy.deepcopy(loader)", False),
        (MEAN.replace("load_state_dict(self", "load(self") + "mean = Mean(net)", False),
        (MEAN.replace("copy.deepcopy(net)", "net") + "mean = Mean(net)", False),
    ],
)
def test_an_average_of_a_model_is_registered(made: str, is_kept: bool) -> None:
    text = f"import copy\nimport torch\nnet = Net()\nopt = {SGD}\n{made}\n"
    new = convert(text + EPOCHS + "    update(mean)\n")
    registered = "elasticrun.register(mean=mean)"
    lines = f"{registered}\nnet = elasticrun.AdaptiveDataParallel(net, opt)\n"
    assert (f"{made}\n{lines}for epoch" in new) is is_kept
    assert ("register(" in new) is is_kept


@pytest.mark.parametrize(
    "later",
    [
        "def f(): net.load_state_dict(torch.load('a'))",
        "other.load_state_dict(torch.load('a'))",
        "net.load_state_dict",
    ],
)
def test_a_model_is_wrapped_before_what_does_not_load_it(later: str) -> None:
    made = f"import torch\nnet = Net()\nopt = {SGD}\n"
    wrapped = "net = elasticrun.AdaptiveDataParallel(net, opt)\n"
    if later != "net.load_state_dict":
        assert f"{wrapped}{later}\n" in convert(f"{made}{later}\n{EPOCHS}")
    behind = f"{EPOCHS}net.load_state_dict(torch.load('best'))\n"
    assert f"{wrapped}for epoch" in convert(f"{made}{behind}")
    fit = f"def fit():\n    {EPOCHS.replace(FIT, '    ' + FIT)}"
    new = convert(f"{fit}{made}fit()\nnet.load_state_dict(torch.load('best'))\n")
    assert f"{wrapped}fit()\n" in new


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("opts.net = SGD(net.parameters())", "(model, optimizer)"),
        ("opts = [SGD(net.parameters())]", "(model, optimizer)"),
        ("opt = SGD(groups, lr=0.1)", "(model, opt)"),
        *(
            (f"net, b = Net(), Net()\n{made}\nopt = SGD(groups)", "(model, opt)")
            for made in (
                "groups = [*net.parameters()]\ngroups.append(b.parameters())",
                "groups = [*net.parameters(), *parameters_of(b)]",
                "groups = [*net.parameters()]\nadd(groups)",
                "groups = [*net.parameters()]\ngroups += b.parameters()",
                "groups = [*net.parameters()]\nfor p in b.parameters(): groups += p",
                "groups = [*net.parameters()]\ndef f(): groups.append(b.w)",
            )
        ),
        ("opt = SGD([*a.parameters(), *b.parameters()])", "(model, opt)"),
        ("opt = SGD(net.head.parameters())", "(model, opt)"),
        ("self.opt = SGD(self.net.parameters())", "(self.net, self.opt)"),
        (f"opt = {SGD}", "(net, opt)"),
        (f"def main(net):\n    opt = {SGD}", "(net, opt)"),
        (f"def main():\n    opt = {SGD}\nnet = Net()", "(net, opt)"),
        (f"def main(): net = Net(); opt = {SGD}", "(net, opt)"),
        (f"net = other = Net()\nopt = {SGD}", "(net, opt)"),
        (f"net = Net()\nmean = Mean(net)\nopt = {SGD}", "(net, opt)"),
        (f"net = Net()\nopt = {SGD}\nnet = compiled(net)", "(net, opt)"),
        (f"net = Net()\nopt = {SGD}\nnet.cuda()", "(net, opt)"),
        (f"net = Net()\nopt = {SGD}\nopt = Slow(opt)", "(net, opt)"),
        (f"net = Net()\nopt = {SGD}; fit()", "(net, opt)"),
        (f"net = Net()\nopt = {SGD}\nplans.append({STEP})", "(net, opt)"),
        (f"def f():\n  net = Net()\n  opt = {SGD}\nf(); f()", "(net, opt)"),
        (
            (f"def f():\n  net = Net()\n  opt = {SGD}\n  net(x).backward()\n"
            "def g(): f()\nfor fold in folds: g()"),
            "(net, opt)",
        ),
        (
            ("class Agent:\n  def __init__(self):\n    self.net = Net()\n"
            "    self.opt = Adam(self.net.parameters())\n[Agent() for _ in names]"),
            "(self.net, self.opt)",
        ),
        (f"if x:\n  net = Net()\n  opt = {SGD}", "(net, opt)"),
        (f"net = Net()\nif x:\n  opt = {SGD}\nplan = {STEP}", "(net, opt, plan)"),
        (
            (f"net = Net()\nif x: opt = {SGD}\nelse: opt = Adam(net.parameters())\n"
            f"plan = {STEP}"),
            "(net, opt, plan)",
        ),
        (f"net = Net()\nopt = {SGD}\nif x: plan = {STEP}", "(net, opt, plan)"),
        ("net = Net()\nopt = torch.optim.LBFGS(net.parameters())", "(net, opt)"),
        (f"net = DDP(Net())\nopt = {SGD}", "give it the bare module"),
        (f"net = Net()\nopt = {SGD}\nwith_ddp = DDP(net)", "give it the bare module"),
        (
            "".join(f"def {f}():\n    net = Net()\n    opt = {SGD}\n" for f in "ab"),
            "(net, opt)",
        ),
    ],
)  # fmt: skip
def test_a_model_is_not_wrapped_where_that_may_be_wrong(
    made: str, message: str
) -> None:
    text = f"import torch\n{made}\n{EPOCHS}"
    assert convert(text) == text  # The loop would go on with new weights.
    assert message in said(text)
    assert "AdaptiveDataParallel" in said(text)


@pytest.mark.parametrize("name", ["torch.distributed", "torch.multiprocessing"])
def test_a_script_with_replicas_of_its_own_is_for_its_author(name: str) -> None:
    text = f"import {name} as other\n{HEAD}{EPOCHS}"
    assert convert(text) == text
    for new in ("remaining_epochs_until(9)", "AdaptiveDataLoader`", WRAP):
        assert new in said(text)


def test_several_models_have_names() -> None:
    made = "a, b = Net(), Net()\nu = Adam(a.parameters())\nv = Adam(b.parameters())\n"
    new = convert(f"import torch\n{made}w = SGD(a.parameters())\n{EPOCHS}")
    assert (
        'v = Adam(b.parameters())\nb = elasticrun.AdaptiveDataParallel(b, v, name="b")'
        in new
    )
    assert 'a = elasticrun.AdaptiveDataParallel(a, [u, w], name="a")' in new


def test_what_is_around_an_optimizer_is_no_optimizer_of_torchs() -> None:
    made = "torch.optim.SGD(net.parameters(), lr=0.1)"
    text = f"{HEAD.replace(made, f'ScheduledOptim({made}, 2.0)')}{EPOCHS}"
    wraps = [each for each in said(text).splitlines() if "DataParallel" in each]
    assert len(wraps) == 1
    assert "wrap the model that it trains" in wraps[0]
