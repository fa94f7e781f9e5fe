"""Deaths of replicas, at places where others can save what was trained."""

from __future__ import annotations

import os
import signal

from elasticrun.launcher.control.jobs import find_jobs
from elasticrun.launcher.replica.reporter import open_job
from tests.support.stage import wait_until


def die(*, with_machine: bool = False) -> None:
    """Kill this replica, once its launchers know that the others may save.

    They hear of it twice a second, later than a fast program comes to its place.

    Args:
        with_machine: Kill its launcher first, and with it all its replicas.
    """
    job = open_job()
    if job is not None and job.rescue is not None and job.rescue.is_on:
        wait_until(_do_launchers_know, "that the launchers hear of a boundary")
    if with_machine:
        os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _do_launchers_know() -> bool:
    """Return whether they do, if there are any: torchrun has none."""
    jobs, _ = find_jobs()
    members = [member for job in jobs for member in job.status["members"]]
    for job in jobs:
        job.close()
    return all(member["can_rescue"] for member in members)
