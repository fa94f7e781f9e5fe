"""Events that others have written, or that were damaged: read, shown, and no harm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from elasticrun.__main__ import main
from elasticrun.checkpoint.events import FILE_NAME, Event, EventLog, read_events
from elasticrun.report.command import Timeline

TIME = 1_795_000_000.0
START: Event = {
    "time": TIME,
    "event": "start",
    "job": "j",
    "text": "t",
    "log_dir": "/nowhere",
}
BEGIN: Event = {
    "time": TIME + 1,
    "event": "begin",
    "generation": 0,
    "world_size": 2,
    "checkpoint": None,
    "position": "epoch 0",
}
SAVED: Event = {
    "time": TIME + 2,
    "event": "checkpoint",
    "checkpoint": 1,
    "samples": 3,
    "values": {},
    "paused": 0,
    "seconds": 0,
}
CRASH: Event = {"time": TIME + 2, "event": "crash", "text": "x", "error": "x"}
END: Event = {"time": TIME + 9, "event": "end", "text": "finished", "code": 0}


def lines(*events: Event | str) -> bytes:
    texts = (each if isinstance(each, str) else json.dumps(each) for each in events)
    return "".join(f"{text}\n" for text in texts).encode("utf-8", "surrogatepass")


def without(event: Event, *names: str) -> Event:
    return {key: value for key, value in event.items() if key not in names}


ODD: list[Event | str] = [
    *({**END, "event": kind} for kind in ([1], {"a": 1}, True, None)),
    *(
        f'{{"time": {time}, "event": "end", "text": "x", "code": 0}}'
        for time in ("NaN", "Infinity", "-1", "1e300", "true", "1" + "0" * 400, '"1"')
    ),
    *({**END, "code": code} for code in ("abc", [1], 1.5, True)),
    *(without(END, name) for name in ("text", "code", "time", "event")),
    *(without(BEGIN, name) for name in BEGIN if name != "position"),
    *({**BEGIN, name: [1]} for name in BEGIN),
    *(without(SAVED, name) for name in SAVED),
    *({**SAVED, name: "many"} for name in SAVED if name != "event"),
    *({**SAVED, "samples": size} for size in (10**400, 1.5, None)),
    {**SAVED, "paused": float("nan")},
    *(without(CRASH, name) for name in ("text", "error")),
    *({**START, "log_dir": where} for where in (5, "a\0b", ["/"])),
    *({**START, "job": name} for name in ("\ud800", "\x1b]0;title\x07", 7)),
    "[" * 100_000,
    '{"time": 1, "event": "start", "a":' + "[" * 900 + "]" * 900 + "}",
    "\0" * 1000,
    '"' + "x" * (2 << 20) + '"',
]


@pytest.mark.parametrize("place", range(2), ids=["before", "among"])
def test_an_odd_event_is_left_out_and_the_others_are_shown(
    place: int, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    for number, odd in enumerate(ODD):
        folder = tmp_path / str(number)
        folder.mkdir()
        events: list[Event | str] = [START, BEGIN, SAVED, END]
        events.insert(2 * place, odd)
        (folder / FILE_NAME).write_bytes(lines(*events))
        said = str(odd)[:100]
        assert main(["status", str(folder)]) == 0, said
        assert main(["report", str(folder), "--out", str(page)]) == 0, said
        data = page.read_text().split('id="data">')[1].split("</script>")[0]
        shown = json.loads(data, parse_constant=pytest.fail)
        assert len(shown["generations"]) == 1, said


@pytest.mark.parametrize("kind", ["pipe", "directory", "link"])
def test_what_is_no_file_is_no_history(kind: str, tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert read_events(tmp_path) == []


def test_what_diverges_keeps_its_checkpoints(tmp_path: Path) -> None:
    log = EventLog(tmp_path)
    values = {"loss": float("nan"), "bits": float("inf"), "tokens": 2 * 10**12}
    size = {"bytes": 10**12, "samples": 2 * 10**12}
    for event in (START, BEGIN, {**SAVED, **size, "values": values}):
        log.write(event["event"], **without(event, "time", "event"))
    (saved,) = Timeline(read_events(tmp_path)).checkpoints
    assert saved["values"] == {"tokens": 2 * 10**12}
    assert saved["bytes"] == 10**12


def test_a_history_of_many_generations_is_a_page(tmp_path: Path) -> None:
    many = ({**BEGIN, "time": TIME + n, "generation": n} for n in range(10_100))
    (tmp_path / FILE_NAME).write_bytes(lines(START, *many))
    shown = Timeline(read_events(tmp_path)).describe()["generations"]
    assert [shown[0]["number"], shown[-1]["number"]] == [100, 10_099]
