"""The command `elasticrun report [JOB | DIR]`, which writes the page as one file."""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from pathlib import Path
from typing import Any

from elasticrun.checkpoint.manifest import version
from elasticrun.errors import STOP_CODES, USAGE
from elasticrun.launcher.jobs import KnownJob, find_known_job, status_of_ended
from elasticrun.launcher.talk.client import JobError
from elasticrun.report.history import History

_FOLDER = Path(__file__).with_name("page")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `elasticrun report` takes."""
    parser.add_argument("job", nargs="?", metavar="JOB|DIR",
        help="a job's name, or its checkpoint directory; needed if there are "
        "several")  # fmt: skip
    parser.add_argument("--out", metavar="FILE", default="report.html",
        help="where to write the page; default: report.html")  # fmt: skip


def main(options: argparse.Namespace) -> int:
    """Write the page; return the exit code."""
    try:
        page = page_of(find_known_job(options.job))
    except JobError as error:
        sys.stderr.write(f"elasticrun: {error}\n")
        return error.exit_code
    try:
        Path(options.out).write_text(page, encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"elasticrun: {options.out}: {error.strerror}\n")
        return USAGE
    sys.stdout.write(f"{options.out}\n")
    return 0


def page_of(job: KnownJob) -> str:
    """Return the page of a job, which loads nothing from elsewhere."""
    values = {
        **History(job.events).describe(),
        "job": job.name,
        "directory": str(job.directory),
        "state": _state(job),
        "time": time.time(),
        "version": version(),
    }
    parts = {
        "data": json.dumps(values).replace("<", "\\u003c"),  # No tag ends there.
        "uPlot.min.css": _read("uPlot.min.css"),
        "uPlot.iife.min.js": _read("uPlot.iife.min.js"),
    }
    return re.sub("@@(.+?)@@", lambda match: parts[match[1]], _read("page.html"))


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _state(job: KnownJob) -> dict[str, Any]:
    """Return how the job is or has ended, in words and as the page colours it."""
    status = status_of_ended(job)
    moods = {0: "good", **dict.fromkeys(STOP_CODES, "still")}
    is_running = status["state"] == "running"
    mood = "busy" if is_running else moods.get(status["code"], "bad")
    text = "running" if is_running else status["text"]
    if mood == "good":
        text = "finished"  # It says after how long, which is the last start's time.
    return {"text": text, "mood": mood}
