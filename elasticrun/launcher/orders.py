"""What the launcher tells a replica when it lets it go."""

from __future__ import annotations

import os

from elasticrun.env import environment_of
from elasticrun.launcher import environment
from elasticrun.launcher.options import Options
from elasticrun.launcher.wire import Message


def make_orders(
    options: Options, *, generation: int, size: int, port: int
) -> list[Message]:
    """Return each replica's order; `port` is where rank 0 serves the store."""
    shared = _variables(options)
    given = shared.get("OMP_NUM_THREADS", "")
    num_threads = int(given) if given.isdecimal() and int(given) > 0 else 0
    num_threads = num_threads or max(1, environment.num_cores() // size)
    shared["OMP_NUM_THREADS"] = str(num_threads)
    program = options.program
    return [
        {
            "type": "start",
            "launcher": os.getpid(),
            "generation": generation,
            "rank": rank,
            "port": port,
            "environment": {
                **shared,
                **environment_of(rank=rank, world_size=size, port=port),
            },
            "kind": program.kind,
            "target": program.target,
            "argv": [program.target, *program.arguments],
            "path": list(program.path),
            "num_threads": num_threads,
        }
        for rank in range(size)
    ]


def _variables(options: Options) -> dict[str, str]:
    variables = environment.variables()
    variables["ELASTICRUN_CHECKPOINT_DIR"] = str(options.checkpoint_dir)
    # The launcher, which also sees a replica that hears nothing, is the last to act.
    variables["ELASTICRUN_GRACE"] = f"{options.grace:g}"
    if options.save_interval is not None:
        variables["ELASTICRUN_SAVE_INTERVAL"] = options.save_interval
    if options.is_named:
        variables["ELASTICRUN_JOB"] = options.name
    return variables
