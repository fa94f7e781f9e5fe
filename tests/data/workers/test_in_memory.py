"""Data in memory: one indexing operation a batch, with the bits of sample by sample."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elasticrun import AdaptiveDataLoader
from elasticrun.testing import read_trace
from tests.support.data import Numbers
from tests.support.generations import generation

pytestmark = pytest.mark.usefixtures("job")

N = 10


def grown() -> Tensor:
    return torch.randn(N, 3, generator=torch.Generator().manual_seed(0))


DATA: dict[str, Callable[[], tuple[Tensor, ...]]] = {
    "of one tensor": lambda: (grown(),),
    "with labels": lambda: (grown(), torch.arange(N)),
    "of NumPy arrays": lambda: (torch.from_numpy(np.arange(2.0 * N).reshape(N, 2)),),
    "transposed": lambda: (torch.randn(4, N).T, torch.randn(N, 6)[:, ::2]),
    "of images": lambda: (
        torch.randn(N, 2, 4, 4).to(memory_format=torch.channels_last),
    ),
    "expanded": lambda: (torch.randn(1, 3).expand(N, 3), torch.randn(N, 0)),
    "of booleans and halves": lambda: (grown() > 0, grown().bfloat16()),
    "of NaN with a payload": lambda: (
        torch.full((N,), 0x7FC12345, dtype=torch.int32).view(torch.float32),
    ),
    # These are read sample by sample.
    "conjugated": lambda: (torch.randn(N, 3, dtype=torch.complex64).conj(),),
    "with gradients": lambda: (grown().requires_grad_(),),
}


def bits_of(tensor: Tensor) -> list[int]:
    whole = tensor.detach().resolve_conj().contiguous()
    bits: list[int] = whole.view(torch.uint8).flatten().tolist()
    return bits


@pytest.mark.parametrize("kind", DATA)
def test_batches_are_those_of_a_plain_loader(kind: str) -> None:
    dataset = TensorDataset(*DATA[kind]())
    plain = list(DataLoader(dataset, batch_size=4))
    own = list(AdaptiveDataLoader(dataset, batch_size=4))
    assert len(own) == len(plain) == 3
    for batch, expected in zip(own, plain, strict=True):
        assert type(batch) is type(expected) is list
        for tensor, other in zip(batch, expected, strict=True):
            assert (tensor.dtype, tensor.shape) == (other.dtype, other.shape)
            assert tensor.stride() == other.stride()
            assert tensor.requires_grad == other.requires_grad
            assert bits_of(tensor) == bits_of(other)


@pytest.mark.parametrize(
    "options",
    [{}, {"seed_each": "sample"}, {"num_workers": 1}, {"max_local_batch_size": 3}],
    ids=str,
)
def test_no_sample_is_read_alone(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = TensorDataset(torch.arange(N))
    with generation():
        expected = list(AdaptiveDataLoader(Numbers(N), 4, True, **options))
    monkeypatch.delattr(TensorDataset, "__getitem__")
    with generation():
        found = [batch for (batch,) in AdaptiveDataLoader(dataset, 4, True, **options)]
    assert [b.tolist() for b in found] == [b.tolist() for b in expected]


def test_an_index_that_is_none_is_named() -> None:
    loader = AdaptiveDataLoader(TensorDataset(torch.arange(N)), 2, sampler=[0, N])
    with pytest.raises(IndexError, match=f"gives the index {N}, but .* {N} samples"):
        list(loader)


def test_a_collate_function_of_ones_own_gets_samples() -> None:
    dataset = TensorDataset(torch.arange(N))
    loader = AdaptiveDataLoader(dataset, 4, collate_fn=list)
    assert next(iter(loader))[1] == (torch.tensor(1),)


class ByTensor(Dataset[Tensor]):
    def __len__(self) -> int:
        return N

    def __getitems__(self, indices: Tensor) -> Tensor:
        assert isinstance(indices, Tensor)
        return torch.arange(N)[indices]


def as_it_is(batch: Tensor) -> Tensor:
    return batch


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=str)
def test_getitems_is_asked_with_a_tensor_if_it_says_so(
    options: dict[str, Any], tmp_path: Path
) -> None:
    with generation(trace_dir=str(tmp_path)):
        loader = AdaptiveDataLoader(ByTensor(), 4, collate_fn=as_it_is, **options)
        assert [batch.tolist() for batch in loader] == [
            [0, 1, 2, 3],
            [4, 5, 6, 7],
            [8, 9],
        ]
    assert read_trace(tmp_path)[2]["indices"] == [8, 9]


def test_each_sample_is_seeded_also_where_a_tensor_is_asked_for() -> None:
    loader = AdaptiveDataLoader(ByTensor(), 4, seed_each="sample", collate_fn=list)
    assert next(iter(loader)) == [0, 1, 2, 3]
