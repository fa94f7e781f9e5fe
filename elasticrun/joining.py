"""Joining the other replicas: rank, world size, store, process group."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from elasticrun.control.devices import choose_device
from elasticrun.control.gloo import wait_for_threads_at_exit
from elasticrun.control.group import start_process_group
from elasticrun.control.links import Hub, Links, Spoke
from elasticrun.control.rendezvous import open_store
from elasticrun.control.store import JobStore
from elasticrun.env import Environment


@dataclass(frozen=True)
class Membership:
    """This replica among the others.

    Attributes:
        store: The job's store, or None for a replica that is alone.
        links: The connections to the other replicas' watchers, or None.
        owns_group: Whether the process group was started here, and ends with the job.
    """

    environment: Environment
    device: torch.device
    store: JobStore | None
    links: Links | None
    owns_group: bool

    @property
    def rank(self) -> int:
        """This replica's rank."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """The number of replicas."""
        return self.environment.world_size

    def leave(self) -> None:
        """End the process group that was started here."""
        if self.owns_group and dist.is_initialized():
            dist.destroy_process_group()


def join(environment: Environment, *, backend: str) -> Membership:
    """Meet the other replicas. Collective.

    A process group that the user has started decides about rank and world size.

    Raises:
        ValueError: The backend or the variables do not fit.
        AgreementError: A replica did not come.
    """
    if dist.is_initialized() and dist.get_world_size() != environment.world_size:
        environment = replace(
            environment,
            rank=dist.get_rank(),
            local_rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            local_world_size=dist.get_world_size(),
        )
    if environment.world_size == 1:
        device = choose_device(environment, backend, None)
        return Membership(environment, device, None, None, owns_group=False)
    wait_for_threads_at_exit()
    owns_group = not dist.is_initialized()
    store = open_store(environment)
    device = choose_device(environment, backend, store)
    links: Links
    links = Hub(store) if environment.rank == 0 else Spoke(store, environment.rank)
    if owns_group:
        start_process_group(environment, store, device)
    return Membership(environment, device, store, links, owns_group)
