"""Random draws go on after a restart as if there had been none."""

from __future__ import annotations

import io
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import get_worker_info

from elasticrun import (
    AdaptiveDataLoader,
    remaining_epochs_until,
    request_stop,
    save_all_states,
)
from elasticrun.checkpoint.states.generators import Generators, bytes_of, seed_all
from elasticrun.data.order.shares import BatchSplit
from tests.support.data import Draws, Numbers
from tests.support.generations import (
    Crash,
    draw_from_each,
    generation,
    run_once,
    scramble_generators,
)

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

Drawn = list[tuple[str, tuple[float, ...]]]


def draw() -> tuple[float, ...]:
    # A normal number leaves a second one behind in NumPy's generator.
    return *draw_from_each(), float(np.random.standard_normal())


class Script:
    """Draws at every place of a program; may draw more in the replayed code."""

    def __init__(self, *, stop_at: str = "", more_draws: int = 0) -> None:
        self.drawn: Drawn = []
        self._stop_at = stop_at
        self._more_draws = more_draws

    def __call__(self) -> None:
        seed_all(0)
        for _ in range(self._more_draws):
            draw()
        train = AdaptiveDataLoader(Numbers(6), 2, True, name="train")
        valid = AdaptiveDataLoader(Numbers(4), 2, name="valid")
        self._loop(valid, "before")
        for epoch in remaining_epochs_until(2):
            self._at(f"epoch {epoch}")
            self._loop(train, f"train {epoch}")
            self._loop(valid, f"valid {epoch}")
        self._at("after")
        self._loop(valid, "after")

    def _loop(self, loader: AdaptiveDataLoader, name: str) -> None:
        for _ in loader:
            self._at(f"{name}, batch {loader.batch_index}")

    def _at(self, place: str) -> None:
        self.drawn.append((place, draw()))
        if place == self._stop_at:
            request_stop()


def drawn_without_restart() -> Drawn:
    script = Script()
    run_once(script)
    return script.drawn


def drawn_through_stop(directory: Path, stop_at: str) -> tuple[Drawn, Drawn]:
    first = Script(stop_at=stop_at)
    run_once(first, directory)
    second = Script(more_draws=3)
    run_once(second, directory)
    return first.drawn, second.drawn


@pytest.mark.parametrize(
    "place",
    [
        "before, batch 0",
        "train 0, batch 1",
        "valid 0, batch 0",
        "train 1, batch 0",
        "after, batch 0",
    ],
)
def test_the_generators_come_back_when_the_interrupted_loop_continues(
    tmp_path: Path, place: str
) -> None:
    whole = drawn_without_restart()
    first, second = drawn_through_stop(tmp_path, place)
    assert first == whole[: len(first)]
    rest = whole[len(first) :]
    # What it drew before is what replayed code drew, which shifts nothing.
    assert second[len(second) - len(rest) :] == rest


def test_at_the_end_of_an_epoch_they_come_back_when_the_next_one_begins(
    tmp_path: Path,
) -> None:
    def script(delivered: Drawn, stop_in: int, more_draws: int = 0) -> None:
        seed_all(0)
        for _ in range(more_draws):
            draw()
        for epoch in remaining_epochs_until(3):
            delivered.append((f"epoch {epoch}", draw()))
            if epoch == stop_in:
                request_stop()

    whole: Drawn = []
    run_once(lambda: script(whole, -1))
    parts: Drawn = []
    run_once(lambda: script(parts, 0), tmp_path)
    run_once(lambda: script(parts, -1, more_draws=5), tmp_path)
    assert parts == whole


def test_a_save_before_anything_else_keeps_them_too(tmp_path: Path) -> None:
    drawn: list[Any] = []

    def script() -> None:
        seed_all(7 + len(drawn))
        if not drawn:
            save_all_states()
        for _ in remaining_epochs_until(1):
            drawn.append(draw())
            raise Crash

    run_once(script, tmp_path)
    run_once(script, tmp_path)
    assert drawn[0] == drawn[1]


