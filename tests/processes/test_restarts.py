"""Real replicas, restarted at other world sizes: the same samples and batches."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    init,
    remaining_epochs_until,
    request_stop,
    save_all_states,
)
from elasticrun.testing import (
    read_trace,
    run_generation,
    samples_of_loop,
    start_generation,
)
from tests.support.programs import (
    LEAVE,
    Program,
    Training,
    claim,
    draw_in_first_batches,
    train_with,
)

Loops = dict[tuple[int, int], dict[int, list[int]]]  # By epoch and number: its batches.


def run(program: Program, world_size: int) -> list[Any]:
    """Run one generation, and leave its trace beside the checkpoints."""
    variables = {"ELASTICRUN_TRACE": f"{program.directory}-trace"}
    return run_generation(program, world_size, timeout=300, variables=variables)


def run_through(program: Program, *generations: tuple[int, dict[str, Any]]) -> Loops:
    """Run generations of (world size, where it ends early); return what they did."""
    for world_size, ends in generations:
        results = run(replace(program, **ends), world_size)
        expected = None if ends.get("leave_in") or ends.get("stop_in") else "finished"
        assert results == [expected] * world_size
    return delivered(program)


def delivered(program: Program) -> Loops:
    lines = read_trace(f"{program.directory}-trace")
    loops = sorted({(line["epoch"], line["loop"]) for line in lines})
    return {
        (epoch, loop): samples_of_loop(lines, epoch=epoch, loop=loop)
        for epoch, loop in loops
    }


def uninterrupted(program: Program) -> Loops:
    """Return what one replica delivers when nobody disturbs it."""
    program = replace(program, directory=f"{program.directory}-uninterrupted")
    return run_through(program, (1, {}))


def every_sample_once(batches: dict[int, list[int]], num_samples: int) -> bool:
    samples = [sample for batch in batches.values() for sample in batch]
    return sorted(samples) == list(range(num_samples))


def world_sizes_in(program: Program) -> list[int]:
    lines: Iterable[dict[str, Any]] = read_trace(f"{program.directory}-trace")
    return list({line["generation"]: line["world_size"] for line in lines}.values())


@pytest.fixture
def program(tmp_path: Path) -> Program:
    return Program(
        directory=str(tmp_path / "job"),
        loaders={"train": (40, 6), "valid": (11, 4), "extra": (11, 4)},
        in_epoch=("train", "valid"),
        num_epochs=2,
    )


def test_a_stop_in_the_fifth_generation_after_4_1_3_2_replicas(
    program: Program,
) -> None:
    loops = run_through(
        program,
        (4, {"stop_in": (0, "train", 1)}),
        (1, {"stop_in": (0, "train", 5)}),
        (3, {"leave_in": (0, "valid", 1)}),
        (2, {"stop_in": (1, "train", 0)}),
        (3, {"leave_in": (1, "valid", 2)}),
        (2, {}),
    )
    assert world_sizes_in(program) == [4, 1, 3, 2, 3, 2]
    assert loops == uninterrupted(program)
    assert len(loops) == 4
    for (_, loop), batches in loops.items():
        assert every_sample_once(batches, (40, 11)[loop])


def test_a_stop_that_one_replica_asks_for_ends_all_of_them_alike(
    program: Program,
) -> None:
    stopping = replace(program, stop_in=(0, "train", 0))
    variables = {"ELASTICRUN_TRACE": f"{program.directory}-trace"}
    with start_generation(stopping, 3, variables=variables) as generation:
        outcomes = generation.wait(timeout=300)
    assert [outcome.exit_code for outcome in outcomes] == [LEAVE] * 3
    lines = read_trace(f"{program.directory}-trace")
    last = {
        line["rank"]: (line["epoch"], line["loop"], line["batch"]) for line in lines
    }
    assert len(set(last.values())) == 1
    run(program, 2)
    assert delivered(program) == uninterrupted(program)


def test_three_loaders_in_one_epoch_and_a_stop_in_the_third(program: Program) -> None:
    program = replace(program, in_epoch=("train", "valid", "extra"))
    loops = run_through(
        program,
        (3, {"leave_in": (0, "extra", 1)}),
        (2, {"leave_in": (1, "extra", 2)}),
        (1, {}),
    )
    assert loops == uninterrupted(program)
    # Two loaders of one length have two orders.
    assert loops[0, 1] != loops[0, 2]
    assert loops[0, 1] != loops[1, 1]


def test_one_loader_looped_twice_in_an_epoch(program: Program) -> None:
    program = replace(program, in_epoch=("valid", "valid"), num_epochs=1)
    loops = run_through(program, (2, {"leave_in": (0, "valid", 1)}), (3, {}))
    assert loops == uninterrupted(program)
    assert all(every_sample_once(batches, 11) for batches in loops.values())
    assert loops[0, 0] != loops[0, 1]


def test_evaluation_before_training_and_a_stop_during_validation(
    program: Program,
) -> None:
    program = replace(program, before=("valid",), after=("extra",))
    loops = run_through(
        program,
        (2, {"leave_in": (None, "valid", 1)}),
        (3, {"leave_in": (0, "valid", 1)}),
        (1, {"leave_in": (1, "valid", 0)}),
        (2, {"leave_in": (None, "extra", 1)}),
        (3, {}),
    )
    assert loops == uninterrupted(program)
    assert len(loops) == 6


def test_an_exception_caught_inside_an_epoch(program: Program) -> None:
    program = replace(program, fail_in=(0, "train", 2))
    loops = run_through(program, (3, {"leave_in": (0, "valid", 1)}), (2, {}))
    assert loops == uninterrupted(program)
    assert len(loops[0, 0]) == 3
    assert len(loops[1, 0]) == 7


@pytest.mark.parametrize("is_even", [True, False])
@pytest.mark.parametrize("num_replicas", [4, 16])
def test_ten_samples_are_ten_at_any_world_size(
    program: Program, num_replicas: int, is_even: bool
) -> None:
    program = replace(
        program,
        loaders={"valid": (10, 10)},
        in_epoch=("valid",),
        num_epochs=1,
        options={"even_batches": is_even},
    )
    loops = run_through(program, (num_replicas, {}))
    assert loops == uninterrupted(program)
    lines = read_trace(f"{program.directory}-trace")
    sizes = [line["num_valid"] for line in lines]
    num_read = sum(len(line["indices"]) for line in lines)
    assert sum(sizes) == 10
    if num_replicas == 4:
        assert sizes == [3, 3, 2, 2]
        assert num_read == 10
    else:
        assert sizes == ([1] * 10 + [0] * 6 if is_even else [1] * 10)
        assert num_read == (16 if is_even else 10)


def test_a_data_set_smaller_than_the_world_size(program: Program) -> None:
    program = replace(program, loaders={"train": (2, 1), "valid": (3, 8)}, num_epochs=2)
    loops = run_through(
        program,
        (4, {"leave_in": (0, "train", 1)}),
        (3, {"leave_in": (1, "valid", 0)}),
        (4, {}),
    )
    assert loops == uninterrupted(program)


def test_without_padding_each_sample_is_counted_once(program: Program) -> None:
    program = replace(program, options={"even_batches": False, "seed": 3})
    loops = run_through(
        program,
        (3, {"leave_in": (0, "train", 1)}),
        (4, {"leave_in": (1, "valid", 1)}),
        (2, {}),
    )
    assert loops == uninterrupted(program)
    lines = read_trace(f"{program.directory}-trace")
    assert all(line["num_valid"] == len(line["indices"]) for line in lines)


def test_micro_batches_do_not_show_in_global_ones(program: Program) -> None:
    expected = uninterrupted(program)
    program = replace(program, options={"max_local_batch_size": 2})
    loops = run_through(
        program,
        (3, {"leave_in": (0, "train", 3)}),
        (1, {"leave_in": (1, "train", 2)}),
        (2, {}),
    )
    assert loops == expected
    assert (
        max(len(line["indices"]) for line in read_trace(f"{program.directory}-trace"))
        == 2
    )


def test_a_generator_comes_back_on_its_rank_and_new_ranks_derive_their_own(
    tmp_path: Path,
) -> None:
    first = run_generation(
        lambda: draw_in_first_batches(str(tmp_path / "job"), is_first=True), 2
    )
    shutil.copytree(tmp_path / "job", tmp_path / "copy")
    second = run_generation(
        lambda: draw_in_first_batches(str(tmp_path / "job"), is_first=False), 4
    )
    again = run_generation(
        lambda: draw_in_first_batches(str(tmp_path / "copy"), is_first=False), 4
    )
    assert second == again
    # What was drawn after the save in batch 1 is drawn when that batch comes again.
    assert [drawn[0] for drawn in second[:2]] == [drawn[1] for drawn in first]
    assert len({drawn[0] for drawn in second}) == 4
    for part in range(3):
        assert len({drawn[0][part] for drawn in second}) == 4


class Langevin(torch.optim.SGD):
    """Adds noise to the parameters in each step, the same on all replicas."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=0.01)


