"""Data in memory: reads a whole batch by one indexing operation.

To read samples one by one and collate them takes fifty times as long as the indexing
that a plain program would do: `x[order[k : k + 32]]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate

from elasticrun.data.order.plan import Cut


class InMemory:
    """The tensors of a plain `TensorDataset`, read by batches.

    What comes out has the bits, the form and the strides that reading sample by sample
    and torch's default collate give.
    """

    def __init__(self, dataset: TensorDataset) -> None:
        self.dataset = dataset
        self.device = dataset.tensors[0].device

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: Tensor) -> list[Tensor]:
        """Return one tensor of the batch for each tensor of the data set."""
        indices = torch.as_tensor(indices)  # A worker is sent a list.
        try:
            return [tensor.index_select(0, indices) for tensor in self.dataset.tensors]
        except IndexError as error:
            wrong = indices[(indices < 0) | (indices >= len(self))].tolist()
            raise IndexError(
                f"the sampler, or the batch sampler, gives the index {wrong[0]}, but "
                f"the data set has {len(self)} samples, which count from 0."
            ) from error


def in_memory(dataset: Any, collate: Any) -> InMemory | None:
    """Return the data set for reading by batches; None where that could differ."""
    if type(dataset) is not TensorDataset or collate is not default_collate:
        return None
    tensors = dataset.tensors
    is_plain = all(
        type(tensor) is Tensor
        and tensor.layout is torch.strided
        and tensor.device == tensors[0].device
        # Stacking samples keeps neither of these.
        and not (tensor.is_conj() or tensor.is_neg())
        and not (tensor.requires_grad or tensor.is_quantized)
        for tensor in tensors
    )
    return InMemory(dataset) if is_plain else None


def cut_into_tensors(device: torch.device | None) -> Cut:
    """Return what cuts indices into tensors, moved to a device all at once."""

    def cut(indices: NDArray[np.int64], lengths: list[int]) -> Sequence[Tensor]:
        whole = torch.from_numpy(indices)
        return (whole if device is None else whole.to(device)).split_with_sizes(lengths)

    return cut
