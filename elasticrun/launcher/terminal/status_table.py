"""A job's status as text."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from elasticrun.errors import counted

Status = dict[str, Any]

_WIDEST = 100


def render(jobs: Iterable[Status]) -> str:
    """Return a paragraph a job."""
    return "\n\n".join(_render_job(job) for job in jobs)


def _render_job(job: Status) -> str:
    lines = [_render_state(job), *_render_nodes(job)]
    lines.append(f"  position     {job['place'] or 'not in training yet'}")
    if job["seconds_left"] is not None:
        lines[-1] += f", {duration(job['seconds_left'])} left"
    if job["no_boundary"] is not None:
        lines.append(f"               {job['no_boundary']};")
        lines.append(
            "               until the next boundary it can neither save nor stop"
        )
    if job["samples_per_second"] is not None:
        speed = speed_text(job["samples_per_second"], job["unit"])
        lines.append(f"  speed        {speed}")
    lines.append(f"  checkpoint   {_saved_text(job)}, in {job['checkpoint_dir']}")
    lines.append(f"  crashes      {job['restarts']} since this start")
    lines += [f"               {cause}" for cause in job["causes"]]
    if memory := job["spare_memory"]:
        number = f"{job['spares']} ready, {memory / 2**20:.0f} MiB"
        lines.append(f"  spares       {number}")
    lines += map(_render_member, job["members"])
    if job["last_output"]:
        ago = duration(job["seconds_since_output"])
        lines.append(f"  last output  {_cut(job['last_output'])} ({ago} ago)")
    return "\n".join(lines)


def _render_state(job: Status) -> str:
    state = f"{job['state']} for {duration(job['seconds_in_state'])}"
    size = counted(job["replicas"], "replica")
    if job["target"] != job["replicas"]:
        size += f" (going to {job['target']})"
    if "nodes" in job:
        size += (
            f" on node {job['node']}, {job['world_size']} on "
            f"{counted(job['nodes'], 'node')}"
        )
    line = f"{job['job']} ({job['pid']}): {state}, {size}"
    generation = job["generation"]
    return line if generation is None else f"{line}, generation {generation}"


def _saved_text(job: Status) -> str:
    saved = "none yet"
    if job["checkpoint"] is not None:
        saved = str(job["checkpoint"])
        if job["seconds_since_checkpoint"] is not None:
            saved += f", {duration(job['seconds_since_checkpoint'])} ago"
    if number := job["failed_saves"]:
        saved += f" ({counted(number, 'save')} failed)"
    return saved


def _render_nodes(job: Status) -> list[str]:
    names = [
        f"{number} {name}" for number, name in enumerate(job.get("node_names", ()))
    ]
    if not names:
        return []
    names[job["node"]] += " (this one)"
    return [f"  nodes        {', '.join(names)}"]


def _render_member(member: Status) -> str:
    line = (
        f"  rank {member['rank']:<8}process {member['pid']}, "
        f"{member['memory'] / 2**20:.0f} MiB, {member['cpu']:.0%} CPU"
    )
    if member["gpu_memory"] is not None:
        line += f", {member['gpu_memory'] / 2**20:.0f} MiB on the GPU"
    if member["gpu_utilization"] is not None:
        line += f", which is {member['gpu_utilization']} % busy"
    return line


def render_ended(job: Status) -> str:
    """Return a paragraph about a job that runs here no more, or elsewhere."""
    lines = [f"{job['job']}: {job['text']}"]
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job["time"]))
    ago = duration(max(0.0, time.time() - job["time"]))
    what = "ended" if job["state"] == "ended" else "last seen"
    lines.append(f"  {what:<12} {when}, {ago} ago")
    lines.append(f"  position     {job['position']}")
    saved = "none" if job["checkpoint"] is None else job["checkpoint"]
    lines.append(f"  checkpoint   {saved}, in {job['checkpoint_dir']}")
    lines.append(f"  crashes      {len(job['causes'])}")
    lines += [f"               {cause}" for cause in job["causes"]]
    if job["log_dir"] is not None:
        lines.append(f"  logs         {job['log_dir']}")
    return "\n".join(lines)


def speed_text(rate: float, unit: str) -> str:
    """Return a speed with at least two digits."""
    text = f"{rate:.0f}" if rate >= 10 or rate == 0 else f"{rate:.2g}"
    return f"{text} {unit}s/s"


def _cut(text: str) -> str:
    return (
        text
        if len(text) <= _WIDEST
        else f"{text[: _WIDEST - 1]}\N{HORIZONTAL ELLIPSIS}"
    )


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
