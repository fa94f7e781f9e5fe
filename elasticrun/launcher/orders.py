"""What the launcher tells a replica when it lets it go."""

from __future__ import annotations

import os

from elasticrun.env import environment_of
from elasticrun.launcher import environment
from elasticrun.launcher.nodes import Round
from elasticrun.launcher.options import Options
from elasticrun.launcher.wire import Message


def make_orders(options: Options, round_: Round) -> list[Message]:
    """Return the order of each replica on this node."""
    shared = _variables(options, round_)
    given = shared.get("OMP_NUM_THREADS", "")
    num_threads = int(given) if given.isdecimal() and int(given) > 0 else 0
    num_threads = num_threads or max(1, environment.num_cores() // round_.share)
    shared["OMP_NUM_THREADS"] = str(num_threads)
    program = options.program
    return [
        {
            "type": "start",
            "launcher": os.getpid(),
            "generation": round_.number,
            "rank": round_.offset + local_rank,
            "world_size": round_.size,
            "host": round_.address,
            "port": round_.port,
            "is_outward": round_.is_outward,
            "environment": {
                **shared,
                **environment_of(
                    rank=round_.offset + local_rank,
                    world_size=round_.size,
                    port=round_.port,
                    local_rank=local_rank,
                    local_world_size=round_.share,
                    address=round_.address,
                ),
            },
            "kind": program.kind,
            "target": program.target,
            "argv": [program.target, *program.arguments],
            "path": list(program.path),
            "num_threads": num_threads,
        }
        for local_rank in range(round_.share)
    ]


def _variables(options: Options, round_: Round) -> dict[str, str]:
    variables = environment.variables()
    if round_.interface:
        # By itself gloo takes the address that the machine's own name stands for.
        variables.setdefault("GLOO_SOCKET_IFNAME", round_.interface)
    variables["ELASTICRUN_CHECKPOINT_DIR"] = str(options.checkpoint_dir)
    # The launcher, which also sees a replica that hears nothing, is the last to act.
    variables["ELASTICRUN_GRACE"] = f"{options.grace:g}"
    if options.save_interval is not None:
        variables["ELASTICRUN_SAVE_INTERVAL"] = options.save_interval
    if options.is_named:
        variables["ELASTICRUN_JOB"] = options.name
    return variables
