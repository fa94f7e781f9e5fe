"""A mix of several data sets."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    Mixed,
    request_stop,
)
from tests.support.generations import run_once
from tests.support.numbered_streams import Numbers, flat


def test_a_mix_can_be_sent_to_another_process() -> None:
    mix = Mixed(SOURCES, {"a": 3, "b": 1}, num_samples=40, block=20)
    assert len(mix) == 40  # Which makes its lanes.
    assert pickle.loads(pickle.dumps(mix))[53] == -1


SOURCES = {"a": Numbers(40, 13, lanes=2, window=5), "b": [-n for n in range(1, 11)]}


def test_shares_are_exact_and_sources_go_on_in_passes(job: Any) -> None:
    mix = Mixed(SOURCES, {"a": 3, "b": 1}, block=20)
    loader = AdaptiveDataLoader(mix, 10, shuffle=True)
    samples, sources = [], []
    for batch in loader.batches(40):
        samples += batch.tolist()
        sources += loader.sources
    assert all(
        ("b" if n < 0 else "a") == s for n, s in zip(samples, sources, strict=True)
    )
    for at in range(0, 400, 20):
        assert sources[at : at + 20].count("b") == 5
    own = [number for number in samples if number >= 0]
    assert sorted(own[:53]) == sorted(own[53:106]) == list(range(53))
    assert own[:53] != own[53:106]


def test_weights_follow_a_plan_of_samples_seen(job: Any) -> None:
    plan = {0: {"a": 1, "b": 1}, 35: {"a": 0, "b": 1}}
    loader = AdaptiveDataLoader(Mixed(SOURCES, plan, block=10), 10)
    signs = [sample < 0 for sample in flat(loader.batches(8))]
    assert [sum(signs[at : at + 10]) for at in range(0, 80, 10)] == [5] * 4 + [10] * 4


def test_a_loop_over_a_mix_has_the_samples_that_were_said(tmp_path: Path) -> None:
    def script(is_stopped: bool) -> list[int]:
        mix = Mixed(SOURCES, {"a": 1, "b": 1}, num_samples=50, block=10)
        for batch in AdaptiveDataLoader(mix, 8, shuffle=True):
            delivered.extend(batch.tolist())
            if is_stopped:
                request_stop()
        return delivered

    delivered: list[int] = []
    calm = run_once(lambda: script(False))
    assert len(calm) == 50
    delivered = []
    assert run_once(lambda: script(True), tmp_path) is None
    assert run_once(lambda: script(False), tmp_path) == calm


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"a": 1}, "give each of the sources"),
        ({"a": 1, "b": -1}, "from 0 up"),
        ({"a": 0, "b": 0}, "more than 0"),
        ({5: {"a": 1, "b": 1}}, "beginning with 0"),
        ({"a": 1000, "b": 0.1}, "has no sample in a block of 20"),
    ],
)
def test_weights_that_say_nothing_are_refused(
    job: Any, weights: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        len(Mixed(SOURCES, weights, block=20))


def test_what_a_sample_is_called() -> None:
    mix = Mixed(SOURCES, {"a": 1, "b": 1})
    assert mix.describe(45) == "sample 5 of stream 1"
    assert mix.describe(55) == "sample 2 of b"
