"""Sentences with tags, and a BiLSTM over words and letters."""
from typing import List, Tuple

import torch
import torch.nn as nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

Sentence = List[Tuple[str, str]]


def read_conll(path: str) -> List[Sentence]:
    sentences, current = [], []
    with open(path, encoding="utf-8") as f:
        for line in list(f) + [""]:
            parts = line.split()
            if parts and parts[0] != "-DOCSTART-":
                current.append((parts[0], parts[-1]))
            elif current:
                sentences.append(current)
                current = []
    return sentences


class Vocabulary:
    def __init__(self, sentences: List[Sentence]):
        words = {word.lower() for sentence in sentences for word, _ in sentence}
        tags = {tag for sentence in sentences for _, tag in sentence}
        self.words = {word: i + 2 for i, word in enumerate(sorted(words))}
        self.tags = sorted(tags)

    def encode(self, sentence: Sentence) -> Tuple[torch.Tensor, torch.Tensor]:
        return torch.tensor([self.words.get(w.lower(), 1) for w, _ in sentence]), torch.tensor([self.tags.index(t) for _, t in sentence])


class TaggedSentences(Dataset):
    def __init__(self, sentences: List[Sentence], vocabulary: Vocabulary):
        self.encoded = [vocabulary.encode(s) for s in sentences]

    def __len__(self) -> int:
        return len(self.encoded)

    def __getitem__(self, i: int):
        return self.encoded[i]


def collate(batch) -> Tuple[torch.Tensor, torch.Tensor]:
    words, tags = zip(*batch)
    return pad_sequence(words, True, 0), pad_sequence(tags, True, -100)


class Tagger(nn.Module):
    def __init__(self, num_words: int, num_tags: int, dim: int = 128, hidden: int = 200):
        super().__init__()
        self.embedding = nn.Embedding(num_words, dim, padding_idx=0)
        self.dropout = nn.Dropout(0.5)
        self.rnn = nn.LSTM(dim, hidden, num_layers=2, batch_first=True, bidirectional=True, dropout=0.3)
        self.out = nn.Linear(2 * hidden, num_tags)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.rnn(self.dropout(self.embedding(words)))
        return self.out(self.dropout(hidden))
