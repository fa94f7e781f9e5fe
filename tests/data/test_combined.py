"""`CombinedLoader`: several loaders in one loop with one place."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    CheckpointError,
    CombinedLoader,
    ElasticRunError,
    LoopOrderError,
    current_dataloader,
    remaining_epochs_until,
    request_stop,
)
from elasticrun.checkpoint.states.generators import seed_all
from elasticrun.job.current import current_job
from elasticrun.testing import read_trace, samples_of_loop
from tests.support.data import Draws, Numbers, Workers
from tests.support.generations import generation, run_once

pytestmark = pytest.mark.usefixtures("job")


def pair(mode: Any = "min_size", **options: Any) -> CombinedLoader:
    """Combine 7 samples by 2, which are 4 batches, and 6 by 3, which are 2."""
    return CombinedLoader(
        {
            "long": AdaptiveDataLoader(Numbers(7), 2, True, name="long", **options),
            "short": AdaptiveDataLoader(Numbers(6), 3, True, name="short", **options),
        },
        mode,
        name="both",
    )


def values(turn: Any) -> Any:
    if isinstance(turn, dict):
        return {key: values(batch) for key, batch in turn.items()}
    return turn.tolist()


def test_min_size_ends_with_the_shortest_member() -> None:
    both = pair()
    turns = [values(turn) for turn in both]
    assert len(both) == len(turns) == 2
    assert sorted(x for turn in turns for x in turn["short"]) == list(range(6))
    assert len({x for turn in turns for x in turn["long"]}) == 4


def test_max_size_cycle_begins_the_others_again_in_a_new_order() -> None:
    both = pair("max_size_cycle")
    turns = [values(turn) for turn in both]
    assert len(both) == len(turns) == 4
    passes = [[x for turn in turns[i : i + 2] for x in turn["short"]] for i in (0, 2)]
    assert all(sorted(order) == list(range(6)) for order in passes)
    assert passes[0] != passes[1]


def test_a_list_of_loaders_gives_lists() -> None:
    loaders = [AdaptiveDataLoader(Numbers(4), 2), AdaptiveDataLoader(Numbers(6), 3)]
    both = CombinedLoader(loaders)
    assert [values(a) + values(b) for a, b in both] == [
        [0, 1, 0, 1, 2],
        [2, 3, 3, 4, 5],
    ]


def test_members_of_one_data_set_have_orders_of_their_own() -> None:
    loaders = [AdaptiveDataLoader(Numbers(50), 50, shuffle=True) for _ in range(2)]
    [(first, second)] = CombinedLoader(loaders)
    assert values(first) != values(second)


def test_members_are_at_their_own_place() -> None:
    both = pair("max_size_cycle", max_local_batch_size=2)
    long, short = both._members.values()
    seen = [
        (
            (both.batch_index, both.index, both.is_first, both.is_step),
            (long.num_valid, long.index, long.is_step, long.loss_weight),
            (short.num_valid, short.index, short.is_step),
        )
        for _ in both
    ]
    # Three samples need two micro-batches, so the two beside them have two as well.
    assert seen[:4] == [
        ((0, 0, True, False), (1, 0, False, 0.5), (2, 0, False)),
        ((0, 0, False, True), (1, 0, True, 0.5), (1, 0, True)),
        ((1, 1, True, False), (1, 2, False, 0.5), (2, 3, False)),
        ((1, 1, False, True), (1, 2, True, 0.5), (1, 3, True)),
    ]
    # The shorter one begins again, and the last batch of the longer one is one sample.
    assert seen[6:] == [
        ((3, 3, True, False), (1, 6, False, 1.0), (2, 9, False)),
        ((3, 3, False, True), (0, 6, True, 0.0), (1, 9, True)),
    ]
    assert (long.num_valid, long.where) == (0, "no loop")


def _deliver(
    loops: Callable[[CombinedLoader], Any], seen: list[Any], stop_in: int, mode: str
) -> None:
    both = pair(mode)
    for turn in loops(both):
        seen.append(values(turn))
        if len(seen) == stop_in:
            request_stop()


def over_epochs(both: CombinedLoader) -> Any:
    for _ in remaining_epochs_until(2):
        yield from both


def in_segments(both: CombinedLoader) -> Any:
    for _ in remaining_epochs_until(3):
        yield from both.batches(3)


def by_hand(both: CombinedLoader) -> Any:
    turns = iter(both)
    for _ in range(10 - both.first_batch):
        try:
            yield next(turns)
        except StopIteration:
            turns = iter(both)
            yield next(turns)


def in_a_body(both: CombinedLoader) -> Any:
    for _ in AdaptiveDataLoader(Numbers(3), 1, name="outer"):
        turns = [*both, *both.batches(1)]
        yield turns[0]
        yield turns[-1]


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
@pytest.mark.parametrize("loops", [over_epochs, in_segments, in_a_body])
def test_stops_do_not_show(
    tmp_path: Path, mode: str, loops: Callable[[CombinedLoader], Any]
) -> None:
    calm: list[Any] = []
    run_once(lambda: _deliver(loops, calm, -1, mode))
    seen: list[Any] = []
    for stop_in in (1, 4, 5, 6, -1):
        run_once(lambda stop_in=stop_in: _deliver(loops, seen, stop_in, mode), tmp_path)
    assert [str(turn) for turn in seen] == [str(turn) for turn in calm]


def test_passes_asked_by_hand(tmp_path: Path) -> None:
    calm: list[Any] = []
    run_once(lambda: _deliver(by_hand, calm, -1, "min_size"))
    assert len(calm) == 10
    seen: list[Any] = []
    for stop_in in (3, 8):
        run_once(
            lambda stop_in=stop_in: _deliver(by_hand, seen, stop_in, "min_size"),
            tmp_path,
        )
    assert seen == calm[:8]


def test_batches_go_on_over_all_loops() -> None:
    with generation():
        whole = [values(turn) for turn in pair().batches(9)]
    both = pair()
    parts = [values(turn) for turn in both.batches(4)]
    assert both.finished_batches == 4
    for turn in both.batches():
        parts.append(values(turn))
        if both.finished_batches == 6:  # It was the seventh that is left here.
            break
    assert len(both.batches(2)) == 2
    assert [*parts, *map(values, both.batches(2))] == whole
    for key, size in (("long", 7), ("short", 6)):
        samples = [x for turn in whole for x in turn[key]]
        assert sorted(samples[:size]) == sorted(samples[size : 2 * size])
    assert both._members["long"].finished_batches == 0


def test_a_state_of_its_own(tmp_path: Path) -> None:
    both = pair("max_size_cycle")
    rest = []
    for turn in both:
        if both.batch_index == 1:
            with pytest.raises(
                LoopOrderError, match=r"the loop over `both`\. Take that"
            ):
                both._members["long"].state_dict()
            state = json.loads(json.dumps(both.state_dict()))
        if both.batch_index > 1:
            rest.append(values(turn))
    with generation(tmp_path):
        again = pair("max_size_cycle")
        again.load_state_dict(state)
        assert again.first_batch == 2
        assert [values(turn) for turn in again] == rest
    with (
        generation(),
        pytest.raises(CheckpointError, match="'max_size_cycle' as the m"),
    ):
        pair("min_size").load_state_dict(state)


def test_draws_and_workers_of_members(tmp_path: Path) -> None:
    def script(stop_in: int = -1) -> None:
        both = CombinedLoader(
            [
                AdaptiveDataLoader(
                    Draws(8), 2, num_workers=2, persistent_workers=True, name="a"
                ),
                AdaptiveDataLoader(Draws(6), 2, seed_each="sample", name="b"),
                AdaptiveDataLoader(Draws(9), 3, name="c"),
            ],
            "max_size_cycle",
            name="all",
        )
        for _ in remaining_epochs_until(2):
            for turn in both:
                seen.append([batch.tolist() for batch in turn])
                if len(seen) == stop_in:
                    request_stop()

    seen: list[Any] = []

    def seeded(stop_in: int = -1) -> None:
        seed_all(0)
        script(stop_in)

    run_once(seeded)
    calm, seen = seen, []
    run_once(lambda: seeded(3), tmp_path)
    run_once(seeded, tmp_path)
    assert seen == calm


def test_workers_end_with_the_loop() -> None:
    both = CombinedLoader(
        [AdaptiveDataLoader(Workers(4), 2, num_workers=1, name=name) for name in "ab"]
    )
    for first, second in both:
        assert first[1][0] != second[1][0] != -1
        assert len(multiprocessing.active_children()) == 2
        break
    assert multiprocessing.active_children() == []


def test_the_trace_has_a_line_for_each_member(tmp_path: Path) -> None:
    with generation(trace_dir=str(tmp_path)):
        turns = [values(turn) for turn in pair("max_size_cycle")]
    lines = read_trace(tmp_path)
    assert [line["member"] for line in lines] == ["long", "short"] * 4
    assert samples_of_loop(lines, epoch=0, loop=0) == {
        number: turn["long"] + turn["short"] for number, turn in enumerate(turns)
    }


def test_what_a_job_knows_of_it() -> None:
    both = pair()
    for _ in both:
        assert current_dataloader() is both
        place = str(current_job().progress.position)
        assert place.endswith(f", step {both.index} of `both`")
        break
    assert current_dataloader() is None
    assert list(both.enumerate())[-1][0] == 1


def test_one_weight_for_all_losses_where_batches_divide_alike() -> None:
    both = pair()
    assert both.has_one_weight
    for _ in both:
        assert both.loss_weight == 1.0


def test_no_common_weight_where_a_batch_in_sight_does_not_divide_alike() -> None:
    # Into two micro-batches 4 and 8 divide alike, but the last ones are 3 and 8.
    both = CombinedLoader(
        {
            "a": AdaptiveDataLoader(Numbers(7), 4, max_local_batch_size=2),
            "b": AdaptiveDataLoader(Numbers(16), 8),
        },
        name="both",
    )
    for _ in both:
        assert not both.has_one_weight
        with pytest.raises(
            ElasticRunError,
            match=r"of `both` \(test_combined\.py:\d+\) in its step 1 have 3, 8 samples"
            r".*among 1 replica and 2 micro-batches.*model\.weigh\(loss, member=a\)",
        ):
            print(both.loss_weight)


def test_a_member_without_samples_in_a_step_has_no_weight_there() -> None:
    own = AdaptiveDataLoader(Numbers(4), batch_sampler=[[1, 2], []], name="own")
    model = AdaptiveDataParallel(torch.nn.Linear(1, 1))
    has_gradients = []
    for first, _ in CombinedLoader([own, AdaptiveDataLoader(Numbers(4), 2)]):
        model.zero_grad()
        loss = model(first[:, None].float()).mean()
        model.weigh(loss, member=own).backward(retain_graph=True)
        has_gradients.append(bool(model.module.bias.grad.any()))
        with pytest.raises(ElasticRunError, match="in its step 1 have 0, 2 samples"):
            loss.backward()
    assert has_gradients == [True, False]


def nested(outer: Any, inner: Any) -> None:
    for _ in outer:
        list(inner)


def test_a_member_cannot_be_looped_over_beside() -> None:
    both = pair()
    long = both._members["long"]
    with pytest.raises(LoopOrderError, match="`both` .*of which it is a member"):
        nested(both, long)
    with pytest.raises(LoopOrderError, match="body of that over its member `long`"):
        nested(long, both)
    with pytest.raises(LoopOrderError, match="while another one over it"):
        nested(both, both)
    list(long)
    list(both)


def bad(*members: Any, mode: Any = "min_size") -> None:
    CombinedLoader(list(members), mode)


def test_what_cannot_be_combined_is_refused() -> None:
    loader = AdaptiveDataLoader(Numbers(4), 2)
    uneven = AdaptiveDataLoader(Numbers(4), 2, even_batches=False)
    small = AdaptiveDataLoader(Numbers(1), 2, drop_last=True, name="small")
    with pytest.raises(ValueError, match="without loaders"):
        bad()
    with pytest.raises(TypeError, match="member 1 of a CombinedLoader is a list"):
        bad(loader, [loader])
    with pytest.raises(TypeError, match="not one AdaptiveDataLoader"):
        CombinedLoader(loader)  # type: ignore[arg-type]
    assert current_job().progress.position.finished_loops == 0
    with pytest.raises(ValueError, match="one loader twice"):
        bad(loader, loader)
    with pytest.raises(ValueError, match="has even_batches=False"):
        bad(loader, uneven)
    with pytest.raises(ValueError, match="mode='zip' is none of"):
        bad(loader, mode="zip")
    with pytest.raises(ValueError, match="'sequential'.* Loop over one loader after"):
        bad(loader, mode="sequential")
    with pytest.raises(ValueError, match="'max_size'.* Take mode='max_size_cycle'"):
        bad(loader, mode="max_size")
    with pytest.raises(ValueError, match="`small` is to begin again"):
        len(CombinedLoader([loader, small], "max_size_cycle"))
    with pytest.raises(ValueError, match="are fewer than one batch"):
        CombinedLoader([loader, small]).batches(2)
