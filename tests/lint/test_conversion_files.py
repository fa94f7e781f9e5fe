"""Files of all replicas, which a patch lets one replica write."""

from __future__ import annotations

import pytest

from elasticrun.lint.engine import lint_text
from tests.lint.test_conversion_cases import EPOCHS, HEAD, convert
from tests.lint.test_conversion_uses import (
    in_epochs,
)

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