def test_a_save_during_replay_keeps_what_is_yet_to_come_back(tmp_path: Path) -> None:
    drawn: list[Any] = []

    def script(action: Callable[[], Any]) -> None:
        loader = AdaptiveDataLoader(Numbers(6), 2)
        action()
        for _ in loader:
            drawn.append((loader.batch_index, draw()))
            if loader.batch_index == 0:
                request_stop()

    def save_and_die() -> None:
        scramble_generators()
        save_all_states()
        raise Crash

    run_once(lambda: script(lambda: seed_all(0)), tmp_path)
    run_once(lambda: script(save_and_die), tmp_path)
    run_once(lambda: script(scramble_generators), tmp_path)

    interrupted = list(drawn)
    drawn.clear()
    run_once(lambda: script(lambda: seed_all(0)))
    seed_all(0)
    assert interrupted == [(number, draw()) for number in range(3)]


def test_making_and_iterating_a_loader_draws_nothing() -> None:
    with generation():
        for options in (
            {},
            {"seed_each": "sample"},
            {"num_workers": 1},
            {"num_workers": 1, "persistent_workers": True},
        ):
            seed_all(1)
            expected = draw()
            seed_all(1)
            loader = AdaptiveDataLoader(Draws(6), 2, True, **options)
            if loader.num_workers or loader.seed_each == "sample":
                list(loader)
            else:
                list(AdaptiveDataLoader(Numbers(6), 2, True))
            assert draw() == expected, options


def drawn_by_sample(loader: AdaptiveDataLoader) -> dict[int, tuple[float, ...]]:
    rows = [row for batch in loader for row in batch.tolist()]
    return {int(sample): tuple(numbers) for sample, *numbers in rows}


