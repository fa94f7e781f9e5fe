"""A loader's own state, for people who keep checkpoints themselves."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.stateful import Stateful

from elasticrun import AdaptiveDataLoader, CheckpointError, LoopOrderError
from elasticrun.data.loader_state import LoaderState
from elasticrun.data.order.shares import BatchSplit
from elasticrun.job.current import current_job
from elasticrun.job.remaining import remaining_epochs_until
from tests.support.data import Numbers, batches_of
from tests.support.generations import generation

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

State = dict[str, Any]


def loader_of(
    num_samples: int = 20, batch_size: int = 4, **options: Any
) -> AdaptiveDataLoader:
    return AdaptiveDataLoader(
        Numbers(num_samples), batch_size, **{"shuffle": True, **options}
    )


def state_after(num_batches: int, **options: Any) -> tuple[State, list[list[int]]]:
    """Return the state between two batches, and what the loop then still had."""
    with generation():
        loader = loader_of(**options)
        iterator = iter(loader)
        for _ in range(num_batches):
            next(iterator)
        state = loader.state_dict()
        return state, [batch.tolist() for batch in iterator]


def test_it_is_what_distributed_checkpoints_and_torchdata_ask_for() -> None:
    with generation():
        assert isinstance(loader_of(), Stateful)


def test_it_is_small_and_plain() -> None:
    with generation():
        loader = loader_of(10**9, 256, seed=2**62)
        for _ in remaining_epochs_until(1):
            for _ in loader:
                state = loader.state_dict()
                break
    assert len(pickle.dumps(state)) < 1000
    assert len(json.dumps(state)) < 1000
    assert json.loads(json.dumps(state)) == state


def test_what_tells_streams_apart_is_encoded_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def encode(values: Any) -> str:
        encoded.append(values)
        return dumps(values)

    def saved() -> Any:
        state.save(written := io.BytesIO())
        return json.loads(written.getvalue())

    encoded: list[Any] = []
    dumps, contents = json.dumps, [("a", 3, "6 1"), ("b", None, "")]
    state = LoaderState(
        name="x", default="x", fingerprint={"seed": 0}, plan=None, contents=contents
    )
    monkeypatch.setattr(json, "dumps", encode)
    assert saved() == {"seed": 0, "streams": [["a", 3, "6 1"], ["b", None, ""]]}
    assert saved() == saved()
    assert encoded.count(contents) == 1
    assert {"seed": 0} in encoded


@pytest.mark.parametrize("num_batches", [1, 3, 4])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_next_loop_continues_after_the_batches_that_were_consumed(
    num_batches: int, num_workers: int
) -> None:
    # Workers have fetched up to four batches more.
    state, rest = state_after(num_batches, num_workers=num_workers)
    assert len(rest) == 5 - num_batches
    with generation():
        loader = loader_of()
        loader.load_state_dict(state)
        assert batches_of(loader) == rest
        assert len(batches_of(loader)) == 5


def test_before_and_after_a_loop_it_means_the_whole_next_one() -> None:
    with generation():
        loader = loader_of()
        fresh = loader.state_dict()
        first = batches_of(loader)
        between = loader.state_dict()
        second = batches_of(loader)
    for state, expected in ((fresh, first), (between, second)):
        with generation():
            loader = loader_of()
            loader.load_state_dict(state)
            assert batches_of(loader) == expected


def test_it_loads_at_any_world_size() -> None:
    state, rest = state_after(2)
    parts = []
    for rank in range(3):
        with generation():
            loader = loader_of(num_workers=rank % 2)
            loader.shares = BatchSplit(
                **{**vars(loader.shares), "rank": rank, "world_size": 3}
            )
            loader.load_state_dict(state)
            parts.append(batches_of(loader))
    assert [sum(batch, []) for batch in zip(*parts, strict=True)] == rest  # noqa: RUF017


def test_a_batch_counts_once_all_its_micro_batches_are_consumed() -> None:
    with generation():
        loader = loader_of(8, 4, max_local_batch_size=2)
        indices = [loader.state_dict()["index"] for _ in loader]
    assert indices == [0, 4, 4, 8]


def test_it_survives_torch_save(tmp_path: Any) -> None:
    state, rest = state_after(2)
    torch.save({"loader": state}, tmp_path / "own.pt")
    loaded = torch.load(tmp_path / "own.pt", weights_only=True)["loader"]
    assert loaded == state
    with generation():
        loader = loader_of()
        loader.load_state_dict(loaded)
        assert batches_of(loader) == rest


def interrupted_validation() -> tuple[State, State, list[list[int]]]:
    """Return the states of two loaders in epoch 1, and what the second still had."""
    with generation():
        train, valid = loader_of(name="train"), loader_of(10, 2, name="valid")
        for epoch in remaining_epochs_until(2):
            batches_of(train)
            iterator = iter(valid)
            next(iterator)
            if epoch == 1:
                next(iterator)
                states = train.state_dict(), valid.state_dict()
                return *states, [batch.tolist() for batch in iterator]
            del iterator
    raise AssertionError


@pytest.mark.parametrize("order", ["train first", "valid first"])
def test_the_states_of_two_loaders_load_together(order: str) -> None:
    train_state, valid_state, rest = interrupted_validation()
    with generation():
        train, valid = loader_of(name="train"), loader_of(10, 2, name="valid")
        if order == "train first":
            train.load_state_dict(train_state)
            valid.load_state_dict(valid_state)
        else:
            valid.load_state_dict(valid_state)
            train.load_state_dict(train_state)
        epochs = []
        for epoch in remaining_epochs_until(2):
            epochs.append(epoch)
            assert batches_of(train) == []
            assert batches_of(valid) == rest
        assert epochs == [1]


def test_states_of_two_loaders_in_one_loop_each_cannot_both_continue() -> None:
    states = {}
    for name in ("train", "valid"):
        with generation():
            loader = loader_of(name=name)
            for _ in loader:
                states[name] = loader.state_dict()
                break
    with generation():
        train, valid = loader_of(name="train"), loader_of(name="valid")
        train.load_state_dict(states["train"])
        with pytest.raises(
            LoopOrderError,
            match=r"`valid` is to continue at .* sample 4 of `valid`, but `train` at "
            r".* sample 4 of `train`\. A job has one position, so it cannot continue "
            r"two loops at once\. Load states that were taken at the same moment\.",
        ):
            valid.load_state_dict(states["valid"])


def test_states_taken_at_different_moments_are_refused() -> None:
    _, valid_state, _ = interrupted_validation()
    with generation():
        train = loader_of(name="train")
        for _ in remaining_epochs_until(1):
            train_state = train.state_dict()
    for order in (0, 1):
        with generation():
            train, valid = loader_of(name="train"), loader_of(10, 2, name="valid")
            loads = [(train, train_state), (valid, valid_state)]
            first, second = loads[order], loads[1 - order]
            first[0].load_state_dict(first[1])
            with pytest.raises(LoopOrderError, match="taken at the same moment"):
                second[0].load_state_dict(second[1])


def test_it_is_not_loaded_in_a_loop() -> None:
    state, _ = state_after(2)
    with generation():
        loader = loader_of()
        for _ in loader:
            with pytest.raises(
                LoopOrderError,
                match=r"a loop is running .*\. Load the states of loaders before the "
                r"first loop\.",
            ):
                loader.load_state_dict(state)


def test_a_state_that_is_refused_changes_nothing() -> None:
    state, _ = state_after(2)
    with generation():
        loader = loader_of()
        for _ in loader.batches(3):
            before = loader.state_dict()
            with pytest.raises(LoopOrderError, match="a loop is running"):
                loader.load_state_dict(state)
            assert loader.state_dict() == before


def test_the_program_does_not_go_back_in_its_epochs() -> None:
    with generation():
        loader = loader_of()
        for _ in remaining_epochs_until(1):
            for _ in loader:
                state = loader.state_dict()
                break
        with pytest.raises(
            LoopOrderError,
            match=r"cannot go back to epoch 0, .*\. Load the states of loaders before "
            r"the first epoch loop\.",
        ):
            loader.load_state_dict(state)


def bad(**changes: Any) -> State:
    state, _ = state_after(2)
    return {**state, **changes}


def bad_fingerprint(**changes: Any) -> State:
    state, _ = state_after(2)
    return {**state, "fingerprint": {**state["fingerprint"], **changes}}


BAD_CONTENT = {
    "empty": (dict, r"\{\} is not the state of an AdaptiveDataLoader, which has"),
    "None": (lambda: None, "None is not the state of an AdaptiveDataLoader"),
    "a list": (lambda: [1], r"\[1\] is not the state of an AdaptiveDataLoader"),
    "a key too many": (lambda: bad(more=1), "is not the state of an AdaptiveData"),
    "another format": (
        lambda: bad(format=9),
        (
            r"has format 9, but this version of elasticrun reads 1\. Load it with the "
            r"version that wrote it\."
        ),
    ),
    "negative": (lambda: bad(index=-4), "but must be"),
    "a bool": (lambda: bad(index=True), "but must be"),
    "a float": (lambda: bad(index=4.0), "but must be"),
    "text": (lambda: bad(finished_loops="1"), "but must be"),
    "no flag": (lambda: bad(in_epoch=1), "but must be"),
    "beyond the end": (
        lambda: bad(index=24),
        r"is at sample 24, but a loop has 20\. It was not written by this loader\.",
    ),
    "no fingerprint": (lambda: bad(fingerprint={}), r"\{\} is not the fingerprint of"),
    "another kind": (
        lambda: bad(fingerprint={"mode": "min_size", "members": []}),
        r"The state is that of a loader of another kind \(a CombinedLoader",
    ),
    "another length": (
        lambda: bad_fingerprint(num_samples=19),
        (
            r"the loader whose state `\S+` is to load had 19 samples in the data set "
            r"\(or its sampler\), but now 20\. With other batches, samples "
            r"would be skipped or seen twice\. Load the state of a loader with the same"
        ),
    ),
    "another batch size": (
        lambda: bad_fingerprint(batch_size=5),
        "had 5 as the batch size, but now 4",
    ),
    "another seed": (lambda: bad_fingerprint(seed=7), "had 7 as the seed, but now 0"),
    "another order": (
        lambda: bad_fingerprint(shuffle=False),
        "had False as shuffle, but now True",
    ),
    "another end": (
        lambda: bad_fingerprint(drop_last=True),
        "had True as drop_last, but now False",
    ),
}


@pytest.mark.parametrize("kind", BAD_CONTENT)
def test_bad_content_is_an_error_that_says_why(kind: str) -> None:
    make, text = BAD_CONTENT[kind]
    state = make()
    with generation():
        loader = loader_of()
        with pytest.raises(CheckpointError, match=text):
            loader.load_state_dict(state)
        assert len(batches_of(loader)) == 5


def test_the_middle_of_a_batch_is_no_place_to_continue() -> None:
    state = bad(index=6)
    with generation():
        loader = loader_of()
        loader.load_state_dict(state)
        with pytest.raises(
            CheckpointError,
            match=r"`loader-0` should continue at sample 6 of 20, where no "
            r"global batch begins\.",
        ):
            batches_of(loader)


@pytest.mark.parametrize("wanted", [None, 9])
def test_after_a_break_the_state_is_the_place_of_the_break(wanted: int | None) -> None:
    def loop(loader: AdaptiveDataLoader) -> Any:
        return loader if wanted is None else loader.batches(wanted)

    loader = AdaptiveDataLoader(Numbers(20), 2, shuffle=True, name="train")
    whole = [batch.tolist() for batch in loop(loader)]
    with generation():
        loader = AdaptiveDataLoader(Numbers(20), 2, shuffle=True, name="train")
        for _ in loop(loader):
            if loader.batch_index == 3:
                break
        state = json.loads(json.dumps(loader.state_dict()))
        # For the job itself, the loop is finished.
        assert current_job().progress.position.finished_loops == 1
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loop(loader)] == whole[4:]
    with generation():
        loader = AdaptiveDataLoader(Numbers(20), 2, shuffle=True, name="train")
        loader.load_state_dict(state)
        assert [batch.tolist() for batch in loop(loader)] == whole[4:]
        for _ in loop(loader):
            break
        assert loader.state_dict()["index"] == 2
        for _ in AdaptiveDataLoader(Numbers(2), 1, name="other"):
            assert loader.state_dict()["index"] is None
