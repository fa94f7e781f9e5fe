"""The one reader of `os.environ`: where this replica stands, and settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from elasticrun.settings import (
    ONLY_BY_TIME,
    SaveEvery,
    parse_async_save,
    parse_keep,
    parse_keep_best,
    parse_keep_every,
    parse_save_every,
    parse_save_interval,
)

DEFAULT_SAVE_INTERVAL = 300.0
DEFAULT_KEEP = 3
DEFAULT_GRACE = 60.0
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


@dataclass(frozen=True)
class Environment:
    """What the launcher (torchrun, srun, a shell) and the user said through variables.

    Attributes:
        rank: This replica's number in the job, in [0, world_size).
        local_world_size: Replicas on this machine.
        master_address: Host of the store that the launcher names, or None.
        has_agent_store: Whether an agent (torchrun) already serves a store there.
        save_interval: Seconds between checkpoints; 0 for every boundary; infinite for
            "off"; or "auto".
        save_every: What else makes the job save: batches, ends of epochs.
        keep_every: Checkpoints of which numbers stay for ever: its multiples.
        keep_best: The value that is best in a checkpoint that stays, "max" or "min".
        grace: Seconds that a stop may take before a replica leaves without saving.
        async_save: Whether training goes on while a checkpoint is written.
        job: The job's name, which a checkpoint remembers.
        trace_dir: Where to append one line per delivered micro-batch, or None.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_address: str | None = None
    master_port: int | None = None
    has_agent_store: bool = False
    checkpoint_dir: str | None = None
    save_interval: float | Literal["auto"] = DEFAULT_SAVE_INTERVAL
    save_every: SaveEvery = ONLY_BY_TIME
    keep: int = DEFAULT_KEEP
    keep_every: int | None = None
    keep_best: tuple[str, str] | None = None
    grace: float = DEFAULT_GRACE
    async_save: bool = True
    job: str = ""
    trace_dir: str | None = None


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Return the environment of this process, or of `variables`.

    Raises:
        ValueError: A variable does not hold what it should; the text names it.
    """
    variables = os.environ if variables is None else variables
    world_size = _integer(variables, "WORLD_SIZE", default=1, least=1)
    rank = _integer(variables, "RANK", default=0, least=0)
    if rank >= world_size:
        raise ValueError(
            f"RANK={rank} is not below WORLD_SIZE={world_size}. Ranks count from 0; "
            "start the script with torchrun, or set both variables alike everywhere."
        )
    local_rank = _integer(variables, "LOCAL_RANK", default=0, least=0)
    _check_tasks(variables)
    interval = variables.get("ELASTICRUN_SAVE_INTERVAL")
    keep = variables.get("ELASTICRUN_KEEP")
    return Environment(
        rank=rank,
        local_rank=local_rank,
        world_size=world_size,
        local_world_size=_integer(
            variables,
            "LOCAL_WORLD_SIZE",
            default=world_size if _is_one_machine(variables) else local_rank + 1,
            least=1,
        ),
        master_address=variables.get("MASTER_ADDR"),
        master_port=_integer(variables, "MASTER_PORT", default=0, least=1) or None,
        has_agent_store=variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        checkpoint_dir=variables.get("ELASTICRUN_CHECKPOINT_DIR") or None,
        save_interval=parse_save_interval(interval or DEFAULT_SAVE_INTERVAL),
        save_every=parse_save_every(variables.get("ELASTICRUN_SAVE_EVERY") or None),
        keep=parse_keep(keep or DEFAULT_KEEP),
        keep_every=parse_keep_every(variables.get("ELASTICRUN_KEEP_EVERY") or None),
        keep_best=parse_keep_best(variables.get("ELASTICRUN_KEEP_BEST") or None),
        grace=_seconds(variables, "ELASTICRUN_GRACE", default=DEFAULT_GRACE),
        async_save=parse_async_save(variables.get("ELASTICRUN_ASYNC_SAVE") or True),
        job=variables.get("ELASTICRUN_JOB")
        or os.path.basename(sys.argv[0] or "python"),
        trace_dir=variables.get("ELASTICRUN_TRACE") or None,
    )


def _is_one_machine(variables: Mapping[str, str]) -> bool:
    """Return whether all replicas are here, as far as the store's address tells."""
    return variables.get("MASTER_ADDR", "localhost") in _LOOPBACK


def _check_tasks(variables: Mapping[str, str]) -> None:
    """Refuse to be one of several jobs that would all take themselves for the job."""
    num_tasks = variables.get("SLURM_STEP_NUM_TASKS", "1")
    if num_tasks != "1" and "WORLD_SIZE" not in variables:
        raise ValueError(
            f"srun started {num_tasks} tasks (SLURM_STEP_NUM_TASKS), but WORLD_SIZE is "
            "not set, so each would be a job of its own with one replica. Let srun "
            "start one launcher on each node (--ntasks-per-node=1 torchrun ...), or "
            "set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and "
            "MASTER_PORT for each task."
        )


def with_settings(
    environment: Environment,
    *,
    save_interval: float | str | None,
    save_every: int | str | None,
    keep: int | str | None,
    keep_every: int | str | None,
    keep_best: tuple[str, str] | str | None,
    async_save: bool | str | None = None,
) -> Environment:
    """Return the environment with those settings that the program gives itself.

    Raises:
        ValueError: One of them is not what it should be.
    """
    if save_interval is not None:
        interval = parse_save_interval(save_interval)
        environment = replace(environment, save_interval=interval)
    if save_every is not None:
        environment = replace(environment, save_every=parse_save_every(save_every))
    if keep is not None:
        environment = replace(environment, keep=parse_keep(keep))
    if keep_every is not None:
        environment = replace(environment, keep_every=parse_keep_every(keep_every))
    if keep_best is not None:
        environment = replace(environment, keep_best=parse_keep_best(keep_best))
    if async_save is not None:
        environment = replace(environment, async_save=parse_async_save(async_save))
    return environment


def configured_checkpoint_dir() -> str | None:
    """Return where the user's variables say that checkpoints are kept."""
    return os.environ.get("ELASTICRUN_CHECKPOINT_DIR") or None


def environment_of(
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


def keep_gloo_on_loopback(interface: str) -> None:
    """Tell gloo to listen on `interface`, unless the user chose one."""
    os.environ.setdefault(GLOO_INTERFACE, interface)


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


def _seconds(variables: Mapping[str, str], name: str, *, default: float) -> float:
    text = variables.get(name)
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ValueError(f"{name}={text!r} must be a number of seconds above 0.")
    return value
