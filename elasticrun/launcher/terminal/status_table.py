"""A job's status as text."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Status = dict[str, Any]


def render(jobs: Iterable[Status]) -> str:
    """Return a paragraph a job."""
    return "\n\n".join(_render_job(job) for job in jobs)


def _render_job(job: Status) -> str:
    size = f"{job['replicas']} replica{'s' * (job['replicas'] != 1)}"
    if job["target"] != job["replicas"]:
        size += f" (going to {job['target']})"
    if "nodes" in job:
        size += (
            f" on node {job['node']}, {job['world_size']} on {job['nodes']} "
            f"node{'s' * (job['nodes'] != 1)}"
        )
    lines = [f"{job['job']} ({job['pid']}): {job['state']}, {size}"]
    if job["generation"] is not None:
        lines[0] += f", generation {job['generation']}"
    lines += _render_nodes(job)
    lines.append(f"  position     {job['position'] or 'not in training yet'}")
    if job["num_samples"]:
        lines[-1] += f" of {job['num_samples']}"
    if job["no_boundary"] is not None:
        lines.append(f"               {job['no_boundary']};")
        lines.append(
            "               before the next boundary it neither saves nor stops"
        )
    if job["samples_per_second"] is not None:
        lines.append(f"  speed        {job['samples_per_second']:.0f} samples/s")
    saved = "none yet"
    if job["checkpoint"] is not None:
        ago = _duration(job["seconds_since_checkpoint"])
        saved = f"{job['checkpoint']}, {ago} ago"
    if number := job["failed_saves"]:
        saved += f" ({number} save{'s' * (number != 1)} failed)"
    lines.append(f"  checkpoint   {saved}, in {job['checkpoint_dir']}")
    lines.append(f"  restarts     {job['restarts']} after crashes")
    lines += [f"               {cause}" for cause in job["causes"]]
    if memory := job["spare_memory"]:
        number = f"{job['spares']} ready, {memory / 2**20:.0f} MiB"
        lines.append(f"  spares       {number}")
    lines += map(_render_member, job["members"])
    return "\n".join(lines)


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


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"
