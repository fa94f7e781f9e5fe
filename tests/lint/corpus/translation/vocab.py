"""Words and their numbers."""
from collections import Counter

PAD, BOS, EOS, UNK = range(4)


class Vocab:
    def __init__(self, lines, size=8000):
        counts = Counter(w for line in lines for w in line.split())
        ordered = sorted(counts, key=lambda w: (-counts[w], w))[: size - 4]
        self.index = {w: i + 4 for i, w in enumerate(ordered)}

    def __len__(self):
        return len(self.index) + 4

    def encode(self, line):
        return [BOS] + [self.index.get(w, UNK) for w in line.split()] + [EOS]
