"""When saves are due by time: early ones, and what they may cost."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from elasticrun.saving.schedule import GrowingInterval, Schedule
from elasticrun.saving.settings import Settings
from tests.support.generations import generation


def intervals(
    longest: float, *, cost: float = 0.0, duration: float = 0.0, num: int = 7
) -> list[float]:
    """Return the seconds before each save, all of which cost the same."""
    interval = GrowingInterval(longest)
    found = []
    for _ in range(num):
        found.append(interval.next_interval())
        interval.note_cost(cost)
        interval.note_duration(duration)
    return found


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (300.0, [20, 40, 80, 160, 300, 300, 300]),
        (3600.0, [20, 40, 80, 160, 320, 640, 1280]),
        (30.0, [20, 30, 30, 30, 30, 30, 30]),
        (5.0, [5] * 7),
        (0.0, [0] * 7),
        (math.inf, [math.inf] * 7),
    ],
)
def test_the_first_saves_come_early(longest: float, expected: list[float]) -> None:
    assert intervals(longest) == expected


def test_early_saves_that_are_dear_are_left_out() -> None:
    minute = {"cost": 60.0, "num": 3}
    assert intervals(3600.0, **minute) == [20, 3600, 3600]  # type: ignore[arg-type]
    assert intervals(300.0, cost=1.0, num=4) == [20, 100, 100, 160]
    assert intervals(3600.0, duration=60.0, num=3) == [20, 600, 600]


def test_an_endless_number_of_saves_is_none_too_many() -> None:
    assert intervals(1e9, num=3000)[-1] == 1e9


@pytest.mark.parametrize(
    ("setting", "expected"),
    [(None, 20.0), ("auto", 20.0), (600, 20.0), (7, 7.0), ("off", math.inf)],
)
def test_each_generation_begins_with_an_early_save(
    tmp_path: Path, setting: float | str | None, expected: float
) -> None:
    settings = Settings.read(checkpoint_dir=tmp_path, save_interval=setting)
    for _ in range(2):
        assert Schedule(settings, is_saving=True).interval == expected
    assert Schedule(settings, is_saving=False).interval == math.inf


def test_what_a_save_in_flight_took_counts_once_it_has_ended(tmp_path: Path) -> None:
    with generation(tmp_path, save_interval=3600) as job:
        watcher, boundary = job._watcher, job.boundary
        assert watcher._save_interval == 20
        job.boundary.save()
        saved_at = watcher._saved_at
        assert watcher._save_at == saved_at + 40
        assert boundary._saver is not None
        boundary._saver.seconds = 60.0
        boundary._note_flight_ended()
        assert watcher._save_at == saved_at + 600
