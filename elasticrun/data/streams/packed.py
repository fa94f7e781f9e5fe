"""`Packed`: packs documents into sequences of a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from elasticrun.data.order.batches import check_size
from elasticrun.data.streams.index import STRIDE, Scan
from elasticrun.data.streams.iterables import with_end
from elasticrun.data.streams.streams import Streams, name_of, text_of
from elasticrun.errors import ElasticRunError

NO_DOCUMENT = -1
_NUM_COMPARED = 64  # Tokens of a document by which a tokenizer is known again.


class Packed(Streams):
    """The documents of streams as sequences of tokens, which may cross documents.

        texts = TextLines("data/*.jsonl", parse=json.loads)
        train = Packed(texts, lambda sample: tokenizer.encode(sample["text"]), 1024)

    A sample has "tokens", and "documents": for each token the number of its document in
    the sequence, from 0, for masks. A sequence crosses no stream: what is left at a
    stream's end is left out, or padded. Documents are tokenized once to count
    sequences, and again where they are read.

    Args:
        streams: Of documents; its lanes, window and index are taken.
        tokens: From a document to its tokens, always the same.
        length: Tokens in a sequence.
        pad: The token to fill a stream's last sequence up with, whose document is -1;
            None to leave that out.

    Raises:
        ElasticRunError: While it is read: `tokens` raises.
    """

    def __init__(
        self,
        streams: Streams | IterableDataset[Any],
        tokens: Callable[[Any], Any],
        length: int,
        *,
        pad: int | None = None,
    ) -> None:
        streams = with_end(
            streams,
            "Packed",
            else_="; Endless takes a Packed, and Mixed several of them",
        )
        super().__init__(**streams.options())
        self._streams = streams
        self._tokens = tokens
        self._length = check_size("length", length)
        self._pad = pad

    first_mark = (0, 0)

    @property
    def kind(self) -> str | None:
        own = self._streams.kind
        # Another tokenizer shows in the first documents: then all are counted anew.
        how = f"{name_of(self._tokens)} {self._length} {self._pad} {self.beginning}"
        return None if own is None else f"Packed {how} {own}"

    @cached_property
    def beginning(self) -> str:
        documents = (
            [len(tokens), *tokens[:_NUM_COMPARED].tolist()]
            for stream in range(len(self.names))
            for _, tokens in self._documents(stream, 0)
        )
        return text_of(documents)

    def scan_all(self) -> list[Scan]:
        self._streams.count_all()  # By whose marks documents can be entered.
        return super().scan_all()

    def scan(self, stream: int) -> Scan:
        """Count the sequences; a mark is a document, and tokens of it to leave out."""
        marks = [(0, 0)]
        total = 0
        span = STRIDE * self._length
        for number, tokens in self._documents(stream, 0):
            while len(marks) * span < total + len(tokens):
                marks.append((number, len(marks) * span - total))
            total += len(tokens)
        count = total // self._length
        if self._pad is not None:
            count = -(-total // self._length)
        own = self._streams.scans[stream].begins
        begins = np.arange(0, count, STRIDE) if len(own) else own
        return Scan(count, np.array(marks, np.int64), begins=begins)

    def open(self, stream: int, first: int) -> Iterator[dict[str, Tensor]]:
        number, (document, left_out) = self.mark(stream, first)
        left_out = int(left_out) + (first - number) * self._length
        tokens: list[Any] = []  # Pieces of the sequence that is being filled.
        documents: list[Any] = []
        missing = self._length
        for _, whole in self._documents(stream, int(document)):
            piece = whole[left_out:]
            left_out = max(left_out - len(whole), 0)
            while len(piece):
                tokens.append(piece[:missing])
                documents.append(np.full(len(tokens[-1]), len(documents)))
                piece = piece[missing:]
                missing -= len(tokens[-1])
                if missing == 0:
                    yield self._sequence(tokens, documents)
                    tokens, documents, missing = [], [], self._length
        if self._pad is not None and tokens:
            padding = np.full(missing, self._pad)
            documents.append(np.full(missing, NO_DOCUMENT))
            yield self._sequence([*tokens, padding], documents)

    def _documents(self, stream: int, first: int) -> Iterator[tuple[int, Any]]:
        """Yield the number and the tokens of each document from one on."""
        streams = self._streams
        transform = streams.transform
        for number, read in enumerate(streams.without_broken(stream, first), first):
            try:
                document = read if transform is None else transform(read)
                tokens = np.asarray(self._tokens(document), np.int64)
            except Exception as error:
                raise ElasticRunError(
                    f"document {number} of {self.names[stream]} has no tokens: "
                    f"{error!r}. Mend it, or let {name_of(self._tokens)} return none."
                ) from error
            yield number, tokens

    def _sequence(self, tokens: list[Any], documents: list[Any]) -> dict[str, Tensor]:
        return {
            "tokens": torch.from_numpy(np.concatenate(tokens)),
            "documents": torch.from_numpy(np.concatenate(documents)),
        }
