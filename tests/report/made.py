"""The events of a job that was rescaled, has crashed, was stopped, and has finished."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from elasticrun.checkpoint.files.durable import append_line

ERROR = "rank 2 raised ValueError: </script><b>loss</b> @@data@@ is nan"
BEGIN = 1_700_000_000.0


class Script:
    """Makes events, each at a time of its own."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.generation = -1

    def at(self, second: float, kind: str, **values: Any) -> None:
        self.events.append({"time": BEGIN + second, "event": kind, **values})

    def begin(self, second: float, size: int, checkpoint: int | None) -> None:
        self.generation += 1
        self.at(
            second,
            "begin",
            generation=self.generation,
            job="train.py",
            world_size=size,
            checkpoint=checkpoint,
            position="somewhere",
        )

    def pass_by(
        self, second: float, samples: int, kind: str = "progress", **values: Any
    ) -> None:
        more = {"position": f"sample {samples}", "epoch": 1, "num_epochs": 9, **values}
        self.at(second, kind, generation=self.generation, samples=samples, **more)

    def save(self, second: float, samples: int, number: int, accuracy: float) -> None:
        self.pass_by(
            second,
            samples,
            "checkpoint",
            checkpoint=number,
            bytes=1 << 20,
            paused=0.5,
            seconds=2.0,
            values={"variables.accuracy": accuracy},
            rescue="",
        )


def events() -> list[dict[str, Any]]:
    job = Script()
    job.at(0, "start", job="train.py", text="job train.py", log_dir="/c/logs", pid=7)
    job.begin(1, 2, None)
    job.pass_by(11, 1000)
    job.save(21, 2000, 1, 0.5)
    job.at(22, "rescaling", text="a rescaling to 4 replicas", replicas=2, target=4)
    job.pass_by(23, 2000, "leave", code=75)
    job.begin(25, 4, 1)
    job.pass_by(35, 2000)
    job.save(40, 3000, 2, 0.75)
    job.pass_by(50, 5000, "leave", code=None)
    job.at(
        51,
        "crash",
        text="generation 1 crashed",
        generation=1,
        rank=2,
        code=1,
        error=ERROR,
        trace="Traceback:\n  ValueError",
        position="sample 5100",
        samples=5100,
        checkpoint=2,
    )
    job.at(51, "restart", text="restart 1 of 3", cause="a crash", delay=0.0)
    job.begin(55, 4, 2)
    job.pass_by(65, 2100)
    job.save(66, 2200, 3, 0.875)
    job.pass_by(66, 2200, "leave", code=143)
    job.at(67, "end", text="stopped; checkpoint 3 is saved", code=143)
    job.at(100, "start", job="train.py", text="job train.py", log_dir="/c/logs", pid=8)
    job.begin(101, 1, 3)
    job.save(111, 1000, 4, 1.0)
    job.pass_by(111, 1000, "leave", code=None)
    job.at(112, "end", text="finished after 12 s", code=0)
    return job.events


def write(folder: Path, some: list[dict[str, Any]]) -> None:
    """Write events to a job's file as if they had happened at their times."""
    for event in some:
        append_line(folder / "events.jsonl", json.dumps(event).encode() + b"\n")
