"""Every option of torch's DataLoader works, or is refused with the way out."""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    TensorDataset,
    default_collate,
)

from elasticrun import AdaptiveDataLoader, request_stop, save_all_states
from tests.support.data import Numbers, NumbersByBatch, samples_of
from tests.support.generations import generation, run_once

pytestmark = [
    pytest.mark.usefixtures("job"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]


def test_it_is_a_loader_over_the_users_data_set() -> None:
    data = Numbers(10)
    loader = AdaptiveDataLoader[Any](data, 4, shuffle=True, drop_last=True)
    assert isinstance(loader, DataLoader)
    assert loader.dataset is data
    assert loader.batch_size == 4
    assert loader.drop_last is True
    assert loader.num_workers == 0


def test_batches_are_collated_as_ever() -> None:
    data = TensorDataset(torch.arange(6.0).reshape(3, 2), torch.arange(3))
    ((x, y),) = AdaptiveDataLoader(data, batch_size=3)
    assert torch.equal(x, torch.arange(6.0).reshape(3, 2))
    assert torch.equal(y, torch.arange(3))


def test_a_collate_function_is_used() -> None:
    loader = AdaptiveDataLoader(Numbers(5), batch_size=2, collate_fn=tuple)
    assert list(loader) == [(0, 1), (2, 3), (4,)]


def test_a_data_set_read_by_batch_is() -> None:
    plain = AdaptiveDataLoader(Numbers(10), 4, shuffle=True)
    expected = samples_of(plain)
    for num_workers in (0, 2):
        for seed_each in ("batch", "sample"):
            with generation():
                loader = AdaptiveDataLoader(
                    NumbersByBatch(10),
                    4,
                    shuffle=True,
                    seed_each=seed_each,
                    num_workers=num_workers,
                )
                assert samples_of(loader) == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="warns without a GPU only")
def test_pinning_memory_without_a_gpu_warns_once_and_works() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = AdaptiveDataLoader(Numbers(6), 2, pin_memory=True)
        assert samples_of(loader) == list(range(6))
        assert samples_of(loader) == list(range(6))
    texts = {str(warning.message) for warning in caught}
    assert len(texts) <= 1
    assert all("pin_memory" in text for text in texts)


def test_a_generator_of_ones_own_is_used_and_does_not_change_the_order() -> None:
    expected = samples_of(AdaptiveDataLoader(Numbers(10), 4, True))
    own = torch.Generator().manual_seed(5)
    before = own.get_state()
    with generation():
        loader = AdaptiveDataLoader(Numbers(10), 4, True, generator=own, num_workers=1)
        assert loader.generator is own
        assert samples_of(loader) == expected
    assert not torch.equal(own.get_state(), before)


def test_batches_stay_in_order_whatever_is_asked() -> None:
    with pytest.warns(
        UserWarning, match=r"in_order=False has no effect: batches keep their order"
    ) as caught:
        loader = AdaptiveDataLoader(Numbers(20), 2, num_workers=2, in_order=False)
    assert caught[0].filename == __file__
    assert samples_of(loader) == list(range(20))


