"""Tensors arrive from a worker as they were, whichever way they travel."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elasticrun import AdaptiveDataLoader
from elasticrun.data.workers import reader
from tests.support.data import Numbers

pytestmark = pytest.mark.usefixtures("job")

BOTH_SIZES = [
    torch.arange(reader.LARGEST, dtype=torch.uint8),
    torch.arange(reader.LARGEST + 1, dtype=torch.uint8),
]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    *(torch.complex64, torch.complex128, torch.float8_e4m3fn),
]
OF_ALL_KINDS = {
    "a scalar": torch.tensor(7.5),
    "no elements": torch.empty(0, 3),
    "a transposed view": torch.arange(6).reshape(2, 3).T,
    "channels last": torch.arange(48.0)
    .reshape(1, 3, 4, 4)
    .contiguous(memory_format=torch.channels_last),
    "a part of a large one": torch.arange(100_000)[5:9],
    "a conjugate": torch.tensor([1 + 2j, 3 - 1j]).conj(),
    "a negative view": torch._neg_view(torch.tensor([2.0, -1.0])),
    "a leaf": torch.ones(3, requires_grad=True),
    "a parameter": torch.nn.Parameter(torch.ones(2)),
    "shared already": torch.arange(4).share_memory_(),  # type: ignore[no-untyped-call]
    "sparse": torch.eye(3).to_sparse().coalesce(),
}


class First:
    """A collate function that gives what it has, whatever the samples are."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, samples: list[Any]) -> Any:
        return self._value


def through_a_worker(value: Any) -> Any:
    (batch,) = AdaptiveDataLoader(
        Numbers(1),
        1,
        num_workers=1,
        collate_fn=First(value),
        name="one",
        timeout=300,  # A worker that cannot send a batch says so, and sends nothing.
    )
    return batch


def assert_same(arrived: torch.Tensor, sent: torch.Tensor) -> None:
    assert type(arrived) is type(sent)
    assert arrived.dtype == sent.dtype
    assert arrived.shape == sent.shape
    assert arrived.layout == sent.layout
    assert arrived.requires_grad == sent.requires_grad
    if sent.layout is torch.strided:
        assert arrived.stride() == sent.stride()
    assert arrived.to_dense().tolist() == sent.to_dense().tolist()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_dtype_arrives(dtype: torch.dtype) -> None:
    sent = torch.arange(10).remainder(2).to(dtype)
    assert_same(through_a_worker(sent), sent)


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("kind", OF_ALL_KINDS)
def test_any_tensor_arrives(kind: str) -> None:
    sent = OF_ALL_KINDS[kind]
    assert_same(through_a_worker(sent), sent)


def test_small_tensors_need_no_shared_memory() -> None:
    small, large = through_a_worker(BOTH_SIZES)
    assert not small.is_shared()
    assert large.is_shared()
    assert torch.equal(small, BOTH_SIZES[0])
    assert torch.equal(large, BOTH_SIZES[1])


def test_what_arrives_is_a_tensor_like_any_other() -> None:
    arrived = through_a_worker(torch.zeros(3))
    assert arrived.data_ptr() % 64 == 0  # As sums to the last bit may depend on it.
    arrived += 1
    arrived.resize_(100)
    assert arrived[:3].tolist() == [1, 1, 1]


def test_one_tensor_in_two_places_stays_one() -> None:
    tensor = torch.zeros(3)
    first, second = through_a_worker([tensor, tensor])
    assert first is second
