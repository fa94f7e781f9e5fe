"""For testing scripts that use elasticrun: real replicas, restarts, jobs to swap in."""

from __future__ import annotations

from elasticrun.current import use_job as use_job
from elasticrun.job import Job as Job
from elasticrun.testing.replicas import GenerationFailed as GenerationFailed
from elasticrun.testing.replicas import Outcome as Outcome
from elasticrun.testing.replicas import run_generation as run_generation
from elasticrun.testing.replicas import start_generation as start_generation
from elasticrun.testing.restarts import (
    assert_restart_equivalent as assert_restart_equivalent,
)
from elasticrun.traces import read_trace as read_trace
from elasticrun.traces import samples_of_loop as samples_of_loop

__all__ = [
    "GenerationFailed",
    "Job",
    "Outcome",
    "assert_restart_equivalent",
    "read_trace",
    "run_generation",
    "samples_of_loop",
    "start_generation",
    "use_job",
]