def train_with_noise(directory: str, stop_in: int | None = None) -> list[float]:
    """Train with one seed on all replicas, and a task that is drawn for each batch."""
    init(directory, save_interval="off", async_save=False)
    torch.manual_seed(0)
    random.seed(0)
    rows = torch.randn(40, 4)
    net = nn.Linear(4, 2)
    optimizer = Langevin(net.parameters(), lr=0.05)
    model = AdaptiveDataParallel(net, optimizer)
    train = AdaptiveDataLoader(rows, batch_size=8, shuffle=True)
    for epoch in remaining_epochs_until(3):
        for number, features in train.enumerate():
            optimizer.zero_grad()
            task = random.randrange(2)
            model(features)[:, task].square().mean().backward()
            optimizer.step()
            if epoch * 5 + number == stop_in:
                request_stop()
    save_all_states()  # Which refuses replicas that have drifted apart.
    return net.weight.flatten().tolist()


def test_replicas_that_draw_alike_do_so_at_any_number(tmp_path: Path) -> None:
    def run(name: str, size: int, *stop_in: int) -> list[list[float] | None]:
        return run_generation(train_with_noise, size, str(tmp_path / name), *stop_in)

    (end,) = run("calm-1", 1)
    assert end is not None
    for size in (2, 3):
        ends = run(f"calm-{size}", size)
        assert ends[1:] == ends[:-1]
        assert ends[0] == pytest.approx(end, abs=1e-6)
    for size, stop_in in ((1, 2), (2, 6), (3, 10)):
        assert run("scaled", size, stop_in) == [None] * size
    ends = run("scaled", 2)
    assert ends[1:] == ends[:-1]
    assert ends[0] == pytest.approx(end, abs=1e-6)


