"""A corpus of labelled scripts by somebody who had not read the linter, measured.

A label stands behind the line that is to be changed:

    # MISTAKE: kind: reason (or line with: TEXT) (or line with: TEXT)
    # ARGUABLE: reason

A mistake is found if some message stands at its line, or at one that holds such a text.
A message is a false alarm if it stands at no such line. The labels are taken out before
the linter sees a script. They were there first; what was found wrong with them later
stands here.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from elasticrun.lint.engine import lint_paths

CORPUS = Path(__file__).parent / "corpus"
PROGRAMS = sorted(path.name for path in CORPUS.iterdir() if path.name[0] != "_")
LABEL = re.compile(r"\s*# (MISTAKE|ARGUABLE): (.*)$")
OTHERWISE = re.compile(r"\s*\(or line with: ")

# More lines at which a mistake may be named, each with the reason.
ALSO = {
    # ER306 names a model where it is made, as other labels of that kind do.
    ("dqn.py", 40): "net, target = make_net(",
    # ER309 names the backward pass, as other labels of losses do.
    ("manual_split.py", 36): "loss.backward()",
    # ER402 names the loader that is made there.
    ("hard_examples.py", 67): "sampler=sampler",
    # ER401 names the test, where what it decides stands in another function.
    ("hydra_like/main.py", 51): "if rank() == 0:",
    ("grid_hooks/hooks.py", 70): "if rank() == 0:",
    # ER503 names the optimizer that gets the rate.
    ("timm_cut.py", 131): "optimizer = torch.optim.SGD(",
}
# Labels of what is no mistake: a job has one hash seed, and sets of texts one order.
SOUND = {
    ("crnn_ocr.py", 113), ("kg_transe.py", 23), ("ncf/data.py", 10),
    ("snli_bilstm.py", 46), ("tabular_income.py", 22), ("twotower.py", 38),
    ("word_lm.py", 16), ("yolo_like/dataset.py", 13),
}  # fmt: skip
# Lines without a label at which a message is right, each with the reason.
RIGHT = {
    # `best` decides the break below, and is inf again where the loop goes on.
    ("lr_range.py", 42): "best = min(best, smooth)",
    # The sum of rewards is changed there as well, and its own label is in doubt.
    ("ppo_continuous.py", 95): "running[i] = 0.0",
    # The label stands in the next line of the same statement.
    ("simclr/main.py", 94): "optimizer = torch.optim.SGD(",
}
# Labels of what is no mistake any more, each with the reason.
HARMLESS = {
    # Replayed code draws what the first run drew.
    ("fedavg.py", 101): "chosen = np.random.choice(...)",
    ("lightgcn/dataloader.py", 51): "users = np.random.randint(...)",
    # The end of a replay sees and undoes it.
    ("kg_transe.py", 103): "net.ent.weight.data = F.normalize(...)",
    ("pretrain_finetune.py", 39): "target.data.copy_(source.data)",
}


class Labelled(NamedTuple):
    """One file: its text without labels, and the lines of mistakes and of doubts."""

    text: str
    mistakes: dict[int, set[int]]
    arguable: set[int]


class Measured(NamedTuple):
    """How many mistakes there are, the messages, what is missed and what is false."""

    num_mistakes: int
    places: set[tuple[str, int, str]]
    missed: set[tuple[str, int]]
    false: set[tuple[str, int, str]]

    @property
    def num_messages(self) -> int:
        return len(self.places)


def read(path: Path) -> Labelled:
    lines, mistakes, arguable = [], {}, set()
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        label = LABEL.search(line)
        lines.append(line[: label.start()].rstrip() if label else line)
        if label and label[1] == "MISTAKE":
            mistakes[number] = OTHERWISE.split(label[2])[1:]
        elif label:
            arguable.add(number)
    found = {
        number: {number}
        | {
            other
            for text in texts
            for other, line in enumerate(lines, 1)
            if text.strip().removesuffix(")") in line
        }
        for number, texts in mistakes.items()
    }
    return Labelled("\n".join(lines) + "\n", found, arguable)


def measure(program: str, folder: Path) -> Measured:
    """Lint a program of the corpus, and compare what is found with its labels."""
    root = CORPUS / program
    paths = sorted(root.rglob("*.py")) if root.is_dir() else [root]
    labelled = {path.relative_to(CORPUS).as_posix(): read(path) for path in paths}
    for name, number in SOUND:
        if name in labelled:
            del labelled[name].mistakes[number]
    for name, file in labelled.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(file.text, encoding="utf-8")
    result = lint_paths([folder / program])
    assert not result.problems
    places = {
        (Path(each.path).relative_to(folder).as_posix(), each.line, each.code)
        for each in result.findings
    }
    named = {(name, line) for name, line, _ in places}
    missed, allowed = set(), set()
    for name, file in labelled.items():
        lines = file.text.splitlines()
        for name_and_line in HARMLESS.keys() & {(name, n) for n in file.mistakes}:
            del file.mistakes[name_and_line[1]]
        for number, at in file.mistakes.items():
            more = ALSO.get((name, number))
            at = at | {n for n, line in enumerate(lines, 1) if more and more in line}
            allowed |= {(name, line) for line in at}
            if not named & {(name, line) for line in at}:
                missed.add((name, number))
        allowed |= {(name, line) for line in file.arguable}
    allowed |= RIGHT.keys()
    false = {each for each in places if each[:2] not in allowed}
    num_mistakes = sum(len(each.mistakes) for each in labelled.values())
    return Measured(num_mistakes, places, missed, false)
