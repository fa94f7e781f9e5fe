"""The only module that reads `os.environ` in a replica: its rank, and settings."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"
LAUNCHED_BY = "ELASTICRUN_LAUNCHER_PID"
AMONG_NODES = "+"  # Behind that, where other launchers start replicas, too.
_STEP = "SLURM_STEP"  # Only within `read_environment`.
_FIRST_PORT = 10_000
_NUM_PORTS = 20_000
_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class Environment:
    """What the launcher (torchrun, srun, a shell) said through variables.

    Attributes:
        rank: This replica's number in the job, in [0, world_size).
        master_address: Host of the store that the launcher names, or None.
        has_agent_store: Whether an agent (torchrun) already serves a store there.
        step: What tells these replicas from those of others who took the same port.
        is_launched: Whether elasticrun's launcher has started this replica.
        is_followed_here: Whether that starts those that go on after its end on this
            machine, too.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_address: str | None = None
    master_port: int | None = None
    has_agent_store: bool = False
    step: str = ""
    is_launched: bool = False
    is_followed_here: bool = False


def variables() -> Mapping[str, str]:
    """Return the variables of this process."""
    return os.environ


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment of this process, or of `variables`."""
    variables = os.environ if variables is None else variables
    if _is_slurm_task(variables):
        variables = {**_slurm_variables(variables), **variables}
    world_size = _integer(variables, "WORLD_SIZE", default=1, least=1)
    rank = _integer(variables, "RANK", default=0, least=0)
    if rank >= world_size:
        raise ValueError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}. Ranks count from 0; "
            "start the script with torchrun, or set both variables alike everywhere."
        )
    local_rank = _integer(variables, "LOCAL_RANK", default=0, least=0)
    launcher, among_nodes, _ = variables.get(LAUNCHED_BY, "").partition(AMONG_NODES)
    # What a replica starts inherits the variable, and may be a job of its own.
    is_launched = launcher == str(os.getppid())
    # As far as the store's address tells.
    is_one_machine = variables.get("MASTER_ADDR", "localhost") in _LOOPBACK
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=_integer(
            variables,
            "LOCAL_WORLD_SIZE",
            default=world_size if is_one_machine else local_rank + 1,
            least=1,
        ),
        master_address=variables.get("MASTER_ADDR"),
        master_port=_integer(variables, "MASTER_PORT", default=0, least=1) or None,
        has_agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        step=variables.get(_STEP, ""),
        is_launched=is_launched,
        is_followed_here=is_launched and not among_nodes,
    )


def _is_slurm_task(variables: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as one of several tasks."""
    num_tasks = variables.get("SLURM_STEP_NUM_TASKS", "1")
    return num_tasks != "1" and "WORLD_SIZE" not in variables


def _slurm_variables(variables: Mapping[str, str]) -> dict[str, str]:
    """Return what torchrun would set, for a task of srun.

    The tasks cannot agree on a port before they meet, so it follows from the step's
    number; below those that systems give to outgoing connections.
    """
    try:
        node = int(variables["SLURM_NODEID"])
        tasks = _tasks_of_nodes(variables["SLURM_STEP_TASKS_PER_NODE"])
        job, step = variables["SLURM_JOB_ID"], variables["SLURM_STEP_ID"]
        is_one_node = len(tasks) == 1
        return {
            "RANK": variables["SLURM_PROCID"],
            "WORLD_SIZE": variables["SLURM_STEP_NUM_TASKS"],
            "LOCAL_RANK": variables["SLURM_LOCALID"],
            "LOCAL_WORLD_SIZE": str(tasks[node]),
            "MASTER_ADDR": "127.0.0.1"
            if is_one_node
            else first_host(variables["SLURM_STEP_NODELIST"]),
            "MASTER_PORT": str(_FIRST_PORT + (37 * int(job) + int(step)) % _NUM_PORTS),
            _STEP: f"{job}.{step}",
        }
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"srun started {variables['SLURM_STEP_NUM_TASKS']} tasks "
            "(SLURM_STEP_NUM_TASKS), but not all of what says which one this is can be "
            f"read ({type(error).__name__}: {error}). Without it each would be a job "
            "of its own with one replica. Let srun start one launcher on each node "
            "(--ntasks-per-node=1 elasticrun run --nodes ...), or set RANK, "
            "WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
            "for each task."
        ) from error


def _tasks_of_nodes(text: str) -> list[int]:
    """Return the number of tasks on each node of a step, from `2(x3),1`."""
    tasks = []
    for part in text.split(","):
        number, _, times = part.partition("(x")
        tasks += [int(number)] * int(times.removesuffix(")") or 1)
    return tasks


def first_host(nodes: str) -> str:
    """Return the first host of Slurm's list, as `a01` of `a[01-03,07],b1`."""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    assert first is not None
    host = re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0])
    if not host:
        raise ValueError(f"no host in {nodes!r}")
    return host


def torchrun_variables(
    *,
    rank: int,
    world_size: int,
    port: int,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    address: str = "127.0.0.1",
) -> dict[str, str]:
    """Return the variables that torchrun sets for a replica.

    Without the last three all replicas are on this machine.
    """
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank if local_rank is None else local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size or world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def keep_gloo_on_loopback() -> None:
    """Tell gloo to listen on loopback, unless the user chose an interface."""
    os.environ.setdefault(GLOO_INTERFACE, "lo")


def _integer(
    variables: Mapping[str, str], name: str, *, default: int, least: int
) -> int:
    text = variables.get(name)
    if not text:
        return default
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise ValueError(f"{name}={text!r} must be a whole number from {least} up.")
    return value
