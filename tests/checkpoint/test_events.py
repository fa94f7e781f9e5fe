"""The job's events: appended whatever happens, and read past what was torn."""

from __future__ import annotations

from pathlib import Path

import pytest

from elasticrun.checkpoint import events
from elasticrun.checkpoint.events import FILE_NAME, OLD_NAME, EventLog, read_events


def kinds(folder: Path) -> list[str]:
    return [event["event"] for event in read_events(folder)]


def test_a_line_that_was_torn_takes_no_other_with_it(tmp_path: Path) -> None:
    log, other = EventLog(tmp_path), EventLog(tmp_path)
    log.write("start", text="a job")
    path = tmp_path / FILE_NAME
    for torn in (b'{"time": 1, "ev', b"\xff\x00", b"7\n[]\n", b'{"time": "x"}'):
        with path.open("ab") as file:
            file.write(torn)
        other.write("end", text="finished", code=0)
    assert kinds(tmp_path) == ["start", "end", "end", "end", "end"]


def test_the_file_is_bounded_and_the_one_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(events, "MOST_BYTES", 1000)
    launcher, replica = EventLog(tmp_path), EventLog(tmp_path)
    for number in range(200):
        replica.write("progress", samples=number, may_rotate=True)
        launcher.write("crash", error="", text="x" * 10_000 if number == 100 else "")
    sizes = [(tmp_path / name).stat().st_size for name in (OLD_NAME, FILE_NAME)]
    assert max(sizes) < 1000 + 3000
    samples = [each["samples"] for each in read_events(tmp_path) if "samples" in each]
    assert samples == list(range(samples[0], 200))
    assert len(kinds(tmp_path)) > 10


def test_training_goes_on_where_events_cannot_be_kept(tmp_path: Path) -> None:
    elsewhere = tmp_path / "other"
    elsewhere.write_text("not mine\n")
    (tmp_path / FILE_NAME).symlink_to(elsewhere)
    EventLog(tmp_path).write("start")
    EventLog(tmp_path / "nowhere").write("start")
    assert elsewhere.read_text() == "not mine\n"
    assert read_events(tmp_path / "nowhere") == []
