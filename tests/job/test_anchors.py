"""Replayed code sees what the first run saw: small values of states, and draws."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import enum
import pickle
import random
from collections import Counter, deque
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest
import torch
from torch import nn

from elasticrun import (
    AdaptiveDataLoader,
    AdaptiveDataParallel,
    LogFile,
    State,
    Variables,
    generation,
    rank,
    register,
    remaining_epochs_until,
    remaining_steps_until,
    request_stop,
    save_all_states,
)
from elasticrun.checkpoint.states.anchor_notes import AnchorNotes
from elasticrun.checkpoint.states.generators import Generators
from elasticrun.job.replay import Anchors
from elasticrun.testing import Job, run_generation
from tests.support.data import Numbers
from tests.support.generations import Crash, run_once


class Levels(Numbers):
    level = 0.0

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + self.level


class Phase(enum.Enum):
    WARM = 1
    MAIN = 2


@dataclasses.dataclass
class Best:
    epoch: int
    scores: list[float]


class Kept(State):
    """Has attributes of all kinds that are copied, one that is not, and its rank."""

    def __init__(self) -> None:
        super().__init__("kept")
        self.phase, self.best, self.day = Phase.WARM, None, datetime.date(2024, 1, 1)
        self.window, self.counts = deque[int](maxlen=3), Counter[str]()
        self.sums, self.seen, self.folder = np.zeros(2), set[Any](), Path("runs")
        self.helper, self.rank = object(), rank()

    def save(self, fileobj: BinaryIO) -> None:
        own = {"helper", "rank"}
        pickle.dump({k: v for k, v in vars(self).items() if k not in own}, fileobj)

    def load(self, fileobj: BinaryIO) -> None:
        vars(self).update(pickle.load(fileobj))

    def advance(self) -> None:
        number = len(self.seen)
        self.phase = Phase.MAIN if self.phase is Phase.WARM else Phase.WARM
        best: Any = Best(number, [0.5 * number]) if number % 3 else None
        self.best, self.day = best, self.day + datetime.timedelta(1)
        self.window.append(number)
        self.counts[f"n{number % 2}"] += 1
        self.sums += number
        self.seen.add((number, Phase.MAIN))
        self.folder = Path("runs") / str(number)

    def look(self) -> Any:
        own = {k: v for k, v in vars(self).items() if k != "helper"}
        return copy.deepcopy({**own, "sums": self.sums.tolist()})


class Tracker:
    """An object of the program's own with a state dictionary."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def state_dict(self) -> dict[str, Any]:
        return {"rows": [*self.rows], "number": torch.tensor(len(self.rows))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        assert len(state["rows"]) == int(state["number"])
        self.rows = [*state["rows"]]


def script(stop_in: int) -> Any:
    """Derive values from states, and draw, wherever code is replayed."""
    torch.manual_seed(rank())
    random.seed(rank())
    net = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    v = Variables(stage=0, rows=[], best=None)
    data = Levels(4)
    train = AdaptiveDataLoader(data, batch_size=2, shuffle=True, name="train")
    valid = AdaptiveDataLoader(data, batch_size=2, name="valid")
    kept, tracker = Kept(), Tracker()
    register(tracker=tracker)
    seen: list[Any] = []

    def advance() -> Any:
        kept.advance()
        tracker.rows.append(v.stage)
        return kept.look(), [*tracker.rows]

    def body(*values: Any) -> None:
        seen.append(values)
        if len(seen) == stop_in and generation() == 0:
            request_stop()

    def step(x: Any, scale: float) -> None:
        optimizer.zero_grad()
        (model(x.reshape(-1, 1).float()).mean() * scale).backward()
        optimizer.step()

    mask = torch.rand(1).item()
    for epoch in remaining_epochs_until(2):
        v.stage += 1
        data.level = 0.1 * v.stage
        draw, others = torch.rand(1).item(), advance()
        for x in train:
            rate = optimizer.param_groups[0]["lr"]
            body(epoch, x.tolist(), mask, draw, rate, others)
            torch.rand(1)
            step(x, draw)
        scheduler.step()
        v.rows.append(v.stage)
        scale, rows = optimizer.param_groups[0]["lr"], [*v.rows]
        bias, noise, v.best = net.bias.item(), random.random(), v.stage
        others = advance()
        for x in valid:
            body(epoch, x.tolist(), scale, rows, bias, noise, v.best, others)
            step(x, scale)
        body(epoch, "end", v.stage)
    v.stage += 10
    data.level = 0.1 * v.stage
    after = (v.stage, torch.rand(1).item(), net.bias.item(), advance())
    for x in valid:
        body("after", x.tolist(), after)
        step(x, 1.0)
    v.stage += 10
    torch.rand(1)
    between = (v.stage, torch.rand(1).item(), advance())
    for number in remaining_steps_until(2):
        body("steps", number, between)
    return seen, net.weight.item(), v.stage, torch.rand(1).item(), kept.look()


def test_what_replayed_code_derives_and_draws_is_what_it_was(tmp_path: Path) -> None:
    calm, *end = run_once(partial(script, -1), tmp_path / "calm")
    for stop_in in range(1, len(calm)):
        directory = tmp_path / str(stop_in)
        assert run_once(partial(script, stop_in), directory) is None
        seen, *found = run_once(partial(script, stop_in), directory)
        assert seen == calm[stop_in:], stop_in
        assert found == end, stop_in


@pytest.mark.slow
def test_each_of_two_replicas_sees_and_draws_what_it_had(tmp_path: Path) -> None:
    def run(directory: str, stop_in: int) -> Any:
        variables = {"ELASTICRUN_CHECKPOINT_DIR": str(tmp_path / directory)}
        return run_generation(partial(script, stop_in), 2, variables=variables)

    calm = run("calm", -1)
    assert calm[0] != calm[1]
    stop_in = len(calm[0][0]) // 2
    assert run("stopped", stop_in) == [None, None]
    for (seen, *end), (found, *found_end) in zip(calm, run("stopped", -1), strict=True):
        # The replicas agree on this boundary, or on one a little later.
        assert 0 < len(found) <= len(seen) - stop_in
        assert found == seen[-len(found) :]
        assert found_end == end


def saving_by_hand(directory: Path, die_in: int) -> Any:
    """Save in the middle of each zone, and go on changing what is saved."""
    torch.manual_seed(0)
    net = nn.Linear(2000, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    optimizer.step()  # Before the scheduler's first step, as torch wants it.
    model = AdaptiveDataParallel(net, optimizer, scheduler)
    v = Variables(number=0, draws=[])
    train = AdaptiveDataLoader(Numbers(4), batch_size=2, name="train")
    log = LogFile(directory / "log.txt")
    moments, level = 0, 0.0

    def moment() -> None:
        nonlocal moments
        moments += 1
        if moments == die_in and generation() == 0:
            raise Crash

    def change(where: str) -> Path:
        nonlocal level
        moment()
        for part in "before", "after":
            v.number = 2 * v.number + 1
            v.draws.append(torch.rand(1).item())
            scheduler.step()
            with torch.no_grad():
                net.weight.mul_(2).add_(1)
            log.write(f"{where} {part}\n")
            if part == "before":
                path = save_all_states()
                assert isinstance(path, Path)
                level = 0.1 * v.number
            moment()
        return path

    def loop() -> None:
        for x in train:
            optimizer.zero_grad()
            (model(torch.ones(1, 2000)) * x.sum() * level).sum().backward()
            optimizer.step()
            moment()

    loop()
    change("before epochs")
    for _ in remaining_epochs_until(1):
        for zone in "A", "B":
            change(zone)
            loop()
        change("C")
    list(remaining_epochs_until(1))  # None remains.
    change("D")
    loop()
    newest = change("end").name  # Replayed code has written none.
    log.flush()
    end = (v.number, v.draws, scheduler.get_last_lr(), net.weight.sum().item())
    return moments, end, newest, (directory / "log.txt").read_text()


def test_a_kill_behind_a_save_by_hand_does_not_show(tmp_path: Path) -> None:
    def run(name: str, die_in: int) -> Any:
        script = partial(saving_by_hand, tmp_path / name, die_in)
        return run_once(script, tmp_path / name / "job")

    num_moments, *calm = run("calm", 0)
    for die_in in range(1, num_moments):
        assert run(str(die_in), die_in) is None
        _, *found = run(str(die_in), 0)
        assert found == calm, die_in


@pytest.mark.parametrize(("num_loops", "text"), [(1000, "a"), (20, "a" * 1_000_000)])
def test_above_a_bound_no_values_are_noted_which_is_said_once(
    num_loops: int, text: str, job: Job, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="elasticrun")
    v = Variables(number=0, text=text)
    anchors = Anchors(job.states)
    for number in range(num_loops + 2):
        v.number, v.text = number, text + str(number)
        is_known = number < min(num_loops, 16)
        anchors.add((0, number, True))
        if is_known or number >= num_loops:
            assert bool(anchors.noted[True].at((0, 0, True))) == is_known
    said = [each for each in caplog.messages if "an epoch has over 1,000 loops" in each]
    assert len(said) == 1
    anchors.add((1, 0, False))
    assert anchors.noted[False].at((1, 0, False))


class Placed(State):
    """Has what each process has of its own, and does not save that."""

    def __init__(self, device: str, path: str) -> None:
        super().__init__("placed")
        self.device, self.path, self.number = torch.device(device), path, 0

    def save(self, fileobj: BinaryIO) -> None:
        fileobj.write(str(self.number).encode())

    def load(self, fileobj: BinaryIO) -> None:
        self.number = int(fileobj.read())


def test_what_a_process_has_of_its_own_stays(tmp_path: Path) -> None:
    """As its rank or device, which may be others after a restart, or on others."""

    def script(device: str, path: str) -> None:
        placed, seen[:] = Placed(device, path), []
        save_all_states()
        train = AdaptiveDataLoader(Numbers(3), batch_size=1)
        for _ in remaining_epochs_until(1):
            for _ in range(2):
                placed.number += 1
                seen.append((placed.device.type, placed.path, placed.number))
                for _ in train:
                    placed.number += 10
                    request_stop()

    seen: list[Any] = []
    for number, device in enumerate(["cuda", "cpu", "cpu", "cpu", "cuda", "cpu"]):
        run_once(partial(script, device, "a" * number), tmp_path)
        own = (device, "a" * number)
        assert seen == [(*own, 1), (*own, 32)][: 1 + (number >= 3)], number


def many_loops(num_loops: int, stop_in: int) -> tuple[list[float], float]:
    torch.manual_seed(0)
    train = AdaptiveDataLoader(Numbers(2), batch_size=1)
    draws = []
    for _ in remaining_epochs_until(1):
        for number in range(num_loops):
            draws.append(torch.rand(1).item())
            for _ in train:
                torch.rand(1)  # Not in a loop that is skipped.
                if number == stop_in:
                    request_stop()
    return draws, torch.rand(1).item()


@pytest.mark.parametrize("num_loops", [60, 1001])
def test_draws_between_many_loops_are_the_same_up_to_a_bound(
    num_loops: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="elasticrun")
    calm, *end = run_once(partial(many_loops, num_loops, -1))
    assert run_once(partial(many_loops, num_loops, num_loops - 1), tmp_path) is None
    draws, *found = run_once(partial(many_loops, num_loops, -1), tmp_path)
    assert found == end
    assert (draws == calm) == (num_loops <= 1000)
    assert sum("also draws anew" in each for each in caplog.messages) == (draws != calm)


def test_a_record_has_room_for_the_draws_of_some_loops_alone() -> None:
    generators, sizes = Generators(torch.device("cpu")), []
    for number in range(60):
        torch.rand(1)
        generators.note((0, number, True))
        saved = len(generators.capture()), len(generators.capture_for_record())
        sizes.append(saved)
    assert all(saved == recorded for saved, recorded in sizes[:20])
    assert all(recorded < 1 << 18 for _, recorded in sizes)
    assert sizes[-1][0] > 1 << 18


def test_places_hold_what_has_changed_up_to_a_bound() -> None:
    noted = AnchorNotes()
    noted.add((0, 0, True), {"a": [1, 2], "b": "text"})
    noted.add((0, 1, True), {"a": [1, 3], "b": "text"})
    noted.add((0, 2, True), {"a": [1, 4], "b": "text"})
    assert noted.encode()[1] == ((0, 1, True), {"a": [1, 3]})
    assert noted.at((0, 1, True)) == {"a": [1, 3], "b": "text"}
    noted.add((0, 1, True), {"a": [5], "b": "text"})  # Come to anew.
    assert noted.at((0, 1, True)) == {"a": [5], "b": "text"}
    assert noted.at((0, 2, True)) == {}
    assert noted.encode(10) == ()
    noted.add((0, 2, True), {"a": "x" * (16 << 20)})
    assert noted.is_over
    assert noted.at((0, 0, True)) == {}
    noted.clear()
    assert not noted.is_over
