"""The order to a replica: what to run, with which environment variables."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping, Sequence

from elasticrun.launcher import environment
from elasticrun.launcher.forks.waiting import ForkedReplica
from elasticrun.launcher.nodes.nodes import LOOPBACK, RoundPlan
from elasticrun.launcher.options import Options
from elasticrun.replicas.environment import (
    AMONG_NODES,
    GLOO_INTERFACE,
    LAUNCHED_BY,
    torchrun_variables,
)
from elasticrun.replicas.wire import Message

# What the number and the places of the other nodes decide.
_OF_ALL_NODES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_UNKNOWN = "unknown until the generation begins"


def orders_ahead(
    options: Options,
    replicas: Sequence[ForkedReplica],
    told: Sequence[Message],
    *,
    runs_ahead: bool,
) -> list[Message]:
    """Return orders for replicas whose generation is yet to begin.

    Among nodes that brings the ranks, and where replicas meet.

    Args:
        told: What the replicas that run have imported, by rank on this node.
        runs_ahead: Let them run the program, too, up to where it needs the job.
    """
    ports = replicas[0].ports or (0,)
    round_ = RoundPlan(0, len(replicas), 0, len(replicas), LOOPBACK, ports[0])
    unknown = _OF_ALL_NODES if options.nodes is not None else ()
    orders = make_orders(options, round_)
    for rank, order in enumerate(orders):
        order |= {"is_rehearsed": True, "runs_ahead": runs_ahead, "unknown": unknown}
        # A process that the program starts ahead does not wait for it, but fails.
        order["environment"] |= dict.fromkeys(unknown, _UNKNOWN)
        order["imports"] = told[min(rank, len(told) - 1)]
    return orders


def make_orders(options: Options, round_: RoundPlan) -> list[Message]:
    """Return the order of each replica on this node."""
    inherited = environment.variables()
    variables = _variables(options, round_, inherited)
    program = options.program
    shared = {
        "type": "start",
        "is_rehearsed": False,
        "launcher": os.getpid(),
        "generation": round_.number,
        "world_size": round_.size,
        "host": round_.address,
        "port": round_.port,
        "is_outward": round_.is_outward,
        "kind": program.kind,
        "target": program.target,
        "argv": [program.target, *program.arguments],
        "path": list(program.path),
        "num_threads": int(variables["OMP_NUM_THREADS"]),
    }
    orders = []
    for rank in range(round_.offset, round_.offset + round_.share):
        own = variables | torchrun_variables(
            rank=rank,
            world_size=round_.size,
            port=round_.port,
            local_rank=rank - round_.offset,
            local_world_size=round_.share,
            address=round_.address,
        )
        orders.append({**shared, "rank": rank, "environment": inherited | own})
    return orders


def _num_threads(
    options: Options, round_: RoundPlan, inherited: Mapping[str, str]
) -> int:
    """Return what the user has set, or a replica's share of this machine's cores.

    With virtual replicas, the share of one of these: sums depend on it.
    """
    given = inherited.get("OMP_NUM_THREADS", "")
    number = int(given) if given.isdecimal() else 0
    most = options.settings.virtual_replicas or round_.share
    return number or max(1, environment.num_cores() // most)


def _variables(
    options: Options, round_: RoundPlan, inherited: Mapping[str, str]
) -> dict[str, str]:
    """Return what elasticrun sets for all replicas alike."""
    variables = {
        **environment.mark(),
        **environment.hash_seed(),
        "OMP_NUM_THREADS": str(_num_threads(options, round_, inherited)),
        "ELASTICRUN_CHECKPOINT_DIR": str(options.checkpoint_dir),
        **options.variables,
        # A replica must understand these as the launcher does, which ends one that
        # hears nothing once its grace is over.
        "ELASTICRUN_GRACE": f"{options.settings.grace:g}",
        "ELASTICRUN_STOP_SIGNALS": ",".join(
            signal.Signals(number).name for number in options.settings.stop_signals
        ),
    }
    if round_.interface and GLOO_INTERFACE not in inherited:
        # Without it gloo takes the address that the machine's own name stands for.
        variables[GLOO_INTERFACE] = round_.interface
    among_nodes = "" if options.nodes is None else AMONG_NODES
    variables[LAUNCHED_BY] = f"{os.getpid()}{among_nodes}"
    if options.is_named:
        variables["ELASTICRUN_JOB"] = options.name
    return variables
