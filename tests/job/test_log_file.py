"""Rows of a LogFile come once, in whatever place the job is stopped or killed."""

from __future__ import annotations

import csv
import logging
import shutil
from pathlib import Path

import pytest

from elasticrun import (
    AdaptiveDataLoader,
    CheckpointError,
    LogFile,
    StateNameError,
    remaining_epochs_until,
    request_checkpoint,
    request_stop,
    save_all_states,
)
from tests.support.generations import Crash, generation, run_once

NUM_EPOCHS = 3


class Script:
    """Writes rows in all places of a program.

    Args:
        stops: For each generation after which row it stops (above 0), or is killed.
        saves: At which rows it saves.
    """

    def __init__(self, folder: Path, stops: list[int], saves: set[int]) -> None:
        self.path = folder / "log.csv"
        self.stops = stops
        self.saves = saves
        self.num_runs = 0

    def __call__(self) -> str:
        self.num_runs += 1
        stop = self.stops.pop() if self.stops else 0
        log = LogFile(self.path)
        rows = csv.writer(log)
        rows.writerow(["epoch", "batch"])
        loader = AdaptiveDataLoader(range(8), 2)
        num_rows = 0
        for epoch in remaining_epochs_until(NUM_EPOCHS):
            print("begin", epoch, file=log)
            for _ in loader:
                rows.writerow([epoch, loader.batch_index])
                num_rows += 1
                if num_rows in self.saves:
                    request_checkpoint()
                if num_rows == stop:
                    request_stop()
                if num_rows == -stop:
                    raise Crash
            print("end", epoch, file=log)
        print("finished", file=log)
        return self.path.read_text()


def run_saving(script: Script, directory: Path) -> str:
    """Run a generation in which a checkpoint is written before the next row comes."""
    written: str = run_once(script, directory, async_save=False)
    return written


@pytest.mark.parametrize("saves", [set(), {1, 4, 6}])
def test_rows_come_once(tmp_path: Path, saves: set[int]) -> None:
    (tmp_path / "calm").mkdir()
    expected = run_once(Script(tmp_path / "calm", [], set()))
    for stop in [*range(1, 13), *range(-12, 0)]:
        folder = tmp_path / str(stop)
        folder.mkdir()
        script = Script(folder, [stop, stop // 2], saves)
        while (written := run_saving(script, folder / "job")) is None:
            assert script.num_runs < 4
        assert written == expected, stop
        assert (
            run_saving(script, folder / "job") == expected
        )  # Finished, started again.


def test_what_was_there_before_the_job_stays(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    path.write_text("of another job\n")
    script = Script(tmp_path, [-2], {1})
    assert run_saving(script, tmp_path / "job") is None
    written = run_saving(script, tmp_path / "job")
    assert written.startswith("of another job\nepoch,batch\n")
    assert written.count("epoch,batch") == 1


def test_rows_that_somebody_has_removed_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = Script(tmp_path, [3], set())
    run_saving(script, tmp_path / "job")
    (tmp_path / "log.csv").write_text("epoch\n")
    assert run_saving(script, tmp_path / "job").startswith("epoch\n0,3\n")
    assert "log.csv has 6 bytes, but had" in caplog.text


def test_it_is_a_stream_as_others_are(tmp_path: Path) -> None:
    with generation(tmp_path / "job"):
        with LogFile(tmp_path / "log", name="one") as log:
            handler = logging.StreamHandler(log)
            handler.emit(logging.makeLogRecord({"msg": "a message"}))
            log.writelines(["ä\n", "b\n"])
        assert (tmp_path / "log").read_text() == "a message\nä\nb\n"
        save_all_states()  # The file is closed, and stays as it is.
        with pytest.raises(ValueError, match="closed"):
            log.write("more")
        with pytest.raises(StateNameError):
            LogFile(tmp_path / "log", name="one")
        with pytest.raises(OSError, match="nowhere"):
            LogFile(tmp_path / "nowhere" / "log")


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_file_of_others_is_not_cut(tmp_path: Path, is_saved: bool) -> None:
    script = Script(tmp_path, [-6], {3} if is_saved else set())
    assert run_saving(script, tmp_path / "job") is None
    path = tmp_path / "log.csv"
    with path.open("a") as other:
        other.write("a row of another job\n")
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="rows of others would be lost"):
        run_saving(script, tmp_path / "job")
    assert path.read_bytes() == before


def test_a_copied_folder_goes_on_and_another_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    script = Script(tmp_path / "first", [-6], {3})
    assert run_saving(script, tmp_path / "first" / "job") is None
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    script.path = tmp_path / "second" / "log.csv"
    written = run_saving(script, tmp_path / "second" / "job")
    assert written.count("finished") == 1
    assert written.count("begin 0") == 1
    (tmp_path / "third").mkdir()
    script.path = tmp_path / "third" / "log.csv"
    script.path.write_text("of others\n" * 100)
    with pytest.raises(CheckpointError, match="the checksum before byte"):
        run_saving(script, tmp_path / "second" / "job")
    assert script.path.read_text() == "of others\n" * 100