class Backwards:
    """A sampler that can be read at a position."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, position: int) -> int:
        return 9 - position


@pytest.mark.parametrize(
    "sampler",
    [
        [9, 8, 7, 6, 5],
        (9, 8, 7, 6, 5),
        torch.tensor([9, 8, 7, 6, 5]),
        np.array([9, 8, 7, 6, 5], dtype=np.int32),
        range(9, 4, -1),
        Backwards(),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_map_from_position_to_index_is_the_order(
    tmp_path: Path, sampler: Any
) -> None:
    delivered: list[int] = []

    def script() -> None:
        loader = AdaptiveDataLoader(Numbers(10), batch_size=2, sampler=sampler)
        assert len(loader) == 3
        assert loader.num_samples == 5
        for batch in loader:
            delivered.extend(batch.tolist())
            if len(delivered) == 2:
                request_stop()

    run_once(script, tmp_path)
    assert delivered == [9, 8]
    run_once(script, tmp_path)
    assert delivered == [9, 8, 7, 6, 5]


def test_a_sampler_may_repeat_and_leave_out_samples() -> None:
    loader = AdaptiveDataLoader(Numbers(10), batch_size=4, sampler=[3, 3, 3, 1, 1, 9])
    assert [batch.tolist() for batch in loader] == [[3, 3, 3, 1], [1, 9]]


class WithoutLength:
    def __getitem__(self, index: int) -> int:
        return index


class WithoutItems:
    def __len__(self) -> int:
        return 3


REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (
        WithoutLength(),
        {},
        TypeError,
        (
            "WithoutLength has no __len__ or no __getitem__. To resume at a sample, a "
            "data set must have a length and be read by index, or be read in streams: "
            "see `Streams`."
        ),
    ),
    (
        WithoutItems(),
        {},
        TypeError,
        (
            "WithoutItems has no __len__ or no __getitem__. To resume at a sample, a "
            "data set must have a length and be read by index, or be read in streams: "
            "see `Streams`."
        ),
    ),
    (
        Numbers(0),
        {},
        ValueError,
        (
            "the data set (Numbers) is empty, so no loop over it can deliver anything. "
            "Look at how it was built."
        ),
    ),
    (
        Numbers(3),
        {"sampler": [2, 1, 0], "shuffle": True},
        ValueError,
        (
            "sampler= and shuffle=True exclude each other: the sampler is the order. "
            "Leave one of them out."
        ),
    ),
    *[
        (
            Numbers(3),
            {"sampler": sampler},
            TypeError,
            text + "Give the data-set indices themselves, whole numbers in one",
        )
        for sampler, text in [
            (
                torch.tensor([0.2, 1.7]),
                "sampler=Tensor of float32 with the shape (2,) is no order. ",
            ),
            (
                torch.tensor([True, False]),
                "sampler=Tensor of bool with the shape (2,) is no order. ",
            ),
            (
                np.zeros((3, 2), dtype=np.int32),
                "sampler=ndarray of int32 with the shape (3, 2) is no order. ",
            ),
            ([0.2], "sampler=list is no order: at position 0 it has 0.2. "),
            ([1, True], "sampler=list is no order: at position 1 it has True. "),
            ("012", "sampler=str is no order: at position 0 it has '0'. "),
        ]
    ],
    (
        Numbers(3),
        {"sampler": []},
        ValueError,
        "the sampler (list) is empty, so no loop can deliver anything.",
    ),
    (
        Numbers(3),
        {"batch_size": None},
        ValueError,
        (
            "batch_size=None turns batching off in torch, but a global batch needs a "
            "size. Give a batch_size; collate_fn can undo the batching."
        ),
    ),
    *[
        (
            Numbers(3),
            {name: value},
            ValueError,
            f"{name}={value!r} must be a whole number from 1 up.",
        )
        for name in ("batch_size", "max_local_batch_size")
        for value in (0, -1, 2.0, True, "4")
    ],
    *[
        (
            Numbers(3),
            {"seed": seed},
            TypeError,
            f"seed={seed!r} must be a whole number.",
        )
        for seed in (None, 1.5, "1", True)
    ],
    (
        Numbers(3),
        {"seed_each": "epoch"},
        ValueError,
        "seed_each='epoch' must be 'batch' or 'sample'.",
    ),
]


@pytest.mark.parametrize(("data", "options", "kind", "text"), REFUSED)
def test_what_cannot_be_resumed_is_refused(
    data: Any, options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=re.escape(text)):
        AdaptiveDataLoader(data, **options)


def test_a_bar_that_cannot_be_shown_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(ImportError, match=r"pip install 'elasticrun\[progress\]'"):
        AdaptiveDataLoader(Numbers(3), progress=True)
    assert AdaptiveDataLoader(Numbers(3)).name == "loader-0"


def test_a_refused_loader_takes_no_name() -> None:
    with pytest.raises(ValueError, match="must be a whole number"):
        AdaptiveDataLoader(Numbers(3), batch_size=0)
    assert AdaptiveDataLoader(Numbers(3)).name == "loader-0"


def test_torch_refuses_what_it_refuses() -> None:
    with pytest.raises(ValueError, match="persistent_workers option needs num_workers"):
        AdaptiveDataLoader(Numbers(3), persistent_workers=True)
    with pytest.raises(TypeError, match="unexpected keyword argument 'shufle'"):
        AdaptiveDataLoader(Numbers(3), shufle=True)


def test_a_seed_of_numpys_is_a_seed(tmp_path: Path) -> None:
    expected = samples_of(AdaptiveDataLoader(Numbers(10), 4, True, seed=3))

    def script() -> list[int]:
        loader = AdaptiveDataLoader(Numbers(10), 4, True, seed=np.int64(3))
        save_all_states()
        return samples_of(loader)

    assert run_once(script, tmp_path) == expected


def test_sizes_of_numpys_are_sizes(tmp_path: Path) -> None:
    with generation(tmp_path):
        loader = AdaptiveDataLoader(
            Numbers(6), np.int64(4), max_local_batch_size=np.int32(3)
        )
        assert [batch.tolist() for batch in loader] == [[0, 1], [2, 3], [4, 5]]
        save_all_states()
    with generation(tmp_path):
        AdaptiveDataLoader(Numbers(6), 4)


def test_collating_is_torchs() -> None:
    assert AdaptiveDataLoader(Numbers(3)).collate_fn is default_collate


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_profile_shows_the_reading(num_workers: int) -> None:
    loader = AdaptiveDataLoader(Numbers(10), 4, num_workers=num_workers)
    with torch.autograd.profiler.profile() as profile:
        for _ in loader:
            pass
    names = [event.key for event in profile.key_averages()]
    assert any(name.startswith("enumerate(DataLoader)#") for name in names)
