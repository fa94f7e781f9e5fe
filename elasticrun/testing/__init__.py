"""Tools to test scripts: real replicas, restarts, and jobs."""

from __future__ import annotations

from elasticrun.job.current import use_job
from elasticrun.job.job import Job
from elasticrun.job.trace import read_trace, samples_of_loop
from elasticrun.saving.settings import Settings
from elasticrun.testing.replicas import (
    GenerationFailed,
    Outcome,
    run_generation,
    start_generation,
)
from elasticrun.testing.restarts import assert_restart_equivalent

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
