"""What the forkserver of `run_generation` imports once, for all replicas."""

from __future__ import annotations

import gc

# The first optimizer of a process imports this, which takes over a second.
import torch._dynamo  # noqa: F401

import elasticrun.data.combined
import elasticrun.job.remaining
import elasticrun.job.states
import elasticrun.parallel.module
import elasticrun.testing.replicas  # noqa: F401

gc.collect()
gc.freeze()  # Or the collector of each replica would copy every page.
