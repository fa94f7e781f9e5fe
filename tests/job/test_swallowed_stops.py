"""A program that catches its stop and goes on is stopped again, and loses nothing."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    JobStopped,
    finished_epochs,
    remaining_epochs_until,
    request_stop,
)
from tests.support.data import Numbers
from tests.support.generations import run_once

Seen = list[tuple[int, int]]  # Epoch, sample.
NUM_EPOCHS, NUM_SAMPLES = 3, 12


def read(loader: AdaptiveDataLoader, epoch: int, seen: Seen) -> None:
    for batch in loader:
        seen += [(epoch, sample) for sample in batch.tolist()]
        if (epoch, loader.batch_index) == (1, 0):
            request_stop()


def caught_in_the_epoch(loader: AdaptiveDataLoader, seen: Seen) -> None:
    for epoch in remaining_epochs_until(NUM_EPOCHS):
        with contextlib.suppress(BaseException):
            read(loader, epoch, seen)


def caught_in_the_epoch_and_left(loader: AdaptiveDataLoader, seen: Seen) -> None:
    for epoch in remaining_epochs_until(NUM_EPOCHS):
        try:
            read(loader, epoch, seen)
        except BaseException:
            break
    finished_epochs()  # Nothing can be raised out of a `break`.


def caught_and_looped_again(loader: AdaptiveDataLoader, seen: Seen) -> None:
    for epoch in remaining_epochs_until(NUM_EPOCHS):
        try:
            read(loader, epoch, seen)
        except BaseException:
            read(loader, epoch, seen)


def caught_around_the_epochs(loader: AdaptiveDataLoader, seen: Seen) -> None:
    for num_epochs in (2, NUM_EPOCHS):
        try:
            for epoch in remaining_epochs_until(num_epochs):
                read(loader, epoch, seen)
        except BaseException:
            continue


@pytest.mark.parametrize(
    "script",
    [
        caught_in_the_epoch,
        caught_in_the_epoch_and_left,
        caught_and_looped_again,
        caught_around_the_epochs,
    ],
)
def test_no_sample_is_lost(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    script: Callable[[AdaptiveDataLoader, Seen], None],
) -> None:
    seen: Seen = []

    def run() -> None:
        script(AdaptiveDataLoader(Numbers(NUM_SAMPLES), 4), seen)

    run_once(run, tmp_path)
    assert seen == [(0, i) for i in range(12)] + [(1, i) for i in range(4)]
    assert "the program caught JobStopped" in caplog.text
    run_once(run, tmp_path)
    assert seen == [(e, i) for e in range(NUM_EPOCHS) for i in range(NUM_SAMPLES)]


def stop_and_break() -> None:
    for epoch in remaining_epochs_until(2):
        try:
            request_stop()
            for _ in AdaptiveDataLoader(Numbers(4), 2, name=f"of-{epoch}"):
                pass
        except JobStopped:
            break


@pytest.mark.slow
def test_a_stop_caught_before_break_gives_the_exit_code_at_last(
    tmp_path: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import *; stop_and_break()"],
        env={
            **os.environ,
            "ELASTICRUN_CHECKPOINT_DIR": str(tmp_path),
            "ELASTICRUN_JOB": "test",
        },
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 75, ended.stderr
    assert "Traceback" not in ended.stderr
