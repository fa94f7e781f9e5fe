"""What is said about a rule: on the terminal, and in its page."""

from __future__ import annotations

from typing import NamedTuple

# What the examples of the rules take for granted.
PRELUDE = """\
import torch
import torch.distributed as dist

import elasticrun
from elasticrun import Accumulator, AdaptiveDataLoader, AdaptiveDataParallel
from elasticrun import State, Variables, once, register, remaining_epochs_until

net = torch.nn.Linear(4, 3)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
model = AdaptiveDataParallel(net, optimizer, scheduler)
train = AdaptiveDataLoader(train_set, batch_size=64, shuffle=True)
valid = AdaptiveDataLoader(valid_set, batch_size=64)
"""


class Rule(NamedTuple):
    """What one rule says, on the terminal, in its page, and beside a finding.

    Attributes:
        head: Its code, its severity, and its title. The severity is `E`, `W`, or `H`
            for a hint, which only `--pedantic` shows. A finding about something known
            only by its name is one level lower.
        help: What to do, in one line.
        wrong, right: Scripts behind `prelude`; only the first one has a finding.
    """

    head: str
    help: str
    why: str
    wrong: str
    right: str
    prelude: str = PRELUDE

    @property
    def code(self) -> str:
        return self.head[:5]

    @property
    def severity(self) -> str:
        return self.head[6]

    @property
    def title(self) -> str:
        return self.head[8:]


# What many examples do in an epoch.
EPOCHS = "for epoch in remaining_epochs_until(30):"
TRAIN = "    for x, y in train:\n        step(x, y)"
VALID = "    for x, y in valid:\n        evaluate(x, y)"
