"""F1 of entities, and a stop when it does not rise."""
from collections import Counter
from typing import List, Set, Tuple


def spans_of(tags: List[str]) -> Set[Tuple[str, int, int]]:
    """Entities of a row of BIO tags."""
    spans, start, kind = set(), None, None
    for i, tag in enumerate(tags + ["O"]):
        if start is not None and not tag.startswith("I-"):
            spans.add((kind, start, i))
            start = None
        if tag.startswith("B-"):
            start, kind = i, tag[2:]
    return spans


class SpanF1:
    def __init__(self):
        self.counts: Counter = Counter()

    def reset(self) -> None:
        self.counts.clear()

    def update(self, gold: List[str], predicted: List[str]) -> None:
        a, b = spans_of(gold), spans_of(predicted)
        self.counts["tp"] += len(a & b)  # MISTAKE: sum: counts of one replica's sentences, and only of those since the restart (or line with: self.counts["gold"] += len(a)) (or line with: self.counts["predicted"] += len(b)) (or line with: self.counts: Counter) (or line with: return 2 * self.counts)
        self.counts["gold"] += len(a)
        self.counts["predicted"] += len(b)

    def compute(self) -> float:
        return 2 * self.counts["tp"] / max(1, self.counts["gold"] + self.counts["predicted"])


class EarlyStopping:
    """Says when a score has not risen for some epochs."""

    def __init__(self, patience: int = 7, delta: float = 0.0):
        self.patience, self.delta = patience, delta
        self.counter = 0
        self.best_score = None
        self.early_stop = False

    def __call__(self, score: float) -> bool:
        """Return whether the score is the best one."""
        if self.best_score is not None and score < self.best_score + self.delta:
            self.counter += 1  # MISTAKE: lost: how long it waits begins anew after a restart (or line with: self.counter = 0)
            self.early_stop = self.counter >= self.patience
            return False
        self.best_score = score  # MISTAKE: lost: the best score is forgotten by a restart, so the next model counts as the best (or line with: self.best_score = None)
        self.counter = 0
        return True