def test_a_state_claimed_only_in_a_later_phase(tmp_path: Path) -> None:
    def phase(values: dict[str, int], *, num_saves: int = 1, keep: int = 3) -> Any:
        return lambda: claim(
            str(tmp_path), values=values, num_saves=num_saves, keep=keep
        )

    assert (
        run_generation(phase({"early": 1, "late": 2}), 2)
        == [{"early": 0, "late": 0}] * 2
    )
    # It saves twice and more, which prunes the checkpoint that `late` came from.
    assert (
        run_generation(phase({"early": 3}, num_saves=3, keep=1), 3)
        == [{"early": 1}] * 3
    )
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [
        "checkpoint-00000004"
    ]
    assert run_generation(phase({"late": 4}), 1) == [{"late": 2}]
    assert (
        run_generation(phase({"early": 0, "late": 0}), 2)
        == [{"early": 3, "late": 4}] * 2
    )


@pytest.mark.slow
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_the_model_is_bit_identical_at_an_unchanged_world_size(
    tmp_path: Path, num_replicas: int
) -> None:
    whole = run_generation(
        lambda: train_with(str(tmp_path / "whole"), Training(num_workers=2)),
        num_replicas,
    )
    for stop_in in (2, 9):
        training = Training(num_workers=1, stop_in=stop_in)
        run_generation(
            lambda training=training: train_with(str(tmp_path / "job"), training),
            num_replicas,
        )
    end = run_generation(
        lambda: train_with(str(tmp_path / "job"), Training(num_workers=1)),
        num_replicas,
    )
    assert end == whole
    assert all(parameters == whole[0] for parameters in whole)
