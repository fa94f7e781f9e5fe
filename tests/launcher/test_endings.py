"""What a program has left is finalized at its end, as Python itself does it."""

from __future__ import annotations

import gzip
import zipfile

import pytest

from tests.launcher.running import running
from tests.support.stage import Stage

pytestmark = pytest.mark.slow

HELPER = """
import json


class Tracker:
    def __init__(self, path):
        self.path = path
        self.itself = self  # Only the collector frees it.

    def __del__(self):
        write(self.path)


def write(path):
    json.late = open(path, "a")  # So a finalizer leaves a file that is open.
    json.late.write("late")
"""
LEFT = """
import gzip, io, json, logging.handlers, sys, threading, weakref, zipfile
from pathlib import Path
import helper
from elasticrun import AdaptiveDataLoader, init, request_stop

root, ending = Path(sys.argv[1]), sys.argv[2]


class Tracker:
    def __init__(self, name):
        self.name = name

    def __del__(self):
        (root / self.name).touch()  # A name of the module is there.


class Tee(io.TextIOBase):
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()


sys.stdout, aside = Tee(sys.stdout), Tee(sys.stderr)
archive = zipfile.ZipFile(root / "archive", "w")
archive.writestr("one", "1")
log = open(root / "log.csv", "a")
json.held_by_library = open(root / "library.csv", "a")
packed = json.held_with_more = gzip.open(root / "packed.gz", "at")
tracker = Tracker("tracked")
helper.tracker = helper.Tracker(root / "tracked_by_helper")
weakref.finalize(log, (root / "weak").touch)
logger = logging.getLogger("left")
target = logging.FileHandler(root / "records")
logger.addHandler(logging.handlers.MemoryHandler(100, logging.CRITICAL, target))
helper.rows = open(root / "helper.csv", "a")
init(root / "checkpoints")


def write(row):
    for file in (log, json.held_by_library, packed, helper.rows):
        file.write(f"{row}\\n")
    logger.warning("%s", row)


def write_late():
    threading.main_thread().join()
    write("thread")


threading.Thread(target=write_late).start()
for _, numbers in enumerate(AdaptiveDataLoader(range(4), 1)):
    write(numbers.item())
    if numbers.item() == 1:
        if ending == "stop":
            request_stop()
        if ending == "exception":
            raise ValueError("as it is meant")
"""


@pytest.mark.parametrize(
    ("start", "ending"),
    [("fork", "stop"), ("fork", "exception"), ("exec", "end")],
)
def test_what_a_program_has_left_is_finalized(
    stage: Stage, start: str, ending: str
) -> None:
    script = stage.root / "script.py"
    script.write_text(LEFT)
    (stage.root / "helper.py").write_text(HELPER)
    options = ["--replicas", 1, "--start", start, "--max-restarts", 0]
    with running(stage, *options, "--", stage.root, ending, script=script) as job:
        assert job.wait() == {"end": 0, "stop": 75, "exception": 1}[ending], job.events
    rows = [*map(str, range(4 if ending == "end" else 2)), "thread"]
    for name in ("log.csv", "library.csv", "helper.csv", "records"):
        assert (stage.root / name).read_text().split() == rows, name
    with gzip.open(stage.root / "packed.gz", "rt") as packed:
        assert packed.read().split() == rows
    with zipfile.ZipFile(stage.root / "archive") as archive:
        assert archive.read("one") == b"1"
    for name in ("weak", "tracked", "tracked_by_helper"):
        assert (stage.root / name).exists(), f"{name}\n{job.events}"
    assert (stage.root / "tracked_by_helper").read_text() == "late"
    assert "Exception ignored" not in job.events


MISTAKEN = """
import argparse
import torch
from elasticrun import AdaptiveDataLoader, remaining_epochs_until, request_stop

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int)
size = parser.parse_args().batch_size
train = AdaptiveDataLoader(list(range(40_000)), batch_size=size)
for epoch in remaining_epochs_until(2):
    for batch in train:  # Here it goes wrong.
        request_stop()
"""


def test_a_mistake_of_the_user_is_said_once_with_the_line(stage: Stage) -> None:
    script = stage.root / "train.py"
    script.write_text(MISTAKEN)
    options = ("--replicas", 2, "--")
    with running(stage, *options, "--batch-size", 4, script=script) as job:
        assert job.wait() == 75, job.events
    with running(stage, *options, "--batch-size", 8, script=script) as job:
        assert job.wait() == 1, job.events
    said = job.events + job.output
    assert said.count("CheckpointError: ") == 1, said
    assert said.count("batch_size") == 1, said
    assert said.count('train.py", line ') == 1, said
    assert "elasticrun/data" not in said
    assert "elasticrun/job" not in said