@pytest.mark.parametrize("num_workers", [0, 1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_draws_by_sample_depend_on_neither_world_size_nor_workers(
    num_workers: int, world_size: int
) -> None:
    with generation():
        loader = AdaptiveDataLoader(Draws(14), 5, True, seed_each="sample")
        expected = drawn_by_sample(loader)
    found: dict[int, tuple[float, ...]] = {}
    for rank in range(world_size):
        with generation():
            loader = AdaptiveDataLoader(
                Draws(14), 5, True, seed_each="sample", num_workers=num_workers
            )
            loader.shares = BatchSplit(
                **{**vars(loader.shares), "rank": rank, "world_size": world_size}
            )
            found.update(drawn_by_sample(loader))
    assert found == expected
    assert len(set(found.values())) == 14


def test_draws_by_batch_do_not_depend_on_the_number_of_workers() -> None:
    found = []
    for num_workers in (1, 2):
        with generation():
            loader = AdaptiveDataLoader(Draws(14), 5, True, num_workers=num_workers)
            found.append(drawn_by_sample(loader))
    assert found[0] == found[1]
    assert len(set(found[0].values())) == 14


class SeedOfWorker(Numbers):
    def __getitem__(self, index: int) -> Any:
        return index, get_worker_info().seed


@pytest.mark.parametrize("seed_each", ["batch", "sample"])
def test_the_seed_of_a_worker_does_not_depend_on_their_number(seed_each: Any) -> None:
    """By which a data set may seed a generator of its own."""
    found = []
    for num_workers in (1, 2):
        with generation():
            loader = AdaptiveDataLoader(
                SeedOfWorker(14), 5, num_workers=num_workers, seed_each=seed_each
            )
            found.append([seed for _, seeds in loader for seed in seeds.tolist()])
    assert found[0] == found[1]
    assert len(set(found[0])) == (3 if seed_each == "batch" else 14)


@pytest.mark.parametrize("seed_each", ["batch", "sample"])
def test_each_loop_draws_anew(seed_each: Any) -> None:
    with generation():
        loader = AdaptiveDataLoader(Draws(6), 3, num_workers=1, seed_each=seed_each)
        found = []
        for _ in remaining_epochs_until(2):
            found += [drawn_by_sample(loader), drawn_by_sample(loader)]
        other = AdaptiveDataLoader(
            Draws(6), 3, num_workers=1, seed_each=seed_each, seed=1
        )
        found.append(drawn_by_sample(other))
    assert len({draws[0] for draws in found}) == 5


@pytest.mark.parametrize(
    ("seed_each", "persistent"), [("batch", True), ("sample", False)]
)
def test_draws_in_workers_are_the_same_across_restarts(
    tmp_path: Path, seed_each: Any, persistent: bool
) -> None:
    delivered: list[Any] = []

    def script(stop_in: int) -> None:
        loader = AdaptiveDataLoader(
            Draws(14),
            3,
            True,
            num_workers=2,
            seed_each=seed_each,
            persistent_workers=persistent,
        )
        count = 0
        for _ in remaining_epochs_until(2):
            for batch in loader:
                delivered.append(batch.tolist())
                count += 1
                if count == stop_in:
                    request_stop()

    run_once(lambda: script(-1))
    whole = list(delivered)
    delivered.clear()
    for stop_in in (2, 4, -1):
        run_once(lambda stop_in=stop_in: script(stop_in), tmp_path)
    assert delivered == whole


def test_seeding_seeds_each_generator() -> None:
    seed_all(2**63 + 5)
    first = draw()
    seed_all(2**63 + 5)
    assert draw() == first
    assert random.random() != first[0]
    assert float(torch.rand(())) != first[2]


@pytest.mark.parametrize("num_before", [1, 2])
@pytest.mark.parametrize("is_alike", [True, False])
def test_a_new_rank_draws_as_the_others_where_these_draw_alike(
    num_before: int, is_alike: bool
) -> None:
    """As a program needs that puts the same noise on the parameters of all."""
    device = torch.device("cpu")
    saved = []
    for rank in range(num_before):
        torch.manual_seed(0 if is_alike else 10 + rank)
        own = Generators(device)
        own.begin()
        torch.rand(5)
        saved.append(own.capture())
    torch.manual_seed(0 if is_alike else 10 + num_before)  # As replayed code does.
    new = Generators(device)
    new.derive(saved, num_before)
    new.begin()
    new.restore()
    drawn = torch.rand(3)
    torch.manual_seed(0 if is_alike else 10)
    torch.rand(5)
    assert torch.equal(drawn, torch.rand(3)) == is_alike


@pytest.mark.parametrize("is_memory_known", [True, False])
def test_what_a_look_has_seen_becomes_what_is_saved(is_memory_known: bool) -> None:
    random.gauss(0, 1)
    np.random.randn()
    generators = Generators(torch.device("cpu"))
    if not is_memory_known:  # As of another Python, or an old NumPy.
        glance = generators._glance
        glance._python = glance._numpy = glance._marks = None
    told: list[bytes] = []
    generators.watch_anchors(told.append)
    for _ in range(2):
        packed = generators.look()
        assert packed is not None
        assert generators.look() is packed
        again = Generators(torch.device("cpu"))
        again.load(io.BytesIO(bytes_of(packed, told[-1])))
        assert again.capture() == generators.capture()
        random.random(), np.random.rand(), torch.rand(1)


DRAWS: dict[str, Callable[[], object]] = {
    "a number of Python's": random.random,
    "one that leaves another": lambda: random.gauss(0, 1),
    "as many as bring the position back": lambda: [random.random() for _ in range(312)],
    "a seed of Python's": lambda: random.seed(random.random()),
    "a number of NumPy's": np.random.rand,
    "one of NumPy's that leaves another": np.random.randn,
    "as many of NumPy's": lambda: np.random.rand(312),
    "a seed of NumPy's": lambda: np.random.seed(random.randrange(1 << 32)),
    "a number of torch's": lambda: torch.rand(1),
    "one of torch's that leaves another": lambda: torch.randn(1),
    "a double of torch's": lambda: torch.randn(1, dtype=torch.float64),
    "as many of torch's": lambda: torch.rand(624),
    "a seed of torch's": lambda: torch.default_generator.seed(),
    "a state of torch's": lambda: torch.set_rng_state(
        torch.Generator().manual_seed(random.randrange(1 << 32)).get_state()
    ),
}


@pytest.mark.parametrize("draw_once", DRAWS.values(), ids=DRAWS)
def test_a_look_sees_whatever_was_drawn_since(draw_once: Callable[[], object]) -> None:
    generators = Generators(torch.device("cpu"))
    assert generators._glance._marks is not None  # Where this test runs.
    for _ in range(3):
        before = generators.look()
        assert generators.look() is before
        draw_once()
        after = generators.look()
        assert after is not None
        assert after != before
        assert generators.look() is after
