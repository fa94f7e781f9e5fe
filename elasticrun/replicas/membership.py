"""Joining the other replicas: rank, world size, store, process group."""

from __future__ import annotations

import socket
from dataclasses import dataclass, replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore

from elasticrun.replicas.devices import choose_device
from elasticrun.replicas.environment import (
    Environment,
    keep_gloo_on_loopback,
)
from elasticrun.replicas.exchange import Exchange
from elasticrun.replicas.gathering import gather
from elasticrun.replicas.links import Links, connect_all
from elasticrun.replicas.open_files import raise_limit_of_open_files
from elasticrun.replicas.opening_store import open_store
from elasticrun.replicas.process_end import wait_for_threads_at_exit
from elasticrun.replicas.store import ALL_LEAVE, LEAVING, PROCESS_GROUP, JobStore

_LEAVING_SECONDS = 10.0


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
        return self.environment.rank

    @property
    def world_size(self) -> int:
        return self.environment.world_size

    @property
    def exchange(self) -> Exchange:
        """An end of the conversations with rank 0, for the training thread."""
        return self.exchange_over(self.store)

    def exchange_over(
        self, store: JobStore | None, *, gone: dict[int, str] | None = None
    ) -> Exchange:
        """Return an end of the conversations with rank 0 over a client of the store."""
        return Exchange(store, rank=self.rank, world_size=self.world_size, gone=gone)

    def abort(self) -> None:
        """End the collectives that wait for a replica which is gone; on GPUs."""
        assert dist.group.WORLD is not None
        dist.group.WORLD.abort()

    def leave(self, *, is_whole: bool = True) -> None:
        """End the process group that was started here.

        NCCL's end waits for every collective under way, and so for replicas that wait
        in one for this replica. If not all come to their end, the group is left as it
        is: torch aborts it when the process ends.

        Args:
            is_whole: Whether no other replica is known to have died.
        """
        if not (self.owns_group and dist.is_initialized()):
            return
        if self.device.type == "cpu" or (is_whole and self._do_all_leave()):
            dist.destroy_process_group()

    def _do_all_leave(self) -> bool:
        """Return whether all replicas come here within some seconds."""
        assert self.store is not None
        try:
            if self.store.client.add(LEAVING, 1) == self.world_size:
                self.store.put(ALL_LEAVE, True)
            self.store.take(ALL_LEAVE, timeout=_LEAVING_SECONDS)
        except (TimeoutError, ConnectionError, dist.DistError):
            return False
        return True


def join(
    environment: Environment, *, backend: str, timeout: float | None = None
) -> Membership:
    """Meet the other replicas. Collective.

    A process group that the user has started decides about rank and world size; and
    where they differ from what the variables say, also who is on which machine.

    Args:
        timeout: Seconds that a collective may take; None for what torch finds right.
    """
    if dist.is_initialized() and dist.get_world_size() != environment.world_size:
        environment = _as_in_group(environment)
    if environment.world_size == 1:
        device = choose_device(
            environment, backend, Exchange(None, rank=0, world_size=1)
        )
        return Membership(environment, device, None, None, owns_group=False)
    if environment.rank == 0:
        raise_limit_of_open_files()
    wait_for_threads_at_exit()
    owns_group = not dist.is_initialized()
    store = open_store(environment)
    exchange = Exchange(store, rank=environment.rank, world_size=environment.world_size)
    device = choose_device(environment, backend, exchange)
    links = connect_all(store, rank=environment.rank, world_size=environment.world_size)
    if owns_group:
        _start_process_group(environment, store, device, timeout=timeout)
    return Membership(environment, device, store, links, owns_group)


def _as_in_group(environment: Environment) -> Environment:
    """Return where this replica stands in the process group. Collective."""
    rank, hosts = dist.get_rank(), gather(socket.gethostname())
    return replace(
        environment,
        rank=rank,
        local_rank=hosts[:rank].count(hosts[rank]),
        world_size=len(hosts),
        local_world_size=hosts.count(hosts[rank]),
    )


def _start_process_group(
    environment: Environment,
    store: JobStore,
    device: torch.device,
    *,
    timeout: float | None = None,
) -> None:
    """Start the default process group over this generation's own store. Collective."""
    if environment.local_world_size == environment.world_size:
        keep_gloo_on_loopback()
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=PrefixStore(PROCESS_GROUP, store.client),
        rank=environment.rank,
        world_size=environment.world_size,
        device_id=device if device.type == "cuda" else None,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
