"""What the forkserver of `run_generation` imports once, for all replicas."""

from __future__ import annotations

import elasticrun.data.loader
import elasticrun.job.epochs
import elasticrun.job.states
import elasticrun.parallel.module
import elasticrun.testing.replicas  # noqa: F401
