"""What the forkserver of `run_generation` imports once, for all replicas."""

from __future__ import annotations

import elasticrun.data.loader
import elasticrun.epoch
import elasticrun.parallel
import elasticrun.states
import elasticrun.testing.replicas  # noqa: F401
