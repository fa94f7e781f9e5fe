"""For testing scripts that use elasticrun: real replicas, restarts, jobs to swap in."""

from __future__ import annotations

from elasticrun.job.current import use_job as use_job
from elasticrun.job.job import Job as Job
from elasticrun.job.trace import read_trace as read_trace
from elasticrun.job.trace import samples_of_loop as samples_of_loop
from elasticrun.saving.settings import Settings as Settings
from elasticrun.testing.replicas import GenerationFailed as GenerationFailed
from elasticrun.testing.replicas import Outcome as Outcome
from elasticrun.testing.replicas import run_generation as run_generation
from elasticrun.testing.replicas import start_generation as start_generation
from elasticrun.testing.restarts import (
    assert_restart_equivalent as assert_restart_equivalent,
)

__all__ = [
    "GenerationFailed",
    "Job",
    "Outcome",
    "Settings",
    "assert_restart_equivalent",
    "read_trace",
    "run_generation",
    "samples_of_loop",
    "start_generation",
    "use_job",
]
